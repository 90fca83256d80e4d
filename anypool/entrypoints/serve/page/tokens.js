// Token ids as texts, and tokens to choose from.

import { call } from "./api.js";
import { el } from "./dom.js";

/** How ids are written, and which of them are special: `[{text, isSpecial}]`. */
export async function tokensOf(model, ids, signal) {
  const different = [...new Set(ids)];
  const body = { model: model.name, ids: different.map((id) => [id]) };
  const [all, plain] = await Promise.all(
    [false, true].map((skip) => call("decode", { ...body, skip_special_tokens: skip }, signal)));
  const tokens = new Map(different.map((id, i) =>
    [id, { text: visible(all.data[i]), isSpecial: all.data[i] !== "" && plain.data[i] === "" }]));
  return ids.map((id) => tokens.get(id));
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

/**
 * Buttons of tokens, of which one at a time is chosen by pointing, by the keyboard, or for good by a click.
 * @param {(chosen: number|null) => void} onChoose
 * @returns {{nodes: HTMLElement[], choose: (chosen: number|null) => void, leave: (event: PointerEvent) => void}}
 */
export function choosable(tokens, onChoose) {
  let pinned = null;
  const nodes = tokens.map((token, i) =>
    el("button", {
      type: "button",
      class: token.isSpecial ? "token special" : "token",
      "aria-pressed": "false",
      onclick: () => choose((pinned = pinned === i ? null : i)),
      onfocus: (event) => event.target.matches(":focus-visible") && choose(i),
      onpointerenter: (event) => event.pointerType === "mouse" && choose(i),
    }, token.text));

  function choose(chosen) {
    nodes.forEach((node, i) => {
      node.setAttribute("aria-pressed", String(i === pinned));
      node.classList.toggle("chosen", i === chosen);
    });
    onChoose(chosen);
  }
  return { nodes, choose, leave: (event) => event.pointerType === "mouse" && choose(pinned) };
}
