// A block of code with its language, a button to copy it, and colours by highlight.js (vendor/), built as DOM nodes.

import { copyButton } from "./copy.js";
import hljs from "./vendor/highlight.min.js";

const LONGEST = 30_000;   // characters that are coloured: it is done again at every token while an answer grows

export function codeBlock(text, language) {
  const box = document.createElement("div"), head = document.createElement("div");
  const pre = document.createElement("pre"), code = document.createElement("code");
  box.className = "code";
  head.append(language, copyButton(() => text));
  pre.tabIndex = 0;       // it may scroll sideways, so the keyboard must be able to reach it
  if (language) pre.dataset.language = language;
  colour(code, text.replace(/\n$/, ""), language);
  pre.append(code);
  box.append(head, pre);
  return box;
}

function colour(into, text, language) {
  if (!hljs.getLanguage(language) || text.length > LONGEST) into.textContent = text;
  // The tree that its own renderer makes HTML of; ours makes nodes.
  else walk(hljs.highlight(text, { language, ignoreIllegals: true })._emitter.rootNode, into);
}

function walk(node, into) {
  for (const child of node.children) {
    if (typeof child === "string") {
      into.append(child);
      continue;
    }
    const part = into.appendChild(document.createElement("span"));
    part.className = `hl-${(child.scope ?? "").split(/[.:]/)[0]}`;
    walk(child, part);
  }
}
