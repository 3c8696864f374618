// A small markdown for answers of a model: text in, DOM nodes out.
//
// Nothing here ever becomes HTML by way of a string: every piece of text enters the page as text, so there is nothing
// to escape and nothing to forget. Links are http(s) only, and open elsewhere without a way back.
//
// Known: fenced code, headings, lists (nested by indentation), quotes, rules, paragraphs; `code`, **bold**, *italic*,
// [text](https://...). All else is shown as it was written.

const INLINE = /(`+)(.+?)\1|\*\*(.+?)\*\*(?!\*)|\*([^\s*](?:[^*]*[^\s*])?)\*|\[([^\]]+)\]\((https?:\/\/[^\s)]+)\)/g;
const ITEM = /^(\s*)(?:[-*+]|(\d{1,9})[.)])\s+(.*)$/;
const FENCE = /^\s*(```+|~~~+)\s*([\w+-]*)/;
const HEADING = /^(#{1,6})\s+(.*)$/;
const MAX_DEPTH = 8;  // a model that loops may nest brackets for ever

export function render(text) {
  const fragment = document.createDocumentFragment();
  const lines = text.replaceAll("\r\n", "\n").split("\n");
  let at = 0;
  while (at < lines.length) at = block(lines, at, fragment);
  return fragment;
}

/** One block starting at line `at`; returns the line after it. */
function block(lines, at, into) {
  const line = lines[at];
  if (!line.trim()) return at + 1;
  const fence = line.match(FENCE);
  if (fence) return code(lines, at, fence, into);
  const heading = line.match(HEADING);
  if (heading) {
    // The page has its own h1 and h2: an answer's headings begin below them.
    inline(into.appendChild(make(`h${Math.min(6, heading[1].length + 2)}`)), heading[2]);
    return at + 1;
  }
  if (/^\s*([-*_])(\s*\1){2,}\s*$/.test(line)) {
    into.append(make("hr"));
    return at + 1;
  }
  if (ITEM.test(line)) return list(lines, at, into);
  if (line.startsWith(">")) {
    let end = at;
    while (end < lines.length && lines[end].startsWith(">")) end += 1;
    const quote = into.appendChild(make("blockquote"));
    inline(quote, lines.slice(at, end).map((quoted) => quoted.replace(/^>\s?/, "")).join("\n"));
    return end;
  }
  let end = at + 1;
  while (end < lines.length && lines[end].trim() && !starts(lines[end])) end += 1;
  inline(into.appendChild(make("p")), lines.slice(at, end).join("\n"));
  return end;
}

function starts(line) {
  return FENCE.test(line) || HEADING.test(line) || ITEM.test(line) || line.startsWith(">");
}

/** An unclosed fence runs to the end: while an answer streams in, that is the usual case. */
function code(lines, at, [, mark, language], into) {
  let end = at + 1;
  while (end < lines.length && !lines[end].trim().startsWith(mark)) end += 1;
  const pre = into.appendChild(make("pre"));
  if (language) pre.dataset.language = language;
  pre.tabIndex = 0;  // it may scroll sideways, so the keyboard must be able to reach it
  pre.appendChild(make("code")).textContent = lines.slice(at + 1, end).join("\n");
  return end + 1;
}

function list(lines, at, into) {
  const open = [];  // lists from the outermost to the one being filled, with the indentation of their items
  let item = null;
  while (at < lines.length) {
    const found = lines[at].match(ITEM);
    if (!found) {
      // A line below an item, indented, belongs to it; anything else ends the list.
      if (!item || !/^\s+\S/.test(lines[at]) || FENCE.test(lines[at])) break;
      item.append("\n");
      inline(item, lines[at].trim());
      at += 1;
      continue;
    }
    const [, indent, number, text] = found;
    while (open.length > 1 && indent.length < open.at(-1).indent) open.pop();
    // "1." after "-" begins another list
    const other = open.length === 1 && (open[0].made.tagName === "OL") !== Boolean(number);
    if (other && indent.length <= open[0].indent + 1) return at;
    if (!open.length || (indent.length > open.at(-1).indent + 1 && open.length < MAX_DEPTH)) {
      const made = make(number ? "ol" : "ul");
      if (number && number !== "1") made.start = Number(number);
      (item ?? into).append(made);
      open.push({ made, indent: indent.length });
    }
    item = open.at(-1).made.appendChild(make("li"));
    inline(item, text);
    at += 1;
    // A blank line between two items does not end a list.
    if (at + 1 < lines.length && !lines[at].trim() && ITEM.test(lines[at + 1])) at += 1;
  }
  return at;
}

function inline(into, text, depth = 0) {
  let last = 0;
  for (const found of depth < MAX_DEPTH ? text.matchAll(INLINE) : []) {
    into.append(text.slice(last, found.index));
    last = found.index + found[0].length;
    const [, , code, bold, italic, label, address] = found;
    if (code) into.appendChild(make("code")).textContent = code;
    else if (bold) inline(into.appendChild(make("strong")), bold, depth + 1);
    else if (italic) inline(into.appendChild(make("em")), italic, depth + 1);
    else {
      const link = into.appendChild(make("a"));
      link.href = address;
      link.rel = "noopener noreferrer";
      link.target = "_blank";
      inline(link, label, depth + 1);
    }
  }
  into.append(text.slice(last));
}

function make(tag) {
  return document.createElement(tag);
}
