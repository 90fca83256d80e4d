// Token ids as texts.

import { call } from "./api.js";

/** How ids are written, and which of them are special: `[{text, isSpecial}]`. */
export async function tokensOf(model, ids, signal) {
  const body = { model: model.name, ids: ids.map((id) => [id]) };
  const [all, plain] = await Promise.all(
    [false, true].map((skip) => call("decode", { ...body, skip_special_tokens: skip }, signal)));
  return all.data.map((text, i) => ({ text: visible(text), isSpecial: text !== "" && plain.data[i] === "" }));
}

function visible(text) {
  if (text === "") return "␣";
  return text.replace(/\n/g, "⏎").replace(/\t/g, "⇥").replace(/^ +| +$/g, (spaces) => "␣".repeat(spaces.length)) || "␣";
}

/**
 * The token of each row, at its place where not every token has a row. Rows that belong to no single token only have
 * their number.
 */
export function labelled(tokens, rows, places) {
  const found = places ? places.map((place) => tokens[place]) : tokens;
  return found.length === rows ? found : Array.from({ length: rows }, (_, i) => ({ text: `${i + 1}`, isSpecial: false }));
}
