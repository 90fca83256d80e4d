// Late interaction: which token of a document, or patch of a picture, each token of a query finds.

import { call } from "./api.js";
import { count, el, fixed } from "./dom.js";
import { cutOff, InputError } from "./forms.js";
import { contentOf } from "./picture.js";
import { overPatches, withPlaces } from "./patches.js";
import { choosable, labelled, tokensOf } from "./tokens.js";
import { dot, floats, maxsim, rowsOf } from "./vectors.js";

export async function align(model, fields, signal) {
  const texts = ["query", "document"].map((name) => String(fields.get(name) ?? "").trim());
  const file = fields.get("picture");
  const isPicture = model.info.card.modalities.includes("image") && file.size > 0;
  if (texts[0] === "" || (texts[1] === "" && !isPicture)) throw new InputError("Give a query and a document.");
  const inputs = ["query", "document"].map((side, i) => ({ input: [texts[i]], input_type: side }));
  if (isPicture) inputs[1] = { messages: [{ role: "user", content: await contentOf(file) }] };
  const [query, answer] = await Promise.all(inputs.map((input) => tokenVectors(model, input, signal)));
  const found = await maxsim(query.rows, answer.rows);
  const mean = found.score / query.rows.length;
  return {
    status: [count(query.tokens.length, "query token"), count(answer.tokens.length, "document token"), cutOff(query.headers, answer.headers)]
      .filter(Boolean).join(" · "),
    nodes: [
      el("p", { class: "headline" },
        el("strong", { id: "maxsim" }, fixed(found.score, 3)), ` MaxSim · ${fixed(mean, 3)} per query token`),
      isPicture ? await overPatches(model, file, query, answer, found.best) : picture(query, answer, found.best),
      asTable(query, answer, found.best),
    ],
  };
}

async function tokenVectors(model, input, signal) {
  const body = {
    model: model.name, task: "token_embed", ...input, truncate: true,
    encoding_format: "base64", return_token_ids: true,
  };
  const { data, headers } = await call("pooling", body, signal);
  const [entry] = data.data;
  const rows = rowsOf(floats(entry.data), entry.shape);
  const tokens = labelled(await tokensOf(model, entry.prompt_token_ids, signal), rows.length, entry.row_places);
  const grids = entry.image_grids;
  return { rows, tokens: withPlaces(tokens, grids), headers, grids };
}

/** Both texts as tokens, with a line from each of the query's to what it finds. One that is chosen stands alone. */
function picture(query, answer, best) {
  const found = new Set(best.map((one) => one.place));
  const { nodes: above, choose, leave } = choosable(query.tokens, show);
  const below = answer.tokens.map((token, j) =>
    el("span", { class: `token${token.isSpecial ? " special" : ""}${found.has(j) ? " found" : ""}` }, token.text));
  const lines = best.map(() => el("svg:path"));
  const said = el("p", { class: "said", role: "status" });
  const figure = el("figure", { class: "alignment", onpointerleave: leave },
    el("h2", {}, "Query"), el("div", { class: "row-of-tokens above" }, above),
    el("h2", {}, "Document"), el("div", { class: "row-of-tokens below" }, below),
    el("svg:svg", { "aria-hidden": "true" }, lines), said);

  function show(chosen) {
    figure.classList.toggle("has-choice", chosen !== null);
    lines.forEach((line, i) => line.classList.toggle("chosen", i === chosen));
    const near = chosen === null ? [] : answer.rows.map((row) => dot(query.rows[chosen], row));
    below.forEach((node, j) => {
      node.classList.toggle("chosen", chosen !== null && best[chosen].place === j);
      node.style.setProperty("--heat", chosen === null ? "0%" : `${(100 * Math.max(0, near[j])).toFixed(1)}%`);
    });
    said.textContent = chosen === null
      ? "Point at a token of the query, or tap it."
      : `“${query.tokens[chosen].text}” finds “${answer.tokens[best[chosen].place].text}”, ${fixed(best[chosen].similarity, 3)}`;
  }

  function draw() {
    const { left, top } = figure.getBoundingClientRect();
    best.forEach(({ place, similarity }, i) => {
      const [from, to] = [above[i], below[place]].map((node) => node.getBoundingClientRect());
      const [x1, y1] = [from.left + from.width / 2 - left, from.bottom - top];
      const [x2, y2] = [to.left + to.width / 2 - left, to.top - top];
      const middle = (y1 + y2) / 2;
      lines[i].setAttribute("d", `M${x1} ${y1}C${x1} ${middle} ${x2} ${middle} ${x2} ${y2}`);
      lines[i].style.setProperty("--strength", Math.max(0.12, similarity).toFixed(2));
    });
  }

  new ResizeObserver(draw).observe(figure);
  choose(null);
  return figure;
}

function asTable(query, answer, best) {
  return el("details", {},
    el("summary", {}, "As a table"),
    el("table", { class: "plain" },
      el("thead", {}, el("tr", {}, ["Query token", "Document token", "Similarity"].map((name) => el("th", { scope: "col" }, name)))),
      el("tbody", {}, best.map(({ place, similarity }, i) =>
        el("tr", {},
          el("td", {}, query.tokens[i].text), el("td", {}, answer.tokens[place].text),
          el("td", { class: "numeric" }, fixed(similarity, 3)))))));
}
