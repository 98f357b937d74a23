/**
 * Requests to the server that this page is from: JSON, streams of events, files, and errors that say what to do.
 *
 * An API key is kept in the session storage of this tab alone and sent as a bearer token.
 */

import { store, stored, withoutOptions } from "./dom.js";

const KEY = "regard.key";

/** An error of a request. `kind`: offline, key, busy, limit, other. */
export class ServiceError extends Error {
  constructor(message, more = {}) {
    super(message);
    Object.assign(this, { kind: "other", status: 0, retryAfter: 0 }, more);
  }
}

export const setKey = (key) => store("sessionStorage", KEY, key || null);
export const hasKey = () => Boolean(stored("sessionStorage", KEY));

function headers(more = {}) {
  const key = stored("sessionStorage", KEY);
  return key ? { ...more, Authorization: `Bearer ${key}` } : more;
}

/** Fetch, and throw a ServiceError unless the answer is good. An aborted request throws an AbortError as it is. */
async function request(path, options = {}) {
  let answer;
  try {
    answer = await fetch(path, { cache: "no-store", ...options, headers: headers(options.headers) });
  } catch (error) {
    throw failure(error);
  }
  if (!answer.ok) throw await refusal(answer);
  return answer;
}

const isAbort = (error) => error?.name === "AbortError";

function failure(error) {
  return isAbort(error) ? error : new ServiceError("The server cannot be reached.", { kind: "offline" });
}

/** Return the error of an answer: of Regard's own form, of LibreTranslate's ({"error": text}), or of a proxy (no JSON). */
async function refusal(answer) {
  const { status } = answer;
  const said = await answer.json().then((body) => body?.error ?? body?.detail, () => null);
  const { message = "", limit, value, code } = typeof said === "string" ? { message: said } : said ?? {};
  const retryAfter = Number(answer.headers.get("Retry-After")) || 0;
  const fault = { status, code, limit, value, retryAfter, kind: kindOf(status, limit) };
  const error = new ServiceError(sentence(message) || plain(status), fault);
  if (fault.kind === "key") dispatchEvent(new CustomEvent("key-wanted", { detail: error }));
  return error;
}

function kindOf(status, limit) {
  if (status === 401 || status === 403) return "key";
  if (status === 429 || status === 502 || status === 503 || status === 504) return "busy";
  return status === 413 || limit !== undefined ? "limit" : "other";
}

function plain(status) {
  if (status === 401 || status === 403) return "This server wants an API key.";
  if (status === 413) return "This is larger than the server accepts.";
  if (status === 429) return "Too many requests at once.";
  if (status === 504) return "This took longer than the server allows.";
  if (status === 502 || status === 503) return "The server is busy or starting.";
  return `The server answered with error ${status}.`;
}

/** Return a message that begins with a capital letter and ends with a full stop. */
function sentence(message) {
  const text = withoutOptions(String(message ?? "").trim());
  return text && text + (/[.!?…]$/.test(text) ? "" : ".");
}

async function json(answer) {
  try {
    return await answer.json();
  } catch (error) {
    if (isAbort(error)) throw error;
    throw new ServiceError("The answer of the server was cut off.", { kind: "offline" });
  }
}

export const get = async (path, signal) => json(await request(path, { signal }));

const posted = (body, signal) => ({
  method: "POST", body: JSON.stringify(body), signal, headers: { "Content-Type": "application/json" },
});

export const post = async (path, body, signal) => json(await request(path, posted(body, signal)));

/** Yield {event, data} of an answer in Server-Sent Events; an `error` event is thrown. */
export async function* events(path, body, signal) {
  const answer = await request(path, posted(body, signal));
  let rest = "";
  try {
    const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
    for (;;) {
      const { value, done } = await reader.read();
      if (done) break;
      const blocks = (rest + value).replaceAll("\r\n", "\n").split("\n\n");
      rest = blocks.pop();
      for (const block of blocks) {
        const one = parse(block);
        if (one?.event === "error") throw streamError(one.data);
        if (one) yield one;
      }
    }
  } catch (error) {
    throw error instanceof ServiceError ? error : failure(error);
  }
}

function parse(block) {
  const lines = block.split("\n").map((line) => line.split(/:(.*)/s));
  const all = (name) => lines.filter(([key]) => key === name).map(([, value = ""]) => value.replace(/^ /, ""));
  const data = all("data").join("\n");
  return data && data !== "[DONE]" ? { event: all("event").at(-1) ?? "message", data: JSON.parse(data) } : null;
}

function streamError(data) {
  const { message = "The server gave up.", code, limit, value, status, retry_after } = data.error ?? {};
  const number = Number(status ?? code) || 0;
  const kind = kindOf(number, limit);
  return new ServiceError(sentence(message), { kind, status: number, limit, value, retryAfter: retry_after ?? 0 });
}

/** Post a form with a file in it, and return the JSON answer. */
export async function postForm(path, fields, signal) {
  const body = new FormData();
  for (const [name, value] of Object.entries(fields)) if (value) body.append(name, value);
  return json(await request(path, { method: "POST", body, signal }));
}

/** Return the content of an address of this server, wherever the server believes to be reachable. */
export async function download(url) {
  const { pathname, search } = new URL(url, location.href);
  return (await request(pathname + search)).blob();
}

/** Wait until the server answers again. */
export async function awaitServer(signal) {
  while (!signal.aborted) {
    await new Promise((done) => setTimeout(done, 2000));
    const up = await fetch("/health", { cache: "no-store", signal }).then((answer) => answer.ok, () => false);
    if (up) return true;
  }
  return false;
}
