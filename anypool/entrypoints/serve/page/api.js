// Calls to the server that this page came from.

import { askForKey, storedKey } from "./key.js";

// The page may be mounted anywhere, so paths are relative to it.
const ROOT = new URL(".", document.baseURI);

/** What went wrong, in words for people. */
export class CallError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

/**
 * A GET without a body, else a POST.
 * @returns {Promise<{data: any, headers: Headers}>} JSON as an object, anything else as text.
 * @throws {CallError} The server refused, or did not answer. An abort is a DOMException.
 */
export async function call(path, body, signal) {
  for (;;) {
    const key = storedKey();
    const response = await send(path, body, key, signal);
    if (response.status === 401) {
      await askForKey(await problem(response), key);
      continue;
    }
    if (!response.ok) throw new CallError(response.status, await problem(response));
    const isJSON = (response.headers.get("content-type") ?? "").startsWith("application/json");
    return { data: isJSON ? await response.json() : await response.text(), headers: response.headers };
  }
}

async function send(path, body, key, signal) {
  const headers = key ? { Authorization: `Bearer ${key}` } : {};
  if (body) headers["Content-Type"] = "application/json";
  try {
    return await fetch(new URL(path, ROOT), {
      method: body ? "POST" : "GET",
      headers,
      body: body ? JSON.stringify(body) : undefined,
      cache: "no-store",
      signal,
    });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new CallError(0, "The server does not answer. Is it still running?");
  }
}

/** The message of an error, in whichever API's shape it is. */
async function problem(response) {
  let message = "";
  try {
    const { error, message: own } = await response.json();
    message = error?.message ?? error ?? own ?? "";
  } catch {
    message = response.statusText;
  }
  const wait = response.headers.get("retry-after");
  return `${message || `The server answered ${response.status}`}${wait ? ` (try again in ${wait} s)` : ""}`;
}
