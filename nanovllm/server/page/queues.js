// The two queues of sequences, running and waiting, and how far each one is.

import { t } from "./words.js";

const SHOWN = 40;          // rows of each; more would be a wall, not a picture
const EVERY = 80;          // ms between two updates: faster than that nobody reads

export class Queues {
  constructor(root, colors, explain, { onHover, onChoose }) {
    this.colors = colors;
    this.explain = explain;
    this.onHover = onHover;
    this.onChoose = onChoose;
    this.lists = ["running", "waiting"].map((name) => {
      const card = root.querySelector(`[data-queue=${name}]`);
      return { list: card.querySelector("ul"), count: card.querySelector("output"), rows: new Map() };
    });
    this.highlight = null;
    this.chosen = null;        // whose block table is shown
    this.drawn = "";
    this.last = 0;
  }

  repaint() {
    this.drawn = "";
  }

  draw(replay, now) {
    const state = `${replay.version} ${this.highlight} ${this.chosen}`;
    if (state === this.drawn || now - this.last < EVERY) return;
    this.drawn = state;
    this.last = now;
    const waiting = replay.waiting.map((id) => replay.seqs.get(id)).filter(Boolean);
    this.fill(this.lists[0], replay.running, replay.running.length);
    this.fill(this.lists[1], waiting, replay.numWaiting);
  }

  fill({ list, count, rows }, seqs, total) {
    count.textContent = total;
    const shown = seqs.slice(0, SHOWN);
    const wanted = new Set(shown.map((seq) => seq.id));
    for (const [id, row] of rows) {
      if (!wanted.has(id)) {
        row.item.remove();
        rows.delete(id);
      }
    }
    shown.forEach((seq, index) => {
      if (!rows.has(seq.id)) rows.set(seq.id, this.makeRow(seq.id));
      const row = rows.get(seq.id);
      if (list.children[index] !== row.item) list.insertBefore(row.item, list.children[index] ?? null);
      this.update(row, seq);
    });
    list.classList.toggle("more", list.scrollHeight > list.clientHeight + 1);
    const hidden = total - shown.length;
    list.dataset.note = hidden > 0 ? t("queue.more", { count: hidden }) : total ? "" : t("queue.none");
  }

  makeRow(id) {
    const item = document.createElement("li"), button = item.appendChild(document.createElement("button"));
    button.type = "button";
    const part = (name) => {
      const made = document.createElement("span");
      made.className = name;
      button.append(made);
      return made;
    };
    part("seq-name").textContent = `#${id}`;
    const row = { item, button, facts: part("seq-facts"), bar: part("seq-bar"), flag: part("seq-flag") };
    row.parts = ["cached", "prompt", "output"].map((kind) => {
      const made = document.createElement("i");
      made.className = `fill-${kind}`;
      row.bar.append(made);
      return made;
    });
    row.rest = document.createElement("i");
    row.rest.className = "seq-divide";
    row.bar.append(row.rest);
    const on = () => {
      this.onHover(id);
      this.explain.say(this.aboutRow(row), row.label);
    };
    button.addEventListener("pointerenter", on);
    button.addEventListener("focus", on);
    button.addEventListener("pointerleave", () => this.onHover(null));
    button.addEventListener("blur", () => this.onHover(null));
    button.addEventListener("click", () => this.onChoose(id));
    return row;
  }

  aboutRow(row) {
    return row.flag.textContent ? "preempted" : row.item.parentElement === this.lists[0].list ? "running" : "waiting";
  }

  update(row, seq) {
    const output = Math.max(0, seq.tokens - seq.prompt);
    const fed = Math.min(seq.computed, seq.prompt);
    const whole = Math.max(1, seq.prompt + seq.max_tokens);
    // Short outputs of long prompts (or the reverse) would vanish: each half gets at least a fifth of the bar.
    const split = Math.max(0.2, Math.min(0.8, seq.prompt / whole));
    const cached = Math.min(seq.cached, fed);
    const written = output / Math.max(1, seq.max_tokens);
    const widths = [cached / seq.prompt * split, (fed - cached) / seq.prompt * split, written * (1 - split)];
    const lefts = [0, widths[0], split];
    row.parts.forEach((part, index) => {
      part.style.left = `${100 * lefts[index]}%`;
      part.style.width = `${100 * Math.min(1, widths[index])}%`;
    });
    row.rest.style.left = `${100 * split}%`;
    row.button.style.setProperty("--seq", this.colors.of(seq.id));
    row.item.classList.toggle("lit", this.highlight === seq.id);
    const facts = [t("seq.prompt", { done: fed, all: seq.prompt })];
    facts.push(t("seq.output", { done: output, all: seq.max_tokens }));
    if (seq.cached) facts.push(t("seq.cached", { count: seq.cached }));
    row.facts.textContent = facts.join(" · ");
    row.flag.textContent = seq.preemptions ? t("seq.preempted", { count: seq.preemptions }) : "";
    const figures = { id: `#${seq.id}`, prompt: `${fed}/${seq.prompt}`, output: `${output}/${seq.max_tokens}` };
    row.label = t("seq.label", figures);
    row.button.setAttribute("aria-label", row.label);
    row.button.setAttribute("aria-pressed", String(this.chosen === seq.id));
  }
}
