// The Chat tab: a conversation, streamed; kept in this browser; never sent anywhere but to this server.

import { chunks } from "./api.js";
import { render } from "./markdown.js";
import { load, save } from "./store.js";
import { t } from "./words.js";

const MESSAGES = 200;         // kept messages, and characters of them: a browser gives a site about five million
const CHARACTERS = 400_000;
const DEFAULTS = { temperature: "0.7", top_p: "0.95", top_k: "0", max_tokens: "512", seed: "", system: "" };

export class Chat {
  constructor(root) {
    this.find = (role) => root.querySelector(`[data-role=${role}]`);
    this.log = this.find("log");
    this.form = this.find("composer");
    this.input = this.form.elements.message;
    this.settings = this.find("settings");
    this.messages = load("chat", []);
    this.aborter = null;
    // Beside the conversation where there is room for it, folded away where there is not
    root.querySelector("details").open = matchMedia("(min-width: 901px)").matches;
    this.restoreSettings();
    this.wire();
    this.draw();
  }

  wire() {
    this.form.addEventListener("submit", (event) => {
      event.preventDefault();
      if (this.aborter) this.aborter.abort();
      else this.submit();
    });
    this.input.addEventListener("keydown", (event) => {
      // isComposing: Enter that chooses a Chinese character must not send
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      if (!this.aborter) this.submit();
    });
    this.input.addEventListener("input", () => this.grow());
    this.find("clear").addEventListener("click", () => {
      this.aborter?.abort();
      this.messages = [];
      this.keep();
      this.draw();
      this.input.focus();
    });
    this.settings.addEventListener("input", () => {
      save("settings", this.readSettings());
      this.showValues();
    });
    this.find("reset").addEventListener("click", () => {
      save("settings", null);
      this.restoreSettings();
    });
    // A page that is closed in the middle of an answer keeps what it has of it.
    addEventListener("pagehide", () => this.keep());
  }

  // ---- settings ---------------------------------------------------------------------------------------------------

  restoreSettings() {
    for (const [name, value] of Object.entries({ ...DEFAULTS, ...load("settings", {}) })) {
      if (this.settings.elements[name]) this.settings.elements[name].value = value;
    }
    this.showValues();
  }

  readSettings() {
    return Object.fromEntries(Object.keys(DEFAULTS).map((name) => [name, this.settings.elements[name].value]));
  }

  showValues() {
    for (const output of this.settings.querySelectorAll("output")) {
      output.textContent = this.settings.elements[output.dataset.of].value;
    }
  }

  /** The body of a request. What is left empty is not sent, so the server's own default holds. */
  body() {
    const { system, ...numbers } = this.readSettings();
    const body = { stream_options: { include_usage: true, continuous_usage_stats: true } };
    for (const [name, value] of Object.entries(numbers)) if (value !== "") body[name] = Number(value);
    const said = this.messages.filter((message) => message.content && !message.error);
    body.messages = said.map(({ role, content }) => ({ role, content }));
    if (system.trim()) body.messages.unshift({ role: "system", content: system });
    return body;
  }

  // ---- one turn ---------------------------------------------------------------------------------------------------

  submit() {
    const content = this.input.value.trim();
    if (!content) return;
    this.input.value = "";
    this.grow();
    this.messages.push({ role: "user", content });
    this.answer();
  }

  async answer() {
    const body = this.body();
    const message = { role: "assistant", content: "", tokens: 0 };
    this.messages.push(message);
    this.aborter = new AbortController();
    this.setBusy(true);
    this.draw();
    const began = performance.now();
    let first = null;
    try {
      for await (const chunk of chunks("v1/chat/completions", body, this.aborter.signal)) {
        const choice = chunk.choices[0];
        message.tokens = chunk.usage?.completion_tokens ?? message.tokens;
        if (choice?.delta.content) {
          first ??= performance.now();
          message.content += choice.delta.content;
        }
        if (choice?.finish_reason) message.finish = choice.finish_reason;
        if (first) message.stats = measure(message.tokens, began, first);
        this.refreshLast();
      }
    } catch (error) {
      // Closing the connection is how the server learns of it: it frees the blocks within one step.
      if (error.name === "AbortError") message.finish = "abort";
      else message.error = error.message;
    }
    this.aborter = null;
    this.setBusy(false);
    this.keep();
    if (this.messages.at(-1) === message) this.drawMessage(message, this.log.lastElementChild);
  }

