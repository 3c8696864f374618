// The Chat tab: a conversation, streamed; kept in this browser; never sent anywhere but to this server.

import { chunks, json } from "./api.js";
import { Conversation } from "./conversation.js";
import { drawMessage } from "./message.js";
import { Settings } from "./settings.js";
import { t } from "./words.js";

const SAVE = 1000;      // ms between two saves of an answer that grows: a browser may crash
const ROOM = 0.75;      // of the context that old messages may take when some are left out: the rest is for the answer

export class Chat {
  constructor(root, info) {
    this.find = (role) => root.querySelector(`[data-role=${role}]`);
    this.log = this.find("log");
    this.form = this.find("composer");
    this.input = this.form.elements.message;
    this.limit = info.max_model_len ?? 0;   // 0: not known
    this.settings = new Settings(this.find("settings"), this.find("reset"), info);
    this.conversation = new Conversation();
    this.before = null;                     // {messages, word}: what "undo" brings back
    this.aborter = null;
    this.acts = {
      again: (message) => this.again(message), edit: (message, text) => this.edit(message, text),
      leaveOut: (message) => this.leaveOut(message), clear: () => this.clear(),
    };
    // Beside the conversation where there is room for it, folded away where there is not
    root.querySelector("details").open = matchMedia("(min-width: 901px)").matches;
    this.wire();
    this.draw();
  }

  get messages() {
    return this.conversation.messages;
  }

  set messages(list) {
    this.conversation.messages = list;
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
    this.find("clear").addEventListener("click", () => this.clear());
    this.find("undo-do").addEventListener("click", () => this.undo());
    this.find("undo-close").addEventListener("click", () => this.remember(null));
    // A page that is closed in the middle of an answer keeps what it has of it.
    // The browser then breaks the connection, which must not be stored as an error of the server.
    addEventListener("pagehide", () => {
      this.leaving = true;
      if (this.aborter) this.conversation.keep();
    });
    addEventListener("pageshow", () => { this.leaving = false; });
  }

  /** The body of a request. What was not changed is not sent, so the server's own default holds. */
  body() {
    const messages = this.messages.filter((message) => message.content && !message.error && !message.left);
    const said = messages.map(({ role, content }) => ({ role, content }));
    if (this.settings.system) said.unshift({ role: "system", content: this.settings.system });
    return { ...this.settings.numbers, messages: said };
  }

  // ---- one turn ---------------------------------------------------------------------------------------------------

  submit() {
    const content = this.input.value.trim();
    if (!content) return;
    this.input.value = "";
    this.grow();
    this.remember(null);
    this.messages.push({ role: "user", content });
    this.answer();
  }

  async answer() {
    const body = { ...this.body(), stream_options: { include_usage: true, continuous_usage_stats: true } };
    const message = { role: "assistant", content: "", tokens: 0 };
    const aborter = this.aborter = new AbortController();
    this.messages.push(message);
    this.setBusy(true);
    this.draw();
    const began = performance.now();
    let first = null, total = 0, saved = began;
    try {
      for await (const chunk of chunks("v1/chat/completions", body, aborter.signal)) {
        const choice = chunk.choices[0];
        message.tokens = chunk.usage?.completion_tokens ?? message.tokens;
        total = chunk.usage?.total_tokens ?? total;
        const { content, reasoning_content: thought } = choice?.delta ?? {};
        if (content || thought) first ??= performance.now();
        if (content) message.content += content;
        if (thought) message.thought = (message.thought ?? "") + thought;
        if (choice?.finish_reason) message.finish = choice.finish_reason;
        if (first) message.stats = measure(message.tokens, began, first);
        if (performance.now() - saved > SAVE) {
          saved = performance.now();
          this.conversation.keep();
        }
        this.refreshLast();
      }
      message.finish ??= "stop";
      if (message.finish === "length" && this.limit && total >= this.limit) this.setFull(message, "cut");
    } catch (error) {
      if (this.leaving) return;
      // Closing the connection is how the server learns of it: it frees the blocks within one step.
      if (error.name === "AbortError") message.finish = "abort";
      else if (isFull(error)) this.setFull(message, "prompt");
      else message.error = error.message;
    }
    if (this.aborter === aborter) {
      this.aborter = null;
      this.setBusy(false);
    }
    this.conversation.keep();
    if (this.messages.at(-1) === message) this.drawAt(message, this.log.lastElementChild);
  }

  /** kind: "prompt" (it was refused) or "cut" (the answer was). Older messages can be left out, if there are any. */
  setFull(message, kind) {
    message.older = this.messages.filter((other) => other.role === "user" && !other.left).length > 1;
    message.full = kind === "prompt" && !message.older ? "alone" : kind;
  }

  again(message) {
    const place = this.messages.indexOf(message);
    if (!message.error && !message.full) this.remember("chat.undo.redo");
    this.aborter?.abort();
    this.messages = this.messages.slice(0, place);
    this.answer();
    this.find("send").focus();   // what was focused is gone; this button stops the new answer
  }

  edit(message, content) {
    this.remember("chat.undo.edit");
    this.aborter?.abort();
    this.messages = [...this.messages.slice(0, this.messages.indexOf(message)), { role: "user", content }];
    this.answer();
    this.find("send").focus();
  }

  /** The oldest turns stay on the screen, but are no longer sent: until the rest leaves room for an answer. */
  async leaveOut(message) {
    this.messages = this.messages.filter((other) => other !== message);
    const turns = this.messages.filter((other) => other.role === "user" && !other.left).slice(1);
    for (const turn of turns) {
      const end = this.messages.indexOf(turn);
      this.messages.slice(0, end).forEach((old) => { old.left = true; });
      try {
        const { count } = await json("tokenize", { body: { messages: this.body().messages } });
        if (count <= ROOM * this.limit) break;
      } catch { /* far too long even for that: one more turn less */ }
    }
    this.answer();
  }

  clear() {
    this.remember("chat.undo.clear");
    this.aborter?.abort();
    this.messages = [];
    this.conversation.keep();
    this.draw();
    this.input.focus();
  }

  // ---- undo -------------------------------------------------------------------------------------------------------

  remember(word) {
    this.before = word && this.messages.length ? { messages: this.messages, word } : null;
    this.find("undo").hidden = !this.before;
    this.find("undo-text").textContent = this.before ? t(word) : "";
  }

  undo() {
    this.aborter?.abort();
    this.messages = this.before.messages;
    this.remember(null);
    this.conversation.keep();
    this.draw();
    this.input.focus();
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
    const none = this.messages.length === 0;
    this.find("empty").hidden = !none;
    this.find("clear").hidden = none;
    this.log.replaceChildren(...this.messages.map((message) => this.drawAt(message, document.createElement("article"))));
    if (this.before) this.find("undo-text").textContent = t(this.before.word);
    this.settings.draw();
    this.toEnd();
  }

  drawAt(message, element) {
    return drawMessage(message, element, this.acts, this.limit);
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
      this.drawAt(message, this.log.lastElementChild);
      if (follow) this.toEnd();
    });
  }

  // If the user has scrolled up to read, the log stays where it is.
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
}

/** Refused because prompt and answer do not fit into the model's context. */
function isFull(error) {
  return error.status === 400 && error.param === "messages" && error.said.includes("max_model_len");
}

function measure(tokens, began, first) {
  const now = performance.now();
  // The first token came with the prompt: the rate is that of the others.
  const rate = tokens > 1 && now > first ? (1000 * (tokens - 1)) / (now - first) : 0;
  return { tokens, rate: rate < 100 ? rate.toFixed(1) : String(Math.round(rate)), first: Math.round(first - began) };
}
