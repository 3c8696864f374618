// The KV cache as a grid of cells on a canvas, one a block.
//
// A cache that fits is shown whole. A larger one keeps cells of a readable size and is seen through a window, which
// follows the blocks in use until the user scrolls; the bar below (map.js) shows where in the cache the window is.
// The canvas is as large as the window, and only blocks that changed are painted: a step touches a handful, whether the
// cache has a hundred of them or a hundred thousand. Everything visible is painted again when the place, the size, the
// theme, the highlighted sequence or the whole state changes.

import { paintCell, paintRing } from "./cells.js";
import { t } from "./words.js";

const LARGEST = 36;   // px a cell, unzoomed
const READABLE = 26;  // px: below it, rather a window than smaller cells
const SMALLEST = 3;
const FLASH = 900;    // ms an eviction is seen
const SETTLE = 600;   // ms between two moves of the window

export class Grid {
  constructor(canvas, colors, explain, { onHover, onChoose }) {
    this.canvas = canvas;
    this.box = canvas.closest(".grid-box");
    this.space = canvas.parentElement;
    this.colors = colors;
    this.explain = explain;
    this.onHover = onHover;       // (id of a sequence or null)
    this.onChoose = onChoose;     // (id of a sequence)
    this.context = canvas.getContext("2d");
    this.replay = null;
    this.resets = -1;
    this.zoom = 1;
    this.top = 0;                 // px scrolled
    this.follows = true;
    this.moved = -Infinity;       // when the window last moved by itself
    this.highlight = null;
    this.cursor = null;           // the block the pointer or the keyboard is on
    this.flashes = new Map();     // block -> when
    this.still = matchMedia("(prefers-reduced-motion: reduce)");
    this.listen();
  }

  listen() {
    const { canvas } = this;
    const at = (event) => this.point(this.blockAt(event.offsetX, event.offsetY));
    canvas.addEventListener("pointermove", at);
    canvas.addEventListener("pointerdown", at);
    canvas.addEventListener("pointerleave", () => this.point(null));
    canvas.addEventListener("blur", () => this.point(null));
    canvas.addEventListener("focus", () => this.point(this.cursor ?? this.firstRow() * this.columns));
    canvas.addEventListener("click", () => this.choose());
    canvas.addEventListener("keydown", (event) => this.key(event));
    this.box.addEventListener("scroll", () => {
      if (this.top === this.box.scrollTop) return;
      this.top = this.box.scrollTop;
      this.follows = false;       // moves of our own set `top` first
      this.everything = true;
    });
  }