  retry(message) {
    this.messages = this.messages.filter((other) => other !== message);
    this.answer();
  }

  setBusy(busy) {
    const button = this.find("send");
    button.dataset.t = busy ? "chat.stop" : "chat.send";
    button.textContent = t(button.dataset.t);
    button.classList.toggle("stop", busy);
    this.log.setAttribute("aria-busy", String(busy));
  }

  // ---- on the screen ----------------------------------------------------------------------------------------------

  draw() {
    this.find("empty").hidden = this.messages.length > 0;
    const draw = (message) => this.drawMessage(message, document.createElement("article"));
    this.log.replaceChildren(...this.messages.map(draw));
    this.toEnd();
  }

  drawMessage(message, element) {
    element.className = `message ${message.role}`;
    const body = document.createElement("div");
    body.className = "text";
    if (message.role === "user") body.textContent = message.content;
    else body.append(render(message.content));
    const name = document.createElement("h3");
    name.textContent = t(message.role === "user" ? "chat.you" : "chat.model");
    element.replaceChildren(name, body, ...this.footer(message));
    return element;
  }

  footer(message) {
    if (message.role === "user") return [];
    const line = document.createElement("footer");
    if (message.error) {
      line.className = "bad";
      line.setAttribute("role", "alert");
      const again = document.createElement("button");
      again.type = "button";
      again.className = "quiet";
      again.textContent = t("chat.again");
      again.addEventListener("click", () => this.retry(message));
      line.append(message.error, " ", again);
      return [line];
    }
    const parts = [];
    if (message.stats) parts.push(t("chat.stats", message.stats));
    if (message.finish === "abort") parts.push(t("chat.stopped"));
    if (message.finish === "length") parts.push(t("chat.cut"));
    line.textContent = parts.join(" · ") || t("chat.waiting");
    if (!parts.length) line.className = "pending";
    return [line];
  }

  /** At most once a frame: tokens come faster than anyone can see. */
  refreshLast() {
    if (this.scheduled) return;
    this.scheduled = true;
    requestAnimationFrame(() => {
      this.scheduled = false;
      const message = this.messages.at(-1);
      if (!message || !this.log.lastElementChild) return;
      const follow = this.isAtEnd();
      this.drawMessage(message, this.log.lastElementChild);
      if (follow) this.toEnd();
    });
  }

  // Who scrolled up to read is left alone.
  isAtEnd() {
    return this.log.scrollHeight - this.log.scrollTop - this.log.clientHeight < 80;
  }

  toEnd() {
    this.log.scrollTop = this.log.scrollHeight;
  }

  grow() {
    this.input.style.height = "auto";
    this.input.style.height = `${Math.min(200, this.input.scrollHeight)}px`;
  }

  keep() {
    let kept = this.messages.slice(-MESSAGES);
    const size = () => kept.reduce((total, message) => total + message.content.length, 0);
    while (kept.length > 1 && size() > CHARACTERS) kept = kept.slice(1);
    save("chat", kept.length ? kept : null);
  }
}

function measure(tokens, began, first) {
  const now = performance.now();
  // The first token came with the prompt: the rate is that of the others.
  const rate = tokens > 1 ? (1000 * (tokens - 1)) / (now - first) : 0;
  return { tokens, rate: rate < 100 ? rate.toFixed(1) : String(Math.round(rate)), first: Math.round(first - began) };
}
