// Which experts tokens choose, as a heat map: a row for each layer that has experts, a column for each of them.
//
// The server counts only while the counts are read: every two seconds, as long as the tab is shown. The picture shows
// what was chosen since the oldest reading that is kept; a reading without new tokens is not kept, so the picture of an
// idle engine stays. Strength follows the square root, against the mean of the layer: layers do not share their experts,
// and the ranks of a layer wait for its busiest one.

import { json } from "./api.js";
import { t } from "./words.js";

const PAUSE = 2000;   // ms between two readings
const KEPT = 15;      // readings
const FULL = 4;       // times the mean: the strongest colour
const SIDE = 26;      // px for the numbers of the layers
const HEIGHT = 240;   // px at most, if rows of SMALLEST fit
const SMALLEST = 3, LARGEST = 18;  // px a row

export class Experts {
  constructor(card, colors, explain) {
    this.card = card;
    this.canvas = card.querySelector("canvas");
    this.context = this.canvas.getContext("2d");
    this.facts = card.querySelector("[data-role=experts-facts]");
    this.colors = colors;
    this.explain = explain;
    this.cursor = null;   // [row, expert]
    this.clear();
    const at = (event) => this.point(this.cellAt(event.offsetX, event.offsetY));
    this.canvas.addEventListener("pointermove", at);
    this.canvas.addEventListener("pointerdown", at);
    for (const kind of ["pointerleave", "blur"]) this.canvas.addEventListener(kind, () => this.point(null));
    this.canvas.addEventListener("focus", () => this.point(this.cursor ?? [0, 0]));
    this.canvas.addEventListener("keydown", (event) => this.key(event));
  }

  /** For another engine, or none. */
  clear() {
    this.readings = [];
    this.readAt = -Infinity;
    this.isNone = false;   // the model has no experts
    this.repaint();
  }

  repaint() {
    this.drawn = "";
  }

  async read(now) {
    this.readAt = now;
    const readings = this.readings;
    try {
      const reading = await json("engine/experts", { quiet: true });
      if (readings !== this.readings || !reading.layers) return;   // of the engine before; or it is in a long step
      this.isNone = reading.layers.length === 0;
      if (!this.isNone) this.take(reading);
    } catch { /* the feed says what is wrong; the next reading may succeed */ }
  }

  take(reading) {
    reading.total = reading.tokens[0].reduce((sum, count) => sum + count, 0);
    const newest = this.readings.at(-1);
    const isSame = newest?.layers.length === reading.layers.length && newest.tokens[0].length === reading.tokens[0].length;
    if (!isSame || reading.total < newest.total) this.readings.length = 0;   // the server has begun anew
    else if (newest.total === reading.total) return;
    this.readings.push(reading);
    if (this.readings.length > KEPT) this.readings.shift();
    this.repaint();
  }

  /** Tokens of an expert since the oldest reading. */
  tokens(row, expert) {
    const first = this.readings.length > 1 ? this.readings[0].tokens[row][expert] : 0;
    return this.readings.at(-1).tokens[row][expert] - first;
  }

  mean(row) {
    const count = this.readings.at(-1).tokens[row].length;
    let sum = 0;
    for (let expert = 0; expert < count; expert += 1) sum += this.tokens(row, expert);
    return sum / count;
  }

  draw(isLive, now) {
    if (isLive && !this.isNone && now - this.readAt > PAUSE) this.read(now);
    const newest = this.readings.at(-1);
    this.card.hidden = !isLive || !newest;
    if (this.card.hidden) return;
    const width = this.canvas.clientWidth, state = `${width} ${this.cursor}`;
    if (!width || this.drawn === state) return;
    this.drawn = state;
    this.numRows = newest.layers.length;
    this.numExperts = newest.tokens[0].length;
    this.side = Math.max(SMALLEST, Math.min(LARGEST, Math.floor(HEIGHT / this.numRows)));
    this.width = width;
    this.paint(newest);
    const tokens = (this.mean(0) * this.numExperts).toLocaleString();
    this.facts.textContent = t("experts.facts", { layers: this.numRows, experts: this.numExperts, tokens });
  }

  paint(newest) {
    const { canvas, context, colors, side, width } = this;
    const ratio = window.devicePixelRatio || 1, height = side * this.numRows;
    canvas.style.height = `${height}px`;
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(height * ratio);
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    const gap = side > 6 ? 1 : 0;
    for (let row = 0; row < this.numRows; row += 1) {
      const mean = this.mean(row) || 1;
      for (let expert = 0; expert < this.numExperts; expert += 1) {
        const x = this.left(expert), room = this.left(expert + 1) - x;
        const place = [x, row * side, room > 4 ? room - 1 : room, side - gap];
        context.globalAlpha = 1;
        context.fillStyle = colors.cell;
        context.fillRect(...place);
        context.globalAlpha = Math.min(1, Math.sqrt(this.tokens(row, expert) / mean / FULL));
        context.fillStyle = colors.accent;
        context.fillRect(...place);
      }
    }
    context.globalAlpha = 1;
    this.label(newest.layers[0], 0);
    if (this.numRows > 1) this.label(newest.layers.at(-1), this.numRows - 1);
    if (this.cursor) {
      const [row, expert] = this.cursor, x = this.left(expert);
      context.strokeStyle = colors.ink;
      context.lineWidth = 1.5;
      context.strokeRect(x + 0.75, row * side + 0.75, Math.max(2, this.left(expert + 1) - x - 1.5), Math.max(2, side - 1.5));
    }
  }

  left(expert) {
    return SIDE + Math.round((expert * (this.width - SIDE)) / this.numExperts);
  }

  label(layer, row) {
    const { context } = this;
    context.font = "11px system-ui, sans-serif";
    context.textAlign = "left";
    context.textBaseline = row ? "bottom" : "top";
    context.fillStyle = this.colors.soft;
    context.fillText(String(layer), 0, row ? (row + 1) * this.side : 1);
  }

  cellAt(x, y) {
    const row = Math.floor(y / this.side), expert = Math.floor(((x - SIDE) * this.numExperts) / (this.width - SIDE));
    return row >= 0 && row < this.numRows && expert >= 0 && expert < this.numExperts ? [row, expert] : null;
  }

  key(event) {
    const move = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] }[event.key];
    if (!move || !this.cursor) return;
    event.preventDefault();
    const [row, expert] = [this.cursor[0] + move[0], this.cursor[1] + move[1]];
    if (row >= 0 && row < this.numRows && expert >= 0 && expert < this.numExperts) this.point([row, expert]);
  }

  point(cell) {
    this.cursor = cell;
    if (!cell) return;
    const [row, expert] = cell, tokens = this.tokens(row, expert);
    const layer = this.readings.at(-1).layers[row], times = (tokens / (this.mean(row) || 1)).toFixed(1);
    this.explain.say("experts", t("experts.tip", { layer, expert, tokens: tokens.toLocaleString(), times }));
  }
}
