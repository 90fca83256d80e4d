// Numbers on vectors, in double precision.

/** float32 numbers from base64 of their bytes, little-endian, as every browser's own are. */
export function floats(base64) {
  return new Float32Array(Uint8Array.from(atob(base64), (letter) => letter.charCodeAt(0)).buffer);
}

/** Rows of a matrix. */
export function rowsOf(values, [rows, size]) {
  return Array.from({ length: rows }, (_, row) => values.subarray(row * size, (row + 1) * size));
}

export function dot(a, b) {
  let sum = 0;
  for (let i = 0; i < a.length; i++) sum += a[i] * b[i];
  return sum;
}

/** The cosine of the angle between each two vectors; that with a vector of zeros is 0. */
export function cosines(vectors) {
  const norms = vectors.map((vector) => Math.sqrt(dot(vector, vector)));
  return vectors.map((a, i) => vectors.map((b, j) => dot(a, b) / (norms[i] * norms[j] || 1)));
}

/**
 * For each query row the document row with the highest dot product, and their sum, the score of late interaction
 * (Khattab and Zaharia, "ColBERT", SIGIR 2020, equation 3). Now and then the browser gets a turn.
 * @returns {Promise<{score: number, best: {place: number, similarity: number}[]}>}
 */
export async function maxsim(query, rows) {
  const best = [];
  let turn = performance.now();
  for (const vector of query) {
    const similarities = rows.map((row) => dot(vector, row));
    const place = similarities.reduce((top, value, i) => (value > similarities[top] ? i : top), 0);
    best.push({ place, similarity: similarities[place] });
    if (performance.now() - turn > 12) {
      await new Promise((resolve) => setTimeout(resolve));
      turn = performance.now();
    }
  }
  return { score: best.reduce((sum, one) => sum + one.similarity, 0), best };
}
