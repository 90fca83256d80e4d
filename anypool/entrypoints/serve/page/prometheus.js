// Prometheus' text form, and what two readings of counters say.

const SAMPLE = /^([a-zA-Z_:][\w:]*)(?:\{(.*)\})? (\S+)/;
const LABEL = /(\w+)="((?:[^"\\]|\\.)*)"/g;

/** Samples by name: `Map<string, {labels, value}[]>`. */
export function parse(text) {
  const samples = new Map();
  for (const line of text.split("\n")) {
    const match = line.startsWith("#") ? null : SAMPLE.exec(line);
    if (!match) continue;
    const labels = {};
    for (const [, name, value] of (match[2] ?? "").matchAll(LABEL)) {
      labels[name] = value.replace(/\\(.)/g, (_, letter) => (letter === "n" ? "\n" : letter));
    }
    if (!samples.has(match[1])) samples.set(match[1], []);
    samples.get(match[1]).push({ labels, value: numberOf(match[3]) });
  }
  return samples;
}

function numberOf(text) {
  return /Inf$/.test(text) ? (text.startsWith("-") ? -Infinity : Infinity) : Number(text);
}

/** The sum of a name's samples, or of those that `keeps` wants. */
export function total(samples, name, keeps = () => true) {
  return (samples.get(name) ?? []).reduce((sum, { labels, value }) => sum + (keeps(labels) ? value : 0), 0);
}

/**
 * A quantile of what a histogram counted between two readings, by linear interpolation within the bucket, as
 * Prometheus' histogram_quantile has it; null where nothing was counted.
 */
export function quantile(before, after, name, share) {
  const counts = (samples) =>
    new Map((samples.get(`${name}_bucket`) ?? []).map(({ labels, value }) => [numberOf(labels.le.replace("+", "")), value]));
  const [old, now] = [counts(before), counts(after)];
  const buckets = [...now].map(([bound, value]) => [bound, value - (old.get(bound) ?? 0)]).sort((a, b) => a[0] - b[0]);
  const all = buckets.at(-1)?.[1] ?? 0;
  if (all <= 0) return null;
  const i = buckets.findIndex(([, value]) => value >= share * all);
  const [low, below] = i === 0 ? [0, 0] : buckets[i - 1];
  const [high, upTo] = buckets[i];
  if (high === Infinity) return low;
  return low + ((high - low) * (share * all - below)) / (upTo - below);
}
