// The KV cache as a grid of cells on a canvas, one a block.
//
// Only blocks that changed are painted: a step touches a handful, whether the cache has a hundred of them or a hundred
// thousand. Everything is painted again when the size, the theme, the highlighted sequence or the whole state changes.

import { t } from "./words.js";

const LARGEST = 36;   // px a cell
const SMALLEST = 3;
const FLASH = 900;    // ms an eviction is seen
const CORNER = 2.5;

export class Grid {
  constructor(canvas, colors, explain, onHover) {
    this.canvas = canvas;
    this.colors = colors;
    this.explain = explain;
    this.onHover = onHover;       // (id of a sequence or null)
    this.context = canvas.getContext("2d");
    this.replay = null;
    this.resets = -1;
    this.zoom = 1;
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
    canvas.addEventListener("focus", () => this.point(this.cursor ?? 0));
    canvas.addEventListener("keydown", (event) => {
      const move = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -this.columns, ArrowDown: this.columns }[event.key];
      if (!move || !this.replay) return;
      event.preventDefault();
      const wanted = (this.cursor ?? 0) + move;
      if (wanted >= 0 && wanted < this.replay.numBlocks) this.point(wanted);
    });
  }

  show(replay) {
    this.replay = replay;
    this.resets = -1;
    this.flashes.clear();
    this.layout();
  }

  /** The largest cell with which all blocks fit into the space at hand; then zoomed. */
  layout() {
    if (!this.replay) return;
    const box = this.canvas.parentElement;
    const width = box.clientWidth, height = parseFloat(getComputedStyle(box).maxHeight);
    if (!width) return;           // the tab is hidden
    const count = this.replay.numBlocks;
    let size = LARGEST;
    while (size > SMALLEST && Math.ceil(count / Math.floor(width / size)) * size > height) size -= 1;
    this.size = Math.max(SMALLEST, Math.min(64, Math.round(size * this.zoom)));
    this.columns = Math.max(1, Math.floor(width / this.size));
    const rows = Math.ceil(count / this.columns);
    const ratio = Math.min(window.devicePixelRatio || 1, rows * this.size > 4000 ? 1 : 2);
    this.canvas.width = this.columns * this.size * ratio;
    this.canvas.height = rows * this.size * ratio;
    this.canvas.style.width = `${this.columns * this.size}px`;
    this.canvas.style.height = `${rows * this.size}px`;
    this.context.setTransform(ratio, 0, 0, ratio, 0, 0);
    this.everything = true;
  }

  zoomBy(factor) {
    this.zoom = Math.max(0.25, Math.min(8, this.zoom * factor));
    this.layout();
  }

  repaint() {
    this.everything = true;
  }

  setHighlight(id) {
    if (id === this.highlight) return;
    this.highlight = id;
    this.everything = true;
  }

  draw(now) {
    const { replay, flashes } = this;
    if (!replay || !this.size) return;
    if (this.resets !== replay.resets) {
      this.resets = replay.resets;
      this.everything = true;
    }
    for (const block of replay.evictions.splice(0)) flashes.set(block, now);
    if (this.everything) {
      this.everything = false;
      this.context.clearRect(0, 0, this.canvas.width, this.canvas.height);
      for (let block = 0; block < replay.numBlocks; block += 1) this.cell(block);
    } else {
      for (const block of replay.dirty) this.cell(block);
    }
    replay.dirty.clear();
    for (const [block, began] of flashes) {
      this.cell(block);
      const age = (now - began) / FLASH;
      if (age >= 1) flashes.delete(block);
      else this.ring(block, this.colors.warn, this.still.matches ? 1 : 1 - age);
    }
    if (this.cursor !== null) this.ring(this.cursor, this.colors.ink, 1);
  }

  place(block) {
    const gap = this.size >= 6 ? 1 : this.size >= 4 ? 0.5 : 0;
    const x = (block % this.columns) * this.size + gap, y = Math.floor(block / this.columns) * this.size + gap;
    return { x, y, side: this.size - 2 * gap };
  }

  cell(block) {
    const { context, colors, replay } = this;
    const { x, y, side } = this.place(block);
    const state = replay.state(block);
    context.clearRect(x - 1, y - 1, side + 2, side + 2);
    const owners = replay.owners.get(block);
    const faded = this.highlight !== null && !owners?.includes(this.highlight);
    context.globalAlpha = faded ? 0.3 : 1;
    this.square(x, y, side, colors.cell);
    if (state === "owned") this.owned(block, owners, x, y, side);
    else if (state === "cached") this.hatch(x, y, side);
    else if (state === "held") this.heldMark(x, y, side);
    context.globalAlpha = 1;
  }

  square(x, y, side, color) {
    const { context } = this;
    context.fillStyle = color;
    if (side < 8) return context.fillRect(x, y, side, side);
    context.beginPath();
    context.roundRect(x, y, side, side, CORNER);
    return context.fill();
  }

  owned(block, owners, x, y, side) {
    const { context, colors } = this;
    const before = context.globalAlpha;
    context.save();
    context.beginPath();
    context.roundRect(x, y, side, side, side < 8 ? 0 : CORNER);
    context.clip();
    context.fillStyle = colors.of(owners[0]);
    const level = this.replay.level(block);
    if (level < 1) {              // the unfilled part: taken, but empty
      context.globalAlpha = before * 0.3;
      context.fillRect(x, y, side, side);
      context.globalAlpha = before;
    }
    context.fillRect(x, y + side * (1 - level), side, side * level);
    if (owners.length > 1) this.second(owners, x, y, side);
    context.restore();
    if (owners.length > 1 && side >= 11) this.count(owners.length, x, y, side);
  }

  /** The second owner's colour in the lower right half: shared even where a number does not fit. */
  second(owners, x, y, side) {
    const { context, colors } = this;
    context.fillStyle = colors.of(owners[1]);
    context.beginPath();
    context.moveTo(x + side, y);
    context.lineTo(x + side, y + side);
    context.lineTo(x, y + side);
    context.fill();
  }

  count(number, x, y, side) {
    const { context, colors } = this;
    const text = number > 99 ? "99" : String(number);
    const radius = side * 0.36;
    context.fillStyle = colors.card;
    context.beginPath();
    context.arc(x + side / 2, y + side / 2, radius, 0, 2 * Math.PI);
    context.fill();
    context.fillStyle = colors.ink;
    context.font = `600 ${Math.round(side * (text.length > 1 ? 0.42 : 0.52))}px system-ui, sans-serif`;
    context.textAlign = "center";
    context.textBaseline = "middle";
    context.fillText(text, x + side / 2, y + side / 2 + 0.5);
  }

  hatch(x, y, side) {
    const { context, colors } = this;
    if (side < 8) {               // too small for lines
      const before = context.globalAlpha;
      context.globalAlpha = before * 0.55;
      this.square(x, y, side, colors.faint);
      context.globalAlpha = before;
      return;
    }
    context.save();
    context.beginPath();
    context.roundRect(x, y, side, side, CORNER);
    context.clip();
    context.strokeStyle = colors.faint;
    context.lineWidth = 1.25;
    context.beginPath();
    for (let offset = 4; offset < 2 * side; offset += 5) {
      context.moveTo(x + offset, y);
      context.lineTo(x, y + offset);
    }
    context.stroke();
    context.restore();
  }

  heldMark(x, y, side) {
    const { context, colors } = this;
    context.fillStyle = colors.soft;
    context.beginPath();
    context.arc(x + side / 2, y + side / 2, Math.max(1, side * 0.18), 0, 2 * Math.PI);
    context.fill();
  }

  ring(block, color, alpha) {
    const { context } = this;
    const { x, y, side } = this.place(block);
    context.globalAlpha = alpha;
    context.strokeStyle = color;
    context.lineWidth = Math.min(2, side / 3);
    context.strokeRect(x + 0.75, y + 0.75, side - 1.5, side - 1.5);
    context.globalAlpha = 1;
  }

  blockAt(x, y) {
    if (!this.replay || !this.size) return null;
    const column = Math.floor(x / this.size);
    const block = Math.floor(y / this.size) * this.columns + column;
    return column < this.columns && block >= 0 && block < this.replay.numBlocks ? block : null;
  }

  point(block) {
    if (this.cursor !== null) this.replay?.dirty.add(this.cursor);
    this.cursor = block;
    const owners = block === null ? null : this.replay?.owners.get(block);
    this.onHover(owners?.length === 1 ? owners[0] : null);
    if (block !== null && this.replay) this.explain.say(...this.describe(block, owners));
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
