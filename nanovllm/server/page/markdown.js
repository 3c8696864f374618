// Answers of a model, markdown in, DOM nodes out. markdown-it (vendor/) reads CommonMark and tables; the nodes are made
// here, from its tokens.
//
// Nothing here ever becomes HTML by way of a string: every piece of text enters the page as text, so there is nothing
// to escape and nothing to forget. HTML in an answer is shown as it was written. Links are http, https and mailto only,
// and open elsewhere without a way back; an image becomes a link, since this page loads nothing from elsewhere.

import "./vendor/markdown-it.min.js";
import { codeBlock } from "./code.js";
import { t } from "./words.js";

const SAFE = /^(https?|mailto):/i;
const TAGS = new Set(["p", "ul", "ol", "li", "blockquote", "thead", "tbody", "tr", "th", "td", "em", "strong", "s"]);
const ABOVE = 3;  // the page's headings around an answer; its own begin below them
const reader = globalThis.markdownit({ html: false, linkify: true });
reader.linkify.set({ fuzzyLink: false, fuzzyEmail: false });  // "main.py" is no address in Paraguay
reader.validateLink = (address) => SAFE.test(address);

export function render(text) {
  const fragment = document.createDocumentFragment();
  build(reader.parse(text, {}), fragment, { level: ABOVE });
  return fragment;
}

/** Shows `text` in `into`, and leaves alone what is there already: while an answer grows, only its end is replaced. */
export function update(into, text) {
  const fresh = [...render(text).childNodes];
  fresh.forEach((node, index) => {
    const old = into.childNodes[index];
    if (!old) into.append(node);
    else if (!old.isEqualNode(node)) old.replaceWith(node);
  });
  while (into.childNodes.length > fresh.length) into.lastChild.remove();
}

function build(tokens, into, state) {
  const open = [into];
  for (const token of tokens) {
    const parent = open.at(-1);
    if (token.nesting < 0) {
      open.pop();
    } else if (token.type === "inline") {
      build(token.children, parent, state);
    } else {
      const [outer, inner] = node(token, parent, state);
      if (outer !== parent) parent.append(outer);
      if (token.nesting > 0) open.push(inner);
    }
  }
}

/** What to append for a token, and what its content goes into: mostly the same. */
function node(token, parent, state) {
  const both = (made) => [made, made];
  const { type, tag } = token;
  if (type === "text" || type === "text_special") return both(document.createTextNode(token.content));
  if (type === "softbreak") return both(document.createTextNode("\n"));
  if (type === "hardbreak") return both(make("br"));
  if (type === "hr") return both(make("hr"));
  if (type === "code_inline") return both(make("code", token.content));
  if (type === "fence" || type === "code_block") return both(codeBlock(token.content, token.info.trim().split(/\s/)[0]));
  if (type === "image") return both(link(token.attrGet("src"), token.content || token.attrGet("src")));
  if (type === "link_open") return both(link(token.attrGet("href")));
  if (type === "heading_open") {
    state.level = Math.min(ABOVE + Number(tag[1]), state.level + 1, 6);  // no level is skipped
    return both(make(`h${state.level}`));
  }
  if (type === "table_open") {
    const box = make("div"), table = make("table");
    box.className = "table-box";
    box.tabIndex = 0;     // it may scroll sideways, so the keyboard must be able to reach it
    box.setAttribute("role", "group");
    box.setAttribute("aria-label", t("chat.table"));
    box.append(table);
    return [box, table];
  }
  if (token.hidden || !TAGS.has(tag)) return both(parent);
  const made = make(tag);
  if (tag === "ol" && token.attrGet("start")) made.start = token.attrGet("start");
  const side = /text-align:(\w+)/.exec(token.attrGet("style") ?? "");
  if (side) made.style.textAlign = side[1];
  return both(made);
}

function link(address, text = "") {
  const made = make("a", text);
  made.href = address;
  made.rel = "noopener noreferrer";
  made.target = "_blank";
  return made;
}

function make(tag, text = "") {
  const made = document.createElement(tag);
  if (text) made.textContent = text;
  return made;
}