  key(event) {
    const move = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -this.columns, ArrowDown: this.columns }[event.key];
    if (!this.replay || !(move || event.key === "Enter")) return;
    event.preventDefault();
    if (event.key === "Enter") this.choose();
    const wanted = (this.cursor ?? 0) + (move ?? 0);
    if (!move || wanted < 0 || wanted >= this.replay.numBlocks) return;
    const y = Math.floor(wanted / this.columns) * this.size;
    if (y < this.top) this.box.scrollTop = y;
    else if (y + this.size > this.top + this.height) this.box.scrollTop = y + this.size - this.height;
    this.point(wanted);
  }

  show(replay) {
    this.replay = replay;
    this.resets = -1;
    this.follows = true;
    this.flashes.clear();
    this.layout();
  }

  layout() {
    if (!this.replay) return;
    const width = this.box.clientWidth, room = parseFloat(getComputedStyle(this.box).maxHeight);
    if (!width) return;           // the tab is hidden
    const count = this.replay.numBlocks;
    let fitting = LARGEST;
    while (fitting > SMALLEST && Math.ceil(count / Math.floor(width / fitting)) * fitting > room) fitting -= 1;
    this.fitting = fitting;
    this.size = Math.max(fitting, SMALLEST, Math.min(64, Math.round(Math.max(fitting, READABLE) * this.zoom)));
    this.columns = Math.max(1, Math.floor(width / this.size));
    this.rows = Math.ceil(count / this.columns);
    this.height = Math.min(this.rows, Math.max(1, Math.floor(room / this.size))) * this.size;
    const ratio = Math.min(window.devicePixelRatio || 1, 2);
    this.space.style.height = `${this.rows * this.size}px`;
    this.box.style.height = this.canvas.style.height = `${this.height}px`;
    this.canvas.style.width = `${this.columns * this.size}px`;
    this.canvas.width = this.columns * this.size * ratio;
    this.canvas.height = this.height * ratio;
    this.context.setTransform(ratio, 0, 0, ratio, 0, 0);
    this.top = this.box.scrollTop;
    this.moved = -Infinity;
    this.everything = true;
  }

  get isWhole() {
    return this.rows * this.size <= this.height;
  }

  zoomBy(factor) {
    const center = this.firstRow() * this.columns;
    this.zoom = Math.max(this.fitting / READABLE, Math.min(3, this.zoom * factor));
    this.layout();
    this.scrollTo(Math.floor(center / this.columns));
  }

  repaint() {
    this.everything = true;
  }

  setHighlight(id) {
    if (id === this.highlight) return;
    this.highlight = id;
    this.everything = true;
  }

  // ---- the window -------------------------------------------------------------------------------------------------

  firstRow() {
    return Math.floor(this.top / this.size);
  }

  scrollTo(row) {
    const lowest = this.rows * this.size - this.height;
    this.top = Math.max(0, Math.min(lowest, row * this.size));
    this.box.scrollTop = this.top;
    this.top = this.box.scrollTop;  // as the browser rounds it
    this.everything = true;
  }

  setFollow(follows) {
    this.follows = follows;
    this.moved = -Infinity;
  }

  /** Over the rows with the most blocks in use, but only if that shows clearly more of them than now. */
  follow(now) {
    if (!this.follows || this.isWhole || now - this.moved < SETTLE) return;
    this.moved = now;
    const inRow = new Map();
    for (const block of this.replay.owners.keys()) {
      const row = Math.floor(block / this.columns);
      inRow.set(row, (inRow.get(row) ?? 0) + 1);
    }
    const shown = Math.floor(this.height / this.size);
    const within = (first) => {
      let total = 0;
      for (let row = first; row < first + shown; row += 1) total += inRow.get(row) ?? 0;
      return total;
    };
    let best = this.firstRow(), most = within(best) * 1.3;
    for (const row of inRow.keys()) {
      const total = within(row);
      if (total > most || (total === most && row < best)) [best, most] = [row, total];
    }
    if (best !== this.firstRow()) this.scrollTo(best);
  }

  // ---- painting ---------------------------------------------------------------------------------------------------

  draw(now) {
    const { replay, flashes } = this;
    if (!replay || !this.size) return;
    if (this.resets !== replay.resets) {
      this.resets = replay.resets;
      this.everything = true;
      this.moved = -Infinity;
    }
    this.follow(now);
    for (const block of replay.evictions.splice(0)) flashes.set(block, now);
    if (this.everything) {
      this.everything = false;
      this.context.clearRect(0, 0, this.canvas.width, this.canvas.height);
      const first = this.firstRow() * this.columns;
      const end = Math.ceil((this.top + this.height) / this.size) * this.columns;
      for (let block = first; block < Math.min(end, replay.numBlocks); block += 1) this.cell(block);
    } else {
      for (const block of replay.dirty) this.cell(block);
    }
    replay.dirty.clear();
    for (const [block, began] of flashes) {
      this.cell(block);
      const age = (now - began) / FLASH;
      if (age >= 1) flashes.delete(block);
      else paintRing(this.context, this.place(block), this.colors.warn, this.still.matches ? 1 : 1 - age);
    }
    if (this.cursor !== null) paintRing(this.context, this.place(this.cursor), this.colors.ink, 1);
  }

  /** On the canvas; outside of it for a block that is not in the window. */
  place(block) {
    const gap = this.size >= 6 ? 1 : this.size >= 4 ? 0.5 : 0;
    const y = Math.floor(block / this.columns) * this.size - this.top + gap;
    return { x: (block % this.columns) * this.size + gap, y, side: this.size - 2 * gap };
  }

  cell(block) {
    const { context, replay } = this;
    const place = this.place(block);
    const { x, y, side } = place;
    if (y + side < 0 || y > this.height) return;
    context.clearRect(x - 1, y - 1, side + 2, side + 2);
    const owners = replay.owners.get(block);
    const faded = this.highlight !== null && !owners?.includes(this.highlight);
    context.globalAlpha = faded ? 0.3 : 1;
    paintCell(context, this.colors, place, {
      state: replay.state(block), hues: owners?.slice(0, 2).map((id) => this.colors.of(id)), count: owners?.length,
      level: owners ? replay.level(block) : 1,
    });
    context.globalAlpha = 1;
  }

  // ---- pointing ---------------------------------------------------------------------------------------------------

  blockAt(x, y) {
    if (!this.replay || !this.size) return null;
    const column = Math.floor(x / this.size);
    const block = Math.floor((y + this.top) / this.size) * this.columns + column;
    return column < this.columns && block >= 0 && block < this.replay.numBlocks ? block : null;
  }

  point(block) {
    if (this.cursor !== null) this.replay?.dirty.add(this.cursor);
    this.cursor = block;
    const owners = block === null ? null : this.replay?.owners.get(block);
    this.onHover(owners?.length === 1 ? owners[0] : null);
    if (block !== null && this.replay) this.explain.say(...this.describe(block, owners));
  }

  /** Of several owners, another one at each click. */
  choose() {
    const owners = this.cursor === null ? null : this.replay?.owners.get(this.cursor);
    if (!owners) return;
    this.chosen = owners[(owners.indexOf(this.chosen) + 1) % owners.length];
    this.onChoose(this.chosen);
  }

  describe(block, owners) {
    const { replay } = this;
    if (!owners) return [replay.state(block), t(`block.${replay.state(block)}`, { block })];
    const from = replay.places.get(block) * replay.blockSize;
    const ids = owners.slice(0, 6).map((id) => `#${id}`).join(", ") + (owners.length > 6 ? " …" : "");
    const values = { block, ids, count: owners.length, from, to: from + replay.blockSize - 1 };
    return owners.length > 1 ? ["shared", t("block.shared", values)] : ["owned", t("block.owned", values)];
  }
}
