// A query and documents -> the documents, best first.

import { call } from "./api.js";
import { bar, count, el, fixed } from "./dom.js";
import { cost, InputError, lines } from "./forms.js";

/** How a model ranks, or null and why it cannot. */
export function wayToRank({ card }) {
  const { head } = card;
  if (head?.per === "text" && head.labels.length !== 1) {
    return [null, `${card.model} gives ${head.labels.length} labels, and a ranking needs one number per pair: see Tokens.`];
  }
  if (head?.per === "text") return ["The model reads the query together with each document.", ""];
  return [`The model reads each text by itself, and what it makes of them is compared: vectors by ${card.similarity}.`, ""];
}

export async function rank(model, fields, signal) {
  const query = String(fields.get("query")).trim();
  const documents = lines(fields.get("documents"));
  if (!query) throw new InputError("Give a query.");
  if (!documents.length) throw new InputError("Give at least one document, one per line.");
  const body = { model: model.name, query, documents, return_documents: false };
  const { data, headers } = await call("rerank", body, signal);
  const width = widths(data.results.map((result) => result.relevance_score));
  const rows = data.results.map(({ index, relevance_score: score }, place) =>
    bar(
      el("span", {}, el("span", { class: "number", title: `Document ${index + 1}` }, place + 1), documents[index]),
      width(score),
      Math.abs(score) < 1e-3 && score !== 0 ? score.toExponential(2) : fixed(score, 4),
      { "data-index": index, class: "bar-row ranked" }));
  return {
    status: `${count(documents.length, "document")} · ${cost(data.usage, headers)}`,
    nodes: [el("ol", { class: "bars ranking" }, rows)],
  };
}

/** Scores between 0 and 1 as they are, others between the lowest, or 0, and the highest. */
function widths(scores) {
  const [low, high] = [Math.min(0, ...scores), Math.max(1, ...scores)];
  return (score) => (score - low) / (high - low);
}
