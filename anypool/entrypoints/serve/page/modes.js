// The modes of the view of tokens: what a model says token by token, or of a text as a whole.

import { align } from "./alignment.js";
import { el } from "./dom.js";
import { labels, reward, tokenLabels } from "./labels.js";

const MODES = {
  alignment: ["Alignment", "For each token of the query, the token of the document, or the patch of the picture, whose vector is nearest (MaxSim).", align],
  "token-labels": ["Token labels", "The label of each token.", tokenLabels],
  labels: ["Labels", "The labels of the whole text, with their scores.", labels],
  reward: ["Reward", "The reward of the text, or of each of its steps.", reward],
};

/** What of this a model can do, what suits it best first. */
export function modesOf({ card }) {
  const { head, tasks } = card;
  const able = (task) => head !== null && tasks.includes(task);
  const hasSteps = (card.pooling.step_tag_id?.value ?? null) !== null;
  const modes = [];
  if (able("reward") && (hasSteps || (head.per === "text" && head.labels.length === 1))) modes.push("reward");
  if (able("classify")) modes.push("labels");
  if (able("token_classify") && !hasSteps) modes.push("token-labels");
  if (tasks.includes("token_embed")) modes.push("alignment");
  const first = hasSteps ? "reward" : head?.per === "token" ? "token-labels" : head ? "labels" : "alignment";
  return modes.sort((a, b) => (b === first) - (a === first));
}

/** Shows the modes of a model. */
export function showModes(section, model, onChange) {
  const modes = modesOf(model.info);
  const readsImages = model.info.card.modalities.includes("image");
  const choices = section.querySelector(".modes");
  choices.hidden = modes.length < 2;
  choices.replaceChildren(choices.querySelector("legend"), ...modes.map((mode, i) =>
    el("label", {},
      el("input", { type: "radio", name: "mode", value: mode, checked: i === 0, onchange: () => choose(mode) }),
      el("span", {}, MODES[mode][0]))));

  function choose(mode) {
    section.dataset.mode = mode;
    section.querySelector("#mode-about").textContent = MODES[mode]?.[1] ?? "";
    for (const field of section.querySelectorAll("[data-modes]")) {
      field.hidden = !field.dataset.modes.split(" ").includes(mode) || ("image" in field.dataset && !readsImages);
    }
    onChange();
  }
  if (!readsImages) section.querySelector("form").elements.picture.value = "";
  section.querySelector("form").elements.picture.dispatchEvent(new Event("change"));
  choose(modes[0] ?? "");
}

export function runMode(section, model, fields, signal) {
  return MODES[section.dataset.mode][2](model, fields, signal);
}
