// What a head says: labels of a text, labels of its tokens, rewards.

import { call } from "./api.js";
import { bar, count, el, fixed } from "./dom.js";
import { cost, InputError } from "./forms.js";
import { labelled, tokensOf } from "./tokens.js";

const COLOURS = 8;
const SHOWN = 20;

function textOf(fields) {
  const text = String(fields.get("text")).trim();
  if (!text) throw new InputError("Give a text.");
  return text;
}

export async function labels(model, fields, signal) {
  const [text, pair] = [textOf(fields), String(fields.get("pair")).trim()];
  const inputs = [pair ? [text, pair] : [text]];
  const { data, headers } = await call("predict", { model: model.name, inputs }, signal);
  const scores = data[0];
  return {
    status: `${count(scores.length, "label")} · ${cost(null, headers)}`,
    nodes: [bars(scores)],
  };
}

function bars(scores) {
  const most = Math.max(1, ...scores.map((one) => one.score));
  const shown = scores.slice(0, SHOWN).map(({ label, score }) => bar(label, score / most, fixed(score, 4)));
  const rest = scores.length - shown.length;
  return el("ol", { class: "bars short" }, shown, rest > 0 && el("li", { class: "hint" }, `and ${count(rest, "label")} more`));
}

export async function tokenLabels(model, fields, signal) {
  const body = { model: model.name, task: "token_classify", input: [textOf(fields)], truncate: true, return_token_ids: true };
  const { data, headers } = await call("pooling", body, signal);
  const [entry] = data.data;
  const names = model.info.card.head.labels;
  const tokens = labelled(await tokensOf(model, entry.prompt_token_ids, signal), entry.data.length);
  const rows = entry.data.map((scores) =>
    scores.map((score, i) => ({ label: names[i] ?? `LABEL_${i}`, score })).sort((a, b) => b.score - a.score));
  return {
    status: cost(data.usage, headers),
    nodes: tokenFigure(tokens, rows, colours(names)),
  };
}

/** A colour's number for each label: B-PER and I-PER share one, and O, which means nothing, has none. */
function colours(names) {
  const kinds = [...new Set(names.filter((name) => name !== "O").map(kindOf))];
  return (label) => (label === "O" ? null : kinds.indexOf(kindOf(label)) % COLOURS);
}

function kindOf(label) {
  return label.replace(/^[BIESL]-/, "");
}

function tokenFigure(tokens, rows, colourOf) {
  const chosen = el("div", { class: "chosen-token" });
  const chips = tokens.map((token, i) => {
    const [{ label, score }] = rows[i];
    const colour = token.isSpecial ? null : colourOf(label);
    return el("button", {
      type: "button",
      class: `token labelled${token.isSpecial ? " special" : ""}${colour === null ? "" : ` colour-${colour}`}`,
      title: `${label} ${fixed(score, 3)}`,
      onclick: () => choose(i),
    }, el("span", {}, token.text), el("small", {}, label));
  });

  function choose(i) {
    chips.forEach((chip, j) => chip.setAttribute("aria-pressed", String(i === j)));
    chosen.replaceChildren(el("h2", {}, "Token ", el("q", {}, tokens[i].text)), bars(rows[i]));
  }

  choose(Math.max(0, tokens.findIndex((token) => !token.isSpecial)));
  return [el("div", { class: "row-of-tokens" }, chips), chosen];
}

export async function reward(model, fields, signal) {
  const body = { model: model.name, input: [textOf(fields)], truncate: true };
  const { data, headers } = await call("reward", body, signal);
  const given = data.data[0].reward;
  const status = cost(data.usage, headers);
  if (typeof given === "number") {
    return { status, nodes: [el("p", { class: "headline" }, el("strong", {}, fixed(given, 4)), " reward")] };
  }
  const steps = given.map((step, i) => bar(`Step ${i + 1}`, step, Number(step).toPrecision(4)));
  return { status: `${count(given.length, "step")} · ${status}`, nodes: [el("ol", { class: "bars short" }, steps)] };
}
