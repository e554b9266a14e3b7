/* The conversation: messages, settings, streaming, stop. Everything a model says enters the page as text. */

import { ApiError, completionEvents, request, stored } from "./api.js";

const SETTINGS = "pagedkv-settings";
const DEFAULTS = { system: "", temperature: "0.7", max_tokens: "512", seed: "" };
const $ = (id) => document.getElementById(id);

/** onAnswer(id): the id of an answer that begins, null when it ended. onKeyWanted(): the server answered 401. */
export class Chat {
  #history = [];
  #answer = null;
  #model = null;

  constructor({ onAnswer, onKeyWanted }) {
    this.onAnswer = onAnswer;
    this.onKeyWanted = onKeyWanted;
    this.#wireSettings();
    this.#wireComposer();
    $("new-chat").addEventListener("click", () => this.reset());
    for (const button of document.querySelectorAll(".suggestions button")) {
      button.addEventListener("click", () => {
        this.send(button.textContent);
        if (this.busy) $("stop").focus(); // the button is gone
      });
    }
  }

  /** Name of the model to ask for. */
  set model(name) {
    this.#model = name;
  }

  get busy() {
    return this.#answer !== null;
  }

  stop() {
    this.#answer?.abort();
  }

  reset() {
    this.stop();
    this.#history = [];
    $("log").replaceChildren();
    $("welcome").hidden = false;
    $("message").focus();
  }

  #wireSettings() {
    const form = $("settings");
    const saved = stored(() => JSON.parse(localStorage.getItem(SETTINGS))) || {};
    for (const [name, value] of Object.entries({ ...DEFAULTS, ...saved })) {
      if (form.elements[name]) form.elements[name].value = value;
    }
    form.addEventListener("input", () => {
      const values = Object.fromEntries(new FormData(form));
      stored(() => localStorage.setItem(SETTINGS, JSON.stringify(values)));
    });
    form.addEventListener("submit", (event) => event.preventDefault());
    $("open-settings").addEventListener("click", () => this.#showSettings(form.hidden));
  }

  #showSettings(shown) {
    $("settings").hidden = !shown;
    $("open-settings").setAttribute("aria-expanded", String(shown));
  }

  #wireComposer() {
    const field = $("message");
    const fit = () => {
      field.style.height = "auto";
      field.style.height = `${field.scrollHeight + 2}px`;
    };
    field.addEventListener("input", fit);
    field.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
        event.preventDefault();
        $("composer").requestSubmit();
      }
    });
    $("composer").addEventListener("submit", (event) => {
      event.preventDefault();
      const text = field.value.trim();
      if (!text || this.busy) return;
      field.value = "";
      fit();
      this.send(text);
    });
    $("stop").addEventListener("click", () => this.stop());
    $("chat").addEventListener("keydown", (event) => {
      if (event.key === "Escape" && this.busy) this.stop();
    });
  }

  /** Body of the request for the conversation so far; null, with the field shown, when a setting is out of range. */
  #body() {
    const form = $("settings");
    if (!form.checkValidity()) {
      this.#showSettings(true);
      form.reportValidity();
      return null;
    }
    const { system, temperature, max_tokens, seed } = Object.fromEntries(new FormData(form));
    const body = {
      model: this.#model,
      messages: [...(system.trim() ? [{ role: "system", content: system }] : []), ...this.#history],
      stream: true,
      stream_options: { include_usage: true },
    };
    if (temperature !== "") body.temperature = Number(temperature);
    if (max_tokens !== "") body.max_tokens = Number(max_tokens);
    if (seed !== "") body.seed = Number(seed);
    return body;
  }

  /** Send a message and stream the answer into the page. What came before a stop stays in the conversation. */
  async send(text) {
    if (this.busy) return;
    this.#history.push({ role: "user", content: text });
    const body = this.#body();
    if (body === null) {
      this.#history.pop();
      giveBack(text);
      return;
    }
    const controller = new AbortController();
    this.#answer = controller;
    this.#showBusy(true);
    $("welcome").hidden = true;
    const question = addMessage("user", text);
    const answer = addMessage("assistant", "");
    answer.item.classList.add("streaming");
    answer.item.setAttribute("aria-busy", "true");
    const record = new Record();
    try {
      const response = await request("v1/chat/completions", { body, signal: controller.signal });
      for await (const event of completionEvents(response)) {
        if (controller.signal.aborted) break;
        if (!record.id && event.id) this.onAnswer((record.id = event.id));
        const piece = record.take(event);
        if (piece) follow(() => answer.text.appendData(piece));
      }
      answer.meta.textContent = record.summary(controller.signal.aborted);
    } catch (error) {
      if (controller.signal.aborted) {
        answer.meta.textContent = record.summary(true);
      } else {
        answer.meta.classList.add("failed");
        answer.meta.setAttribute("role", "alert");
        answer.meta.textContent = told(error);
        if (error instanceof ApiError && error.status === 401) this.onKeyWanted();
      }
    } finally {
      answer.item.classList.remove("streaming");
      answer.item.removeAttribute("aria-busy");
      const said = answer.text.data;
      if (this.#answer === controller) {
        this.#answer = null;
        this.#showBusy(false);
        const failed = answer.meta.classList.contains("failed");
        if (said || !(failed || controller.signal.aborted)) {
          this.#history.push({ role: "assistant", content: said });
        } else {
          this.#history.pop();
          question.item.remove();
          if (!failed) answer.item.remove();
          giveBack(text);
        }
        this.onAnswer(null);
      }
      follow(() => {});
    }
  }

  #showBusy(busy) {
    const focused = document.activeElement;
    $("send").hidden = busy;
    $("stop").hidden = !busy;
    if (focused === $("send") || focused === $("stop")) $(busy ? "stop" : "message").focus();
  }
}

