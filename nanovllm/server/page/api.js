// Talking to the server: JSON or server-sent events over fetch, with the key if one is needed, errors as words.
//
// fetch instead of EventSource, because EventSource cannot send an Authorization header.

import { t } from "./words.js";

const KEY = "nanovllm.key";  // in sessionStorage: gone with the tab, never written to disk

export class ApiError extends Error {
  constructor(status, message, { param = null, said = "" } = {}) {
    super(message);
    this.status = status;
    this.param = param;   // the field that the server refused
    this.said = said;     // in the server's own words
  }
}

let askKey = async () => null;  // set by app.js: shows the dialog, answers the key or null
let asking = null;              // one dialog at a time, however many requests were refused

export function onKeyNeeded(ask) {
  askKey = ask;
}

/** A response with status 200, or an ApiError. `body` makes it a POST; `quiet`: nobody is asked for a key. */
export async function call(path, { body, signal, quiet } = {}) {
  for (;;) {
    const response = await request(path, body, signal);
    if (response.ok) return response;
    if (response.status === 401 && !quiet) {
      asking ??= askKey(Boolean(sessionStorage.getItem(KEY))).finally(() => { asking = null; });
      const key = await asking;
      if (key) {
        sessionStorage.setItem(KEY, key);
        continue;
      }
    }
    throw await explain(response);
  }
}

export async function json(path, options) {
  return (await call(path, options)).json();
}

async function request(path, body, signal) {
  const headers = {};
  const key = sessionStorage.getItem(KEY);
  if (key) headers.Authorization = `Bearer ${key}`;
  const options = { headers, signal, cache: "no-store" };
  if (body !== undefined) {
    headers["Content-Type"] = "application/json";
    Object.assign(options, { method: "POST", body: JSON.stringify(body) });
  }
  try {
    return await fetch(path, options);
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError(0, t("error.offline"));
  }
}

async function explain(response) {
  let said = "", param = null;
  try {
    const { error } = await response.json();
    said = error?.message ?? "";
    param = error?.param ?? null;
  } catch { /* not ours: a proxy's page, or nothing */ }
  const status = response.status;
  if (status === 429) {
    const seconds = response.headers.get("Retry-After");
    return new ApiError(status, seconds ? t("error.429", { seconds }) : said || t("error.busy"));
  }
  if (status === 503) return new ApiError(status, t("error.503", { why: await reason() || said }));
  if (status === 401) return new ApiError(status, t("error.401"));
  return new ApiError(status, said || t("error.status", { status }), { param, said });
}

/** /health knows why an engine does not serve. */
async function reason() {
  try {
    return (await (await fetch("health", { cache: "no-store" })).json()).reason ?? "";
  } catch {
    return "";
  }
}

/** The browser's own words for a connection that broke are in no language of the page. */
function broken(error) {
  throw error.name === "AbortError" ? error : new ApiError(0, t("error.broken"));
}

/** Server-sent events of a response, one {event, data} at a time. Comment lines (keep-alive) are passed over. */
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read().catch(broken);
    if (done) return;
    const parts = (rest + value).replaceAll("\r\n", "\n").split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      const found = { event: "message", data: "" };
      for (const line of part.split("\n")) {
        if (line.startsWith("data:")) found.data += line.slice(5).trimStart();
        else if (line.startsWith("event:")) found.event = line.slice(6).trim();
      }
      if (found.data) yield found;
    }
  }
}

/** Chunks of an OpenAI stream; an error inside it is thrown. */
export async function* chunks(path, body, signal) {
  const response = await call(path, { body: { ...body, stream: true }, signal });
  for await (const { data } of events(response)) {
    if (data === "[DONE]") return;
    const chunk = JSON.parse(data);
    if (chunk.error) throw new ApiError(500, chunk.error.message);
    yield chunk;
  }
}
