// Elements without markup: every text becomes a text node, so nothing in it is ever read as HTML.

const SVG = "http://www.w3.org/2000/svg";

/**
 * An element.
 * @param {string} name `div`, or `svg:path` for one of SVG.
 * @param {object} attributes Attributes; `--name` sets a CSS variable, `onname` a listener; false and null set nothing.
 * @param {...(Node|string|number|null)} children
 */
export function el(name, attributes = {}, ...children) {
  const node = name.startsWith("svg:")
    ? document.createElementNS(SVG, name.slice(4))
    : document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (key.startsWith("--")) node.style.setProperty(key, value);
    else if (key.startsWith("on")) node.addEventListener(key.slice(2), value);
    else node.setAttribute(key, value === true ? "" : value);
  }
  node.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== false));
  return node;
}

/** `1 text`, `2 texts`. */
export function count(number, noun) {
  return `${number.toLocaleString("en")} ${noun}${number === 1 ? "" : "s"}`;
}

/** A number as short as it can be read: 22.6 M - 12,345 - 123 - 12.3 - 0.125. */
export function short(number) {
  if (number >= 1e6) return `${short(number / 1e6)} M`;
  const digits = number >= 1000 ? { maximumFractionDigits: 0 } : { maximumSignificantDigits: 3 };
  return number.toLocaleString("en", digits);
}

/** A number with so many digits after the point, and a real minus. */
export function fixed(number, digits) {
  return number.toFixed(digits).replace("-", "−");
}

/** A label, its share of 1 as a bar, and what is written beside it. */
export function bar(label, share, text, attributes = {}) {
  const width = `${(100 * Math.min(1, Math.max(0, share))).toFixed(2)}%`;
  return el("li", { class: "bar-row", ...attributes },
    el("span", { class: "bar-label" }, label),
    el("span", { class: "bar-value" }, text),
    el("span", { class: "bar-track", "--width": width }, el("span", { class: "bar-fill" })));
}
