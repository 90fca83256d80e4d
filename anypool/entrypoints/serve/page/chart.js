// A small line chart that moves along.

import { el } from "./dom.js";

const WIDTH = 300;
const HEIGHT = 80;
// The least time that is drawn, so that a line does not begin with a jump across the whole chart.
const LEAST_S = 60;

/**
 * A chart of one or two lines, as long as there are readings.
 * @param {{title: string, lines: {key: string, name: string, format: (value: number) => string}[]}} what
 */
export function chart({ title, lines }) {
  const paths = lines.map((_, i) => el("svg:path", { class: `line line-${i}` }));
  const values = lines.map((line) => el("strong", {}, "–"));
  const [top, start] = [el("span", { class: "top" }), el("span")];
  const drawing = el("svg:svg", {
    viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", role: "img", "aria-label": title,
  },
    el("svg:path", { class: "grid", d: `M0 .5H${WIDTH}M0 ${HEIGHT / 2}H${WIDTH}M0 ${HEIGHT - 0.5}H${WIDTH}` }), paths);
  const node = el("article", { class: "card chart" },
    el("h2", {}, title),
    el("p", { class: "values" }, lines.map((line, i) =>
      el("span", { class: `value value-${i}` }, values[i], el("small", {}, line.name)))),
    el("div", { class: "plot" }, drawing, top),
    el("p", { class: "axis" }, start, el("span", {}, "now")));

  /** Draws readings `{at, [key]: number|null}`, oldest first, times in seconds. */
  function draw(readings) {
    const last = readings.at(-1);
    const span = Math.max(LEAST_S, last ? last.at - readings[0].at : 0);
    start.textContent = span < 120 ? `${Math.round(span)} s ago` : `${Math.round(span / 60)} min ago`;
    const seen = readings.flatMap((reading) => lines.map((line) => reading[line.key])).filter((value) => value !== null);
    const highest = niceAbove(Math.max(0, ...seen));
    top.textContent = seen.length ? lines[0].format(highest) : "";
    lines.forEach((line, i) => {
      const value = last?.[line.key] ?? null;
      values[i].textContent = value === null ? "–" : line.format(value);
      paths[i].setAttribute("d", pathOf(readings, line.key, (at) => WIDTH * (1 - (last.at - at) / span), highest));
    });
    const said = lines.map((line, i) => `${line.name} ${values[i].textContent}`).join(", ");
    drawing.setAttribute("aria-label", `${title}: ${said}`);
  }

  return { node, draw };
}

/** A path through the readings that have a value; one without is a gap. */
function pathOf(readings, key, x, highest) {
  let isDrawing = false;
  const steps = readings.map((reading) => {
    const value = reading[key];
    const letter = isDrawing ? "L" : "M";
    isDrawing = value !== null;
    if (!isDrawing) return "";
    const point = `${x(reading.at).toFixed(1)} ${(HEIGHT - 1 - (value / highest) * (HEIGHT - 2)).toFixed(1)}`;
    return letter === "M" ? `M${point}h.01` : `L${point}`;  // the h makes a single reading visible
  });
  return steps.join("");
}

/** The next of 1, 2 and 5 times a power of ten. */
function niceAbove(value) {
  if (value <= 0) return 1;
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 5, 10].map((step) => step * power).find((step) => step >= value * 0.999);
}
