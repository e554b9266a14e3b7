/* Talks to the server: addresses, the API key, errors and server-sent events. */

const BASE = new URL("../", import.meta.url);
const KEY = "pagedkv-key";

/** An answer that says no. status: of HTTP, 0 for one that came amid a stream. */
export class ApiError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

let key = stored(() => sessionStorage.getItem(KEY)) || "";

export function setKey(value) {
  key = value;
  stored(() => sessionStorage.setItem(KEY, value));
}

/** What `action` returns; nothing where the browser keeps no storage. */
export function stored(action) {
  try {
    return action();
  } catch {
    return null;
  }
}

/** fetch() of a path of this server with the key. Throws ApiError for any status but 2xx. */
export async function request(path, { body, signal } = {}) {
  const headers = {};
  if (key) headers.Authorization = `Bearer ${key}`;
  if (body !== undefined) headers["Content-Type"] = "application/json";
  const response = await fetch(new URL(path, BASE), {
    method: body === undefined ? "GET" : "POST",
    headers,
    body: body === undefined ? undefined : JSON.stringify(body),
    signal,
    cache: "no-store",
  });
  if (!response.ok) throw new ApiError(response.status, await reason(response));
  return response;
}

async function reason(response) {
  const text = await response.text().catch(() => "");
  try {
    const error = JSON.parse(text).error;
    return error.message || text;
  } catch {
    return text.slice(0, 300) || `the server answered ${response.status}`;
  }
}

/** Cuts a stream of text into the data of its events; pieces may end anywhere, also within a line end. */
export class EventCutter {
  #rest = "";
  #data = [];

  /** The data of each event that `text` completes. */
  push(text) {
    const found = [];
    this.#rest += text;
    for (;;) {
      const end = this.#rest.search(/[\r\n]/);
      if (end < 0 || (this.#rest[end] === "\r" && end === this.#rest.length - 1)) return found;
      const line = this.#rest.slice(0, end);
      this.#rest = this.#rest.slice(end + (this.#rest.startsWith("\r\n", end) ? 2 : 1));
      if (line === "") {
        if (this.#data.length) found.push(this.#data.join("\n"));
        this.#data = [];
      } else if (line.startsWith("data:")) {
        this.#data.push(line.slice(line[5] === " " ? 6 : 5));
      }
    }
  }
}

/** The events of a streamed completion, parsed, up to [DONE]. Throws ApiError for an error event or a cut stream. */
export async function* completionEvents(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  const cutter = new EventCutter();
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) throw new ApiError(0, "the connection ended before the answer did");
      for (const data of cutter.push(value)) {
        if (data === "[DONE]") return;
        const event = JSON.parse(data);
        if (event.error) throw new ApiError(0, event.error.message || "the server reported an error");
        yield event;
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}