/** What one answer was, for the line under it. */
class Record {
  id = null;
  #sent = performance.now();
  #first = 0;
  #last = 0;
  #usage = null;
  #reason = null;

  /** The text of an event. */
  take(event) {
    if (event.usage) this.#usage = event.usage;
    const choice = event.choices?.[0];
    if (choice?.finish_reason) this.#reason = choice.finish_reason;
    const piece = choice?.delta?.content || "";
    if (piece) {
      this.#last = performance.now();
      this.#first ||= this.#last;
    }
    return piece;
  }

  summary(stopped) {
    const parts = [];
    if (stopped) parts.push("stopped");
    else if (this.#reason !== "stop" && this.#reason !== "length") parts.push("ended by the server");
    if (this.#usage) {
      const n = this.#usage.completion_tokens;
      parts.push(`${n} token${n === 1 ? "" : "s"}${this.#reason === "length" ? ", as many as allowed" : ""}`);
      if (n > 1 && this.#last > this.#first) parts.push(`${rounded(((n - 1) * 1000) / (this.#last - this.#first))} tokens/s`);
    }
    if (this.#first) parts.push(`first after ${rounded((this.#first - this.#sent) / 1000)} s`);
    const cached = this.#usage?.prompt_tokens_details?.cached_tokens;
    if (cached) parts.push(`${cached} of ${this.#usage.prompt_tokens} prompt tokens from cached pages`);
    return parts.join(" · ");
  }
}

function rounded(x) {
  return x >= 10 ? x.toFixed(0) : x >= 1 ? x.toFixed(1) : x.toFixed(2);
}

function told(error) {
  if (error instanceof ApiError) return error.message;
  return error instanceof TypeError ? "The server cannot be reached." : String(error.message || error);
}

/** Put a message that was not answered back into the field, unless something is being typed there. */
function giveBack(text) {
  const field = $("message");
  if (!field.value) {
    field.value = text;
    field.dispatchEvent(new Event("input"));
  }
}

function addMessage(role, content) {
  const item = document.createElement("li");
  item.className = role;
  const who = document.createElement("span");
  who.className = "hidden";
  who.textContent = role === "user" ? "You: " : "Model: ";
  const body = document.createElement("p");
  body.className = "text";
  const text = document.createTextNode(content);
  body.append(text);
  item.append(who, body);
  let meta = null;
  if (role === "assistant") {
    meta = document.createElement("p");
    meta.className = "meta";
    item.append(meta);
  }
  follow(() => $("log").append(item));
  return { item, text, meta };
}

/** Change the log and stay at its end, unless the reader has scrolled away from it. */
function follow(change) {
  const box = $("scroller");
  const atEnd = box.scrollHeight - box.scrollTop - box.clientHeight < 60;
  change();
  if (atEnd) box.scrollTop = box.scrollHeight;
}
