// The page: its views, and the model that they ask.

import { call } from "./api.js";
import { cards } from "./card.js";
import { el } from "./dom.js";
import { onRun, problem } from "./forms.js";
import { live } from "./live.js";
import { takePictures } from "./picture.js";
import { runMode, showModes } from "./modes.js";
import { rank, wayToRank } from "./rank.js";
import { compare } from "./similarity.js";

const sections = Object.fromEntries([...document.querySelectorAll("main > section")].map((one) => [one.id, one]));
const select = document.getElementById("model");
const model = { name: "", info: null };

const clear = [
  onRun(sections.similarity, (fields, signal) => compare(model, fields, signal)),
  onRun(sections.rank, (fields, signal) => rank(model, fields, signal)),
];
const clearTokens = onRun(sections.tokens, (fields, signal) => runMode(sections.tokens, model, fields, signal));
takePictures(sections.tokens);
const charts = live(sections.live);

function shown() {
  const name = location.hash.slice(1);
  return name in sections ? name : "similarity";
}

/** Shows the view that the address names. */
function show() {
  const name = shown();
  for (const [id, section] of Object.entries(sections)) section.hidden = id !== name;
  for (const link of document.querySelectorAll("nav a")) {
    const isHere = link.hash === `#${name}`;
    if (isHere) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
    if (isHere) document.title = `${link.textContent} – anypool`;
  }
  watch();
}

/** Reads the metrics while they can be seen. */
function watch() {
  if (shown() === "live" && document.visibilityState === "visible" && model.info) charts.start(model.name);
  else charts.stop();
}

/** Takes a model: what it can do decides what the views offer. */
async function take(name) {
  const { data } = await call(`info?model=${encodeURIComponent(name)}`);
  Object.assign(model, { name, info: data });
  clear.forEach((one) => one());
  showModes(sections.tokens, model, clearTokens);
  const [way, why] = wayToRank(data);
  document.getElementById("rank-way").textContent = way ?? why;
  sections.rank.classList.toggle("unavailable", way === null);
  const embeds = data.card.tasks.includes("embed");
  document.getElementById("similarity-way").textContent = embeds
    ? "The cosine between the vectors of each two texts."
    : `${name} gives no vector for a whole text, so there is nothing to compare here: see Rank and Tokens.`;
  sections.similarity.classList.toggle("unavailable", !embeds);
  sections["model-card"].querySelector(".cards").replaceChildren(...cards(model));
  watch();
}

/** Does something at the page's top level, where errors stand above all views. */
async function attempt(work) {
  const box = document.getElementById("problem");
  box.replaceChildren();
  try {
    await work();
  } catch (error) {
    const again = el("button", { type: "button", class: "quiet", onclick: () => attempt(work) }, "Try again");
    box.replaceChildren(el("div", { class: "with-action" }, problem(error), again));
  }
}

async function begin() {
  const { data } = await call("v1/models");
  const names = data.data.map((one) => one.id);
  select.replaceChildren(...names.map((name) => el("option", { value: name }, name)));
  select.disabled = names.length < 2;
  await take(names[0]);
  document.body.dataset.ready = "true";
}

select.addEventListener("change", () => attempt(() => take(select.value)));
addEventListener("hashchange", show);
document.addEventListener("visibilitychange", watch);
show();
attempt(begin);
