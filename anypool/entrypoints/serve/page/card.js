// What the server says about a model.

import { el, short } from "./dom.js";

const number = (value) => Number(value).toLocaleString("en");
const yes = (value) => (value ? "yes" : "no");

/** Cards of facts. */
export function cards({ info, name }) {
  const { card } = info;
  return [
    group("Model", [
      ["Name", name],
      ["Architecture", card.architecture],
      ["Class", `${card.class} (${card.runs})`],
      ["Parameters", short(card.parameters)],
      ["Type", card.dtype],
      ["Device", card.device],
      ["Quantisation", quantization(card.quantization)],
      ["Attention", attention(card.attention)],
    ]),
    group("Tasks", [
      ["Tasks", tags(card.tasks)],
      ["Similarity", card.similarity],
      ["Rerank template", card.rerank_template],
      ...head(card.head),
    ]),
    group("Pooling", [
      ["Vector", card.multi_vector ? null : `${number(card.embedding_size)} dimensions`],
      ["Trained sizes", card.trained_dimensions?.join(", ")],
      ...Object.entries(card.pooling).map(([key, setting]) => [words(key), said(setting)]),
      ["Modules", card.modules.map((module) => module.type).join(", ")],
    ]),
    ...multiVector(card.multi_vector),
    group("Input", [
      ["Longest", `${number(card.max_model_len)} tokens${card.enable_chunked_processing ? "; longer ones in windows" : ""}`],
      ["Vocabulary", `${number(card.vocab_size)} tokens`],
      ["Default prompt", card.default_prompt_name],
      ...Object.entries(card.prompts).map(([key, text]) => [`Prompt “${key}”`, text === "" ? "none" : `“${text}”`]),
    ]),
    group("Limits", [
      ["Batch", `${number(card.max_num_batched_tokens)} tokens, ${number(card.max_num_seqs)} prompts`],
      ["Requests at once", number(info.max_concurrent_requests)],
      ["Inputs per request", number(info.max_client_batch_size)],
      ["Chunked prefill", yes(card.enable_chunked_prefill)],
      ["Prefix caching", yes(card.enable_prefix_caching)],
      ["anypool", info.version],
    ]),
  ];
}

function group(title, facts) {
  const rows = facts
    .filter(([, value]) => value !== null && value !== undefined && value !== "")
    .map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, value)));
  return el("article", { class: "card" }, el("h2", {}, title), el("dl", {}, rows));
}

function head(facts) {
  if (facts === null) return [["Head", "none"]];
  const layers = facts.layers.map((layer) =>
    [layer.name, layer.in_features === null ? "" : `${layer.in_features} → ${layer.out_features}`, layer.activation ?? ""]
      .filter(Boolean).join(" "));
  return [["Head", `${layers.join(", ")}, per ${facts.per}`], ["Labels", tags(facts.labels)]];
}

function multiVector(facts) {
  if (!facts) return [];
  const side = ({ marker, length, expanded_to: expanded, skipped_tokens: skipped }) =>
    [marker && `marked “${marker}”`, length && `at most ${number(length)} tokens`, expanded && `expanded to ${expanded} tokens`,
      skipped > 0 && `${number(skipped)} tokens have no vector`].filter(Boolean).join(", ") || "as they are";
  return [group("Multi-vector", [
    ["Layout", facts.library],
    ["Vector", facts.dimensions && `${number(facts.dimensions)} dimensions per token`],
    ["Queries", side(facts.query)],
    ["Documents", side(facts.document)],
    ["Token pooling", facts.pool_factor && `about ${facts.pool_factor} tokens of a document become one vector`],
  ])];
}

function tags(names) {
  return el("span", { class: "tags" }, names.map((name) => el("span", { class: "tag" }, name)));
}

function quantization(facts) {
  return facts === null ? "none" : `int8, ${facts.layers} layers, mean cosine ${facts.mean_cosine.toFixed(4)}`;
}

function attention({ causal, sliding_window: window }) {
  return `${causal ? "causal" : "in both directions"}${window === null ? "" : `, window of ${number(window)} tokens`}`;
}

function words(key) {
  const text = key.replaceAll("_", " ");
  return text[0].toUpperCase() + text.slice(1);
}

function said({ value, source }) {
  if (value === null) return null;
  const text = Array.isArray(value) ? value.join(" + ") : typeof value === "boolean" ? yes(value) : String(value);
  return [text, el("small", {}, source)].map((part) => el("span", {}, part));
}
