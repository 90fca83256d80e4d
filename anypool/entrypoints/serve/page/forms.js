// A form, and where its answer goes.

import { count, el } from "./dom.js";

/**
 * Runs a view's form. A later run takes the place of one that is still going; the page stays usable meanwhile.
 * @param {HTMLElement} section The view.
 * @param {(fields: FormData, signal: AbortSignal) => Promise<{status: string, nodes: Node[]}>} run
 * @returns {() => void} Clears what is shown.
 */
export function onRun(section, run) {
  const form = section.querySelector("form");
  const [status, failure, result] = [".status", ".failure", ".result"].map((name) => section.querySelector(name));
  let running = null;

  async function start() {
    running?.abort();
    const controller = (running = new AbortController());
    section.setAttribute("aria-busy", "true");
    status.textContent = "Running…";
    failure.replaceChildren();
    try {
      const answer = await run(new FormData(form), controller.signal);
      if (running !== controller) return;
      status.textContent = answer.status;
      result.replaceChildren(...answer.nodes);
    } catch (error) {
      if (running !== controller) return;
      status.textContent = "";
      result.replaceChildren();
      failure.replaceChildren(problem(error));
    }
    section.removeAttribute("aria-busy");
    running = null;
  }

  form.addEventListener("submit", (event) => {
    event.preventDefault();
    start();
  });
  form.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) form.requestSubmit();
  });
  return () => {
    running?.abort();
    running = null;
    section.removeAttribute("aria-busy");
    status.textContent = "";
    failure.replaceChildren();
    result.replaceChildren();
  };
}

/** An error in words. */
export function problem(error) {
  return el("p", { class: "problem" }, error.message);
}

/** A mistake of the user's that the server need not be asked about. */
export class InputError extends Error {}

/** The lines of a text that are not empty. */
export function lines(text) {
  return String(text).split("\n").map((line) => line.trim()).filter(Boolean);
}

/** What an answer took: `42 tokens, 7 ms`, and what was cut off. */
export function cost(usage, headers) {
  const parts = usage ? [count(usage.prompt_tokens, "token")] : [];
  const total = Number(headers.get("x-total-time"));
  if (total) parts.push(`${total < 10 ? total.toFixed(1) : Math.round(total)} ms`);
  return [...parts, cutOff(headers)].filter(Boolean).join(" · ");
}

/** How much of the texts of some answers was cut off; nothing where nothing was. */
export function cutOff(...answers) {
  const cut = answers.reduce((sum, headers) => sum + Number(headers.get("x-truncated-tokens")), 0);
  return cut ? `${count(cut, "token")} cut off` : "";
}
