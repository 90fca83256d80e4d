// Texts -> a table of the cosines between their vectors, coloured.

import { call } from "./api.js";
import { count, el, fixed } from "./dom.js";
import { cost, InputError, lines } from "./forms.js";
import { cosines, floats } from "./vectors.js";

// A table of more would be slow to draw and of no use to read.
const MOST = 60;
const SHOWN_PAIRS = 3;

export async function compare(model, fields, signal) {
  const texts = lines(fields.get("texts"));
  if (texts.length < 2) throw new InputError("Give at least two texts, one per line.");
  if (texts.length > MOST) throw new InputError(`${texts.length} texts are too many to show: give at most ${MOST}.`);
  const body = { model: model.name, input: texts, encoding_format: "base64", truncate: true };
  const { data, headers } = await call("v1/embeddings", body, signal);
  const vectors = data.data.map((entry) => floats(entry.embedding));
  const table = cosines(vectors);
  const status = `${count(texts.length, "text")} · ${vectors[0].length} dimensions · ${cost(data.usage, headers)}`;
  return { status, nodes: [heatMap(texts, table), pairs(texts, table)] };
}

function heatMap(texts, table) {
  const [low, high] = range(table);
  const share = (value) => `${(100 * Math.min(1, Math.max(0, (value - low) / (high - low)))).toFixed(1)}%`;
  const picked = el("div", { class: "picked", "aria-hidden": "true" }, "Point at a cell to read both texts.");
  const head = el("tr", {}, el("td"), texts.map((text, i) => el("th", { scope: "col", title: text }, i + 1)));
  const rows = table.map((row, i) =>
    el("tr", {},
      el("th", { scope: "row", title: texts[i] },
        el("span", { class: "number" }, i + 1), el("span", { class: "name" }, texts[i])),
      row.map((value, j) =>
        el("td", {
          class: i === j ? "same" : "cell",
          "--heat": share(value),
          onpointerenter: () => pick(i, j),
          onclick: () => pick(i, j),
        }, fixed(value, 2)))));

  function pick(i, j) {
    if (i === j) return;
    picked.replaceChildren(...pair(texts, i, j, table[i][j]));
  }

  return el("figure", { class: "heat", "--texts": texts.length },
    el("div", { class: "scroll", role: "region", "aria-label": "Similarities", tabindex: 0 },
      el("table", {}, el("caption", { class: "unseen" }, "Cosine similarity of each two texts"),
        el("thead", {}, head), el("tbody", {}, rows))),
    el("figcaption", {},
      el("span", {}, fixed(low, 2)), el("span", { class: "ramp" }), el("span", {}, fixed(high, 2))),
    picked);
}

/** The colours' range: that of the values between different texts; of two texts, from 0 to 1. */
function range(table) {
  const values = table.flatMap((row, i) => row.filter((_, j) => i !== j));
  const [low, high] = [Math.min(...values), Math.max(...values)];
  return high - low < 1e-6 ? [0, 1] : [low, high];
}

function pairs(texts, table) {
  const listed = table
    .flatMap((row, i) => row.slice(i + 1).map((value, k) => [i, i + 1 + k, value]))
    .sort((a, b) => b[2] - a[2])
    .slice(0, SHOWN_PAIRS);
  return el("div", { class: "pairs" },
    el("h2", {}, "Closest"),
    el("ol", {}, listed.map(([i, j, value]) => el("li", {}, pair(texts, i, j, value)))));
}

function pair(texts, i, j, value) {
  return [
    el("span", { class: "score" }, fixed(value, 3)),
    el("span", { class: "both" }, numbered(texts, i), numbered(texts, j)),
  ];
}

function numbered(texts, i) {
  return el("span", {}, el("span", { class: "number" }, i + 1), el("span", {}, texts[i]));
}
