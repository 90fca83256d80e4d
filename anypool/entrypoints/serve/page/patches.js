// A picture, and over it how near each of its patches is to a token of the query.

import { el, fixed } from "./dom.js";
import { InputError } from "./forms.js";
import { choosable } from "./tokens.js";
import { dot } from "./vectors.js";

// A picture is drawn no larger, in pixels, than it is ever shown.
const LONGEST_SIDE = 1400;
const HEAT = [224, 60, 20]; // red, green, blue
const MOST_OPAQUE = 178; // of 255: the picture stays readable

/** The picture, and the patches that the query's tokens find; of one that is chosen its similarity to every patch. */
export async function overPatches(model, file, query, answer, best) {
  const canvas = await drawn(file);
  if (answer.grids?.length !== 1) return withoutGrid(model, canvas);
  const [grid] = answer.grids;
  const found = patchesOf(grid, query, answer, best);
  const heat = el("canvas", { class: "patch-heat", width: grid.columns, height: grid.rows, "aria-hidden": "true" });
  const marks = el("div", { class: "marks", "aria-hidden": "true" });
  const said = el("p", { class: "said", role: "status" });
  const [low, high] = [el("span"), el("span")];
  const legend = el("figcaption", {}, low, el("span", { class: "ramp patch-ramp" }), high);
  const { nodes, choose, leave } = choosable(query.tokens, show);

  function show(chosen) {
    const values = chosen === null ? null : found.near[chosen];
    marks.replaceChildren(...(chosen === null ? found.all : [found.top[chosen]]).map((cell) => mark(grid, cell)));
    paint(heat, values);
    legend.classList.toggle("idle", chosen === null);
    said.textContent = chosen === null ? "Point at a token of the query, or tap it." : found.words(chosen);
    low.textContent = values ? fixed(Math.min(...values), 3) : "";
    high.textContent = values ? fixed(Math.max(...values), 3) : "";
  }

  choose(null);
  return el("figure", { class: "patches", onpointerleave: leave },
    el("h2", {}, "Query"), el("div", { class: "row-of-tokens above" }, nodes),
    el("h2", {}, `Picture, ${grid.rows} × ${grid.columns} patches`),
    stage(canvas, heat, marks), legend, said);
}

/** What the numbers say: similarities of tokens and patches, each token's best patch, and the patches of the score. */
function patchesOf(grid, query, answer, best) {
  const patches = answer.rows.slice(grid.first_row, grid.first_row + grid.rows * grid.columns);
  const near = query.rows.map((row) => patches.map((patch) => dot(row, patch)));
  const top = near.map((values) => values.indexOf(Math.max(...values)));
  const isPatch = (place) => place >= grid.first_row && place < grid.first_row + patches.length;
  const all = [...new Set(best.map(({ place }) => place).filter(isPatch))].map((place) => place - grid.first_row);

  function words(chosen) {
    const { place, similarity } = best[chosen];
    const patch = `patch in ${nameOf(grid, top[chosen])}, ${fixed(near[chosen][top[chosen]], 3)}`;
    const token = `“${query.tokens[chosen].text}”`;
    return isPatch(place)
      ? `${token} finds the ${patch}`
      : `${token} finds “${answer.tokens[place].text}” beside the picture, ${fixed(similarity, 3)}; its best is the ${patch}`;
  }
  return { near, top, all, words };
}

/** Tokens, of which those that are patches are called by where they stand in their picture. */
export function withPlaces(tokens, grids) {
  const named = [...tokens];
  for (const grid of grids ?? []) {
    for (let cell = 0; cell < grid.rows * grid.columns; cell++) {
      named[grid.first_row + cell] = { text: nameOf(grid, cell), isSpecial: false };
    }
  }
  return named;
}

function nameOf(grid, cell) {
  const [row, column] = cellOf(grid, cell);
  return `row ${row + 1}, column ${column + 1}`;
}

function withoutGrid(model, canvas) {
  return el("figure", { class: "patches" },
    el("p", { class: "hint" },
      `${model.name} cuts, crops or pads pictures: its patches have no single grid that could be drawn over this one.`),
    stage(canvas));
}

/** A picture as wide as there is room for, unless it would be too high. */
function stage(canvas, ...above) {
  return el("div", { class: "stage", "--shape": canvas.width / canvas.height }, canvas, ...above);
}

function cellOf(grid, cell) {
  return [Math.floor(cell / grid.columns), cell % grid.columns];
}

/** The outline of a patch, in shares of the picture: the model may see it in another shape than it is shown in. */
function mark(grid, cell) {
  const [row, column] = cellOf(grid, cell);
  const share = (number, of) => `${((100 * number) / of).toFixed(4)}%`;
  return el("span", {
    class: "patch",
    "data-row": row,
    "data-column": column,
    "--left": share(column, grid.columns),
    "--top": share(row, grid.rows),
    "--width": share(1, grid.columns),
    "--height": share(1, grid.rows),
  });
}

/** The first frame of a picture, upright. A canvas needs no address of it, which the page's policy would forbid. */
async function drawn(file) {
  let bitmap;
  try {
    bitmap = await createImageBitmap(file);
  } catch {
    throw new InputError(`${file.name} is no picture that this browser can read.`);
  }
  const scale = Math.min(1, LONGEST_SIDE / Math.max(bitmap.width, bitmap.height));
  const [width, height] = [bitmap.width, bitmap.height].map((side) => Math.max(1, Math.round(scale * side)));
  const canvas = el("canvas", { class: "picture", width, height, role: "img", "aria-label": file.name });
  canvas.getContext("2d").drawImage(bitmap, 0, 0, width, height);
  bitmap.close();
  return canvas;
}

/** One pixel per patch, the clearer the nearer: from the lowest similarity to the highest. */
function paint(canvas, values) {
  const context = canvas.getContext("2d");
  context.clearRect(0, 0, canvas.width, canvas.height);
  if (values === null) return;
  const [low, high] = [Math.min(...values), Math.max(...values)];
  const image = context.createImageData(canvas.width, canvas.height);
  values.forEach((value, i) => {
    image.data.set([...HEAT, high > low ? (MOST_OPAQUE * (value - low)) / (high - low) : 0], 4 * i);
  });
  context.putImageData(image, 0, 0);
}
