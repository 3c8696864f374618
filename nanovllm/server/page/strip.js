// The block table of one sequence as a strip: logical block above, physical block below it.
//
// Blocks of a shared prefix carry their reference count, the last block is filled as far as its tokens go.

import { t } from "./words.js";

const EVERY = 80;    // ms between two updates
const ENDS = 32;     // blocks shown at either end of a long table

export class Strip {
  constructor(card, colors, explain, onHover) {
    this.find = (role) => card.querySelector(`[data-role=${role}]`);
    this.list = card.querySelector("ol");
    this.colors = colors;
    this.explain = explain;
    this.onHover = onHover;
    this.chosen = null;       // what the reader chose; while it is gone, the first that runs stands in
    this.shown = null;
    this.drawn = "";
    this.last = 0;
    for (const kind of ["pointerenter", "focusin"]) card.addEventListener(kind, () => this.onHover(this.shown));
    for (const kind of ["pointerleave", "focusout"]) card.addEventListener(kind, () => this.onHover(null));
  }

  choose(id) {
    this.chosen = id;
    this.repaint();
  }

  repaint() {
    this.drawn = "";
    this.last = 0;
  }

  pick(replay) {
    for (const id of [this.chosen, this.shown]) if (replay.seqs.get(id)?.blocks.length) return id;
    return replay.running.find((seq) => seq.blocks.length)?.id ?? null;
  }

  draw(replay, now) {
    const state = `${replay.version} ${this.chosen}`;
    if (state === this.drawn || now - this.last < EVERY) return;
    this.drawn = state;
    this.last = now;
    this.shown = this.pick(replay);
    const seq = replay.seqs.get(this.shown);
    this.find("strip-none").hidden = Boolean(seq);
    this.find("strip-name").textContent = seq ? `#${seq.id}` : "";
    this.find("strip-facts").textContent = seq ? this.facts(seq, replay) : "";
    this.list.hidden = this.find("strip-axis").hidden = !seq;
    this.fill(seq, replay);
  }

  facts(seq, replay) {
    const count = seq.blocks.length;
    const shared = seq.blocks.filter((block) => replay.owners.get(block).length > 1).length;
    const parts = [t("strip.facts", { tokens: seq.computed, count })];
    if (shared) parts.push(t("strip.shared", { count: shared }));
    return parts.join(" · ");
  }

  fill(seq, replay) {
    const blocks = seq?.blocks ?? [];
    const indices = blocks.map((_, index) => index);
    const shown = blocks.length > 2 * ENDS + 1 ? [...indices.slice(0, ENDS), null, ...indices.slice(-ENDS)] : indices;
    while (this.list.children.length > shown.length) this.list.lastElementChild.remove();
    while (this.list.children.length < shown.length) this.list.append(make());
    shown.forEach((index, place) => {
      const item = this.list.children[place];
      if (index === null) gap(item, blocks.length - 2 * ENDS);
      else this.update(item, seq, index, replay);
    });
  }

  update(item, seq, index, replay) {
    const block = seq.blocks[index], { blockSize } = replay;
    const owners = replay.owners.get(block).length;
    const used = Math.max(0, Math.min(blockSize, seq.computed - index * blockSize));
    const isLast = used < blockSize && owners === 1;
    const key = `${seq.id} ${index} ${block} ${owners} ${used}`;
    if (item.dataset.key === key) return;
    Object.assign(item.dataset, { key, logical: index, physical: block, owners, used });
    item.className = owners > 1 ? "shared" : isLast ? "last" : "";
    item.style.setProperty("--seq", this.colors.of(seq.id));
    item.style.setProperty("--fill", `${(100 * used) / blockSize}%`);
    const [logical, physical, note] = item.children;
    logical.textContent = index;
    physical.firstElementChild.textContent = block;
    note.textContent = owners > 1 ? `×${owners}` : isLast ? `${used}/${blockSize}` : "";
    const words = { logical: index, physical: block, owners, used, size: blockSize };
    item.setAttribute("aria-label", t(owners > 1 ? "strip.cell.shared" : "strip.cell", words));
  }
}

function make() {
  const item = document.createElement("li");
  for (const name of ["logical", "physical", "note"]) {
    const part = item.appendChild(document.createElement("span"));
    part.className = `strip-${name}`;
    if (name === "physical") part.append(document.createElement("b"));
  }
  return item;
}

function gap(item, count) {
  item.className = "gap";
  item.dataset.key = `gap ${count}`;
  for (const name of ["logical", "physical", "owners", "used"]) delete item.dataset[name];
  item.removeAttribute("aria-label");
  const [logical, physical, note] = item.children;
  logical.textContent = "…";
  physical.firstElementChild.textContent = t("strip.gap", { count });
  note.textContent = "";
}
