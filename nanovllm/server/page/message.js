// One message of a conversation on the screen: its role, its text, its state, and the buttons for it.

import { copyButton } from "./copy.js";
import { update } from "./markdown.js";
import { t } from "./words.js";

/** acts: {again(message), edit(message, text), leaveOut(message), clear()} */
export function drawMessage(message, element, acts, limit) {
  if (!element.childElementCount) {
    element.append(...["h3", "details", "div", "footer", "div"].map((tag) => document.createElement(tag)));
    element.children[1].append(document.createElement("summary"), document.createElement("p"));
    element.children[2].className = "text";
    element.children[4].className = "acts";
  }
  element.className = `message ${message.role}${message.left ? " left" : ""}`;
  const [name, thoughts, body, footer, buttons] = element.children;
  drawThoughts(message, thoughts);
  name.textContent = t(message.role === "user" ? "chat.you" : "chat.model");
  if (message.role === "user") body.textContent = message.content;
  else update(body, message.content);
  footer.className = isRefused(message) ? "bad" : isPending(message) ? "pending" : "";
  if (isRefused(message)) footer.setAttribute("role", "alert");
  else footer.removeAttribute("role");
  footer.replaceChildren(...footerOf(message, acts, limit));
  buttons.replaceChildren(...actsOf(message, element, acts));
  return element;
}

/** What a model writes before its answer, if the server tells it apart: open until the answer begins. */
function drawThoughts(message, details) {
  details.hidden = !message.thought;
  if (!message.thought) return;
  const [summary, text] = details.children;
  summary.textContent = t("chat.thoughts");
  text.textContent = message.thought;
  if (details.dataset.answered !== String(Boolean(message.content))) {
    details.dataset.answered = String(Boolean(message.content));
    details.open = !message.content;
  }
}

function isPending(message) {
  return message.role === "assistant" && !message.finish && !message.stats;
}

function isRefused(message) {
  return Boolean(message.error) || message.full === "prompt" || message.full === "alone";
}

function footerOf(message, acts, limit) {
  if (message.role === "user") return message.left ? [t("chat.left")] : [];
  if (message.error) return [message.error, make("chat.again", () => acts.again(message))];
  const parts = [], outs = [];
  if (message.stats) parts.push(t("chat.stats", message.stats));
  const ends = { abort: "chat.stopped", length: "chat.cut", partial: "chat.partial" };
  if (message.full) {
    parts.push(t(`chat.full.${message.full}`, { limit: limit.toLocaleString() }));
    if (message.older) outs.push(make("chat.leave", () => acts.leaveOut(message)));
    outs.push(make("chat.clear", () => acts.clear()));
  } else if (ends[message.finish]) parts.push(t(ends[message.finish]));
  return [parts.join(" · ") || (isPending(message) ? t("chat.waiting") : ""), ...outs];
}

function actsOf(message, element, acts) {
  if (message.role === "assistant" && !message.finish && !isRefused(message)) return [];  // being written
  const made = message.content ? [copyButton(() => message.content)] : [];
  if (message.role === "user") made.push(make("chat.edit", () => editor(message, element, acts)));
  else if (!isRefused(message)) made.push(make("chat.redo", () => acts.again(message)));
  return made;
}

/** The text as a field, in place. */
function editor(message, element, acts) {
  const form = document.createElement("form"), field = document.createElement("textarea");
  form.className = "editor";
  field.value = message.content;
  field.rows = Math.min(12, message.content.split("\n").length + 1);
  field.setAttribute("aria-label", t("chat.edit"));
  const back = () => {
    element.replaceChildren();
    drawMessage(message, element, acts).querySelector("[data-act=edit]").focus();
  };
  const send = make("chat.send", null);
  send.type = "submit";
  send.className = "main";
  form.append(field, send, make("key.cancel", back));
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    if (field.value.trim()) acts.edit(message, field.value.trim());
  });
  field.addEventListener("keydown", (event) => {
    if (event.key === "Escape") back();
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    form.requestSubmit();
  });
  element.children[2].replaceChildren(form);
  element.children[4].replaceChildren();
  field.focus();
}

function make(word, action) {
  const button = document.createElement("button");
  button.type = "button";
  button.className = "quiet small";
  button.dataset.act = word.split(".").at(-1);
  button.textContent = t(word);
  if (action) button.addEventListener("click", action);
  return button;
}
