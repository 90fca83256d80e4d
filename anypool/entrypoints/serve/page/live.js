// Throughput, latency and queue, from /metrics.

import { call } from "./api.js";
import { chart } from "./chart.js";
import { short } from "./dom.js";
import { problem } from "./forms.js";
import { parse, quantile, total } from "./prometheus.js";

const EVERY_MS = 2000;
const SPAN_S = 300;
// After so long without a reading, as when the computer slept, nobody knows what was in between.
const LONGEST_GAP_S = 8;
const LATENCY = "anypool_http_duration_seconds";

const rate = (value) => `${short(value)}/s`;
const time = (value) => (value < 1 ? `${short(1000 * value)} ms` : `${short(value)} s`);

/** The view: `{start, stop}`. It reads while it is open and its tab is in front. */
export function live(section) {
  const failure = section.querySelector(".failure");
  const charts = [
    chart({ title: "Requests", lines: [
      { key: "requests", name: "answered", format: rate }, { key: "refused", name: "refused or failed", format: rate }] }),
    chart({ title: "Latency", lines: [
      { key: "median", name: "median", format: time }, { key: "slow", name: "95th percentile", format: time }] }),
    chart({ title: "Tokens", lines: [{ key: "tokens", name: "through the model", format: rate }] }),
    chart({ title: "Queue", lines: [
      { key: "waiting", name: "inputs wait", format: short }, { key: "running", name: "requests run", format: short }] }),
  ];
  section.querySelector(".cards").replaceChildren(...charts.map((one) => one.node));
  let readings = [];
  let before = null;
  let timer = null;
  let model = null;

  async function read() {
    const own = (timer = {});
    try {
      const { data } = await call("metrics");
      if (timer !== own) return;
      note({ at: performance.now() / 1000, samples: parse(data) });
      failure.replaceChildren();
      charts.forEach((one) => one.draw(readings));
    } catch (error) {
      if (timer !== own) return;
      before = null;
      if (error.status === 404) {
        failure.replaceChildren(problem(new Error("There is nothing to show: the server was started with --no-metrics.")));
        return;
      }
      failure.replaceChildren(problem(error));
    }
    timer = setTimeout(read, EVERY_MS);
  }

  function note(now) {
    if (before) {
      const between = now.at - before.at > LONGEST_GAP_S ? [gap(before.at)] : [];
      readings = [...readings, ...between, compared(before, now, model)].filter((one) => one.at > now.at - SPAN_S);
    }
    before = now;
  }

  function stop() {
    if (typeof timer === "number") clearTimeout(timer);
    timer = before = null;
    if (readings.length) readings.push(gap(readings.at(-1).at));
  }

  return {
    start(name) {
      stop();
      if (name !== model) readings = [];
      model = name;
      charts.forEach((one) => one.draw(readings));
      read();
    },
    stop,
  };
}

const KEYS = ["requests", "refused", "median", "slow", "tokens", "waiting", "running"];

/** A reading without values, where nobody looked. */
function gap(at) {
  return { at, ...Object.fromEntries(KEYS.map((key) => [key, null])) };
}

/** What happened between two readings. Requests are those of the whole server, tokens and queue of one model. */
function compared(before, now, model) {
  const seconds = now.at - before.at;
  const ofModel = (labels) => labels.model === model;
  const rise = (name, keeps) => {
    const change = total(now.samples, name, keeps) - total(before.samples, name, keeps);
    return change < 0 ? null : change / seconds; // the server was started again
  };
  return {
    at: now.at,
    requests: rise(`${LATENCY}_count`),
    refused: rise("anypool_http_requests_total", (labels) => Number(labels.code) >= 400),
    median: quantile(before.samples, now.samples, LATENCY, 0.5),
    slow: quantile(before.samples, now.samples, LATENCY, 0.95),
    tokens: rise("anypool_computed_tokens_total", ofModel),
    waiting: total(now.samples, "anypool_queue_requests", ofModel),
    running: Math.max(0, total(now.samples, "anypool_http_requests_running") - 1), // without the one that asks
  };
}
