// The gateway's public API. The token is kept in this module's memory and sent in a header.
// It is never in an address or in the browser's storage.

export const ROOT = new URL("../v1/", document.baseURI);
const PLAIN = /^[a-zA-Z0-9\-_.@:]+$/;
const RETRY_MS_MAX = 4_000;

let token = null;
let routes = null;

/** Emits "unauthorized", its `detail` true if a token was sent, and "reachable", true or false. */
export const server = new EventTarget();
server.isReachable = true;

/** A problem document (RFC 9457), or the server's silence (status 0). */
export class Problem extends Error {
  constructor(status, facts) {
    super(facts.detail ?? facts.title ?? "the request failed");
    this.status = status;
    this.facts = facts;
    this.kind = (facts.type ?? "").replace("urn:turnkeeper:", "");
  }
}

export function setToken(value) {
  token = value || null;
}

/** Take the token out of the address, if a link has put one there; true if so. */
export function takeTokenFromAddress() {
  const found = /^#token=([^&/]+)(.*)$/.exec(location.hash);
  if (!found) return false;
  setToken(unescaped(found[1]));
  const rest = found[2].replace(/^&/, "");
  history.replaceState(null, "", `#${rest.startsWith("/") ? rest : "/"}`);
  return true;
}

/** Decode a part of an address, if it can be decoded. */
function unescaped(part) {
  try {
    return decodeURIComponent(part);
  } catch {
    return part;
  }
}

export function toPath(id) {
  if (PLAIN.test(id) && id !== "." && id !== "..") return id;
  const binary = String.fromCharCode(...new TextEncoder().encode(id));
  return `~${btoa(binary).replaceAll("+", "-").replaceAll("/", "_").replaceAll("=", "")}`;
}

/** Return the id in a path segment; the segment itself if it cannot be decoded. */
export function fromPath(part) {
  if (!part.startsWith("~")) return part;
  try {
    const binary = atob(part.slice(1).replaceAll("-", "+").replaceAll("_", "/"));
    return new TextDecoder().decode(Uint8Array.from(binary, (letter) => letter.charCodeAt(0)));
  } catch {
    return part;
  }
}

/** Return the address of a view of a conversation, at a seq of its log. */
export function placeOf(id, view = "log", seq = null) {
  return `#/c/${toPath(id)}/${view}${seq ? `?seq=${seq}` : ""}`;
}

function note(isReachable) {
  if (server.isReachable === isReachable) return;
  server.isReachable = isReachable;
  server.dispatchEvent(new CustomEvent("reachable", { detail: isReachable }));
}

/** Ask, and return the reply; a read that is refused for now is made again. Raises `Problem`. */
export async function fetched(path, options = {}, triesLeft = 9) {
  const { method = "GET", query = {}, body, headers = {}, signal } = options;
  const address = new URL(path, ROOT);
  for (const [name, value] of Object.entries(query)) {
    if ((value ?? "") !== "") address.searchParams.set(name, value);
  }
  const sent = { Accept: "application/json", ...headers };
  if (token) sent.Authorization = `Bearer ${token}`;
  if (method !== "GET") sent["Content-Type"] = "application/json";
  const reply = await fetch(address, {
    method,
    headers: sent,
    body: method === "GET" ? undefined : JSON.stringify(body ?? {}),
    signal,
    cache: "no-store",
    credentials: "omit",
    redirect: "error",
  }).catch((error) => {
    if (error.name === "AbortError") throw error;
    note(false);
    throw new Problem(0, { type: "unreachable", title: "the server does not answer" });
  });
  note(true);
  if (reply.ok) return reply;
  if (method === "GET" && triesLeft && reply.status < 504 && reply.headers.has("Retry-After")) {
    await pause(1_000, signal);
    return fetched(path, options, triesLeft - 1);
  }
  const facts = await reply.json().catch(() => ({}));
  if (reply.status === 401) server.dispatchEvent(new CustomEvent("unauthorized", { detail: token !== null }));
  throw new Problem(reply.status, facts);
}

export async function ask(path, options) {
  return (await fetched(path, options)).json();
}

/** Return the query parameters of a route by the server's OpenAPI document; null if it has no such. */
export async function parametersOf(path) {
  routes ??= ask("../openapi.json").then((found) => found.paths, () => ({}));
  const route = (await routes)[path]?.get;
  return route ? (route.parameters ?? []).map((each) => each.name) : null;
}

/** Yield the events of one stream of server-sent events: `{event, id, data}`. */
async function* readStream(path, options) {
  const reply = await fetched(path, { ...options, headers: { Accept: "text/event-stream" } });
  const reader = reply.body.pipeThrough(new TextDecoderStream()).getReader();
  let received = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      received += value;
      let end;
      while ((end = received.indexOf("\n\n")) >= 0) {
        const found = parse(received.slice(0, end));
        received = received.slice(end + 2);
        if (found) yield found;
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

function parse(block) {
  const found = { event: "message", id: null, data: "" };
  for (const line of block.split("\n")) {
    const at = line.indexOf(":");
    const name = at < 0 ? line : line.slice(0, at);
    const value = at < 0 ? "" : line.slice(at + 1).replace(/^ /, "");
    if (Object.hasOwn(found, name)) found[name] = value;
  }
  return found.data ? { ...found, data: JSON.parse(found.data) } : null;
}

/** Return a signal that aborts when the page is hidden, or with another signal. */
function whileShown(signal) {
  const hidden = new AbortController();
  document.addEventListener("visibilitychange", () => hidden.abort(), { once: true, signal });
  if (document.hidden) hidden.abort();
  return AbortSignal.any([signal, hidden.signal]);
}

/**
 * Yield the events of a stream for ever: when it breaks, open it again at its cursor. A hidden page
 * keeps no stream open, since a browser opens no more than six connections to a server.
 */
export async function* follow(path, { query = {}, signal, after }) {
  let cursor = after;
  let wait = 500;
  while (!signal.aborted) {
    const shown = whileShown(signal);
    try {
      for await (const found of readStream(path, { query: { ...query, after: cursor }, signal: shown })) {
        wait = 500;
        if (found.id) cursor = found.id;
        yield found;
      }
    } catch (error) {
      if (signal.aborted) return;
      while (document.hidden) await new Promise((resolve) => document.addEventListener("visibilitychange", resolve, { once: true }));
      if (shown.aborted) continue;
      // A network error in the middle of a stream is not a Problem.
      if (!(error instanceof Problem)) note(false);
      else if (error.status && error.status < 500 && error.status !== 429) throw error;
    }
    await pause(wait, signal);
    wait = Math.min(wait * 2, RETRY_MS_MAX);
  }
}

/** Wait; ends early when the signal aborts. */
export function pause(ms, signal) {
  return new Promise((resolve) => {
    const end = () => {
      clearTimeout(timer);
      signal?.removeEventListener("abort", end);
      resolve();
    };
    const timer = setTimeout(end, ms);
    signal?.addEventListener("abort", end);
  });
}

/** Call the function soon after a call, for all calls since the last time, and never twice at once. */
export function together(ms, act) {
  let isDue = false;
  let isBusy = false;
  return async () => {
    isDue = true;
    if (isBusy) return;
    isBusy = true;
    try {
      while (isDue) {
        await pause(ms);
        isDue = false;
        await act();
      }
    } finally {
      isBusy = false;
    }
  };
}
