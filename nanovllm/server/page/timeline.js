// The last steps, one bar each: stacked from what every sequence fed in it, as high as the step had tokens.
//
// Heights follow the square root: a prompt chunk of 512 tokens and a decode of one would otherwise not fit into one
// picture. A chunk is solid, a decode is pale; a triangle above a bar is a preemption.

import { t } from "./words.js";

const BAR = 9;     // px, with a gap of 2
const TOP = 16;    // room for triangles
const MARK = 4;
const SIDE = 34;   // for the figures of the scale

export class Timeline {
  constructor(canvas, colors, explain, onHover) {
    this.canvas = canvas;
    this.colors = colors;
    this.explain = explain;
    this.onHover = onHover;
    this.context = canvas.getContext("2d");
    this.history = null;
    this.highlight = null;
    this.cursor = null;      // step id
    this.visible = [];
    this.drawn = "";
    canvas.addEventListener("pointermove", (event) => this.pointAt(event));
    canvas.addEventListener("pointerdown", (event) => this.pointAt(event));
    canvas.addEventListener("pointerleave", () => this.leave());
    canvas.addEventListener("blur", () => this.leave());
    canvas.addEventListener("focus", () => this.point(this.visible.at(-1)));
    canvas.addEventListener("keydown", (event) => {
      const move = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
      if (!move) return;
      event.preventDefault();
      const index = this.visible.findIndex((step) => step.id === this.cursor);
      this.point(this.visible[Math.max(0, Math.min(this.visible.length - 1, index + move))]);
    });
  }

  layout() {
    const { clientWidth, clientHeight } = this.canvas.parentElement;
    if (!clientWidth) return;
    const ratio = window.devicePixelRatio || 1;
    this.width = clientWidth;
    this.height = clientHeight;
    this.canvas.width = clientWidth * ratio;
    this.canvas.height = clientHeight * ratio;
    this.context.setTransform(ratio, 0, 0, ratio, 0, 0);
    this.repaint();
  }

  repaint() {
    this.drawn = "";
  }

  setHighlight(id) {
    if (id !== this.highlight) this.repaint();
    this.highlight = id;
  }

  draw(history) {
    this.history = history;
    const state = `${history.version} ${this.cursor}`;
    if (!this.width || state === this.drawn) return;
    this.drawn = state;
    const { context, width, height } = this;
    this.visible = history.steps.slice(-Math.floor((width - SIDE) / BAR));
    context.clearRect(0, 0, width, height);
    const most = Math.max(4, ...this.visible.map((step) => step.tokens));
    this.scale(most);
    this.visible.forEach((step, index) => this.bar(step, index * BAR, most));
  }

  lengthOf(tokens, most) {
    return Math.sqrt(tokens / most) * (this.height - TOP - 1);
  }

  scale(most) {
    const { context, colors, width, height } = this;
    context.font = "11px system-ui, sans-serif";
    context.textAlign = "right";
    context.textBaseline = "middle";
    const marks = [most, most / 4].map((value) => (value > 40 ? Math.round(value / 10) * 10 : Math.round(value)));
    for (const tokens of marks) {
      const y = Math.round(height - this.lengthOf(tokens, most)) + 0.5;
      context.strokeStyle = colors.line;
      context.beginPath();
      context.moveTo(0, y);
      context.lineTo(width - SIDE, y);
      context.stroke();
      context.fillStyle = colors.soft;
      context.fillText(String(tokens), width, y);
    }
  }

  bar(step, x, most) {
    const { context, colors, height } = this;
    const unit = this.lengthOf(step.tokens, most) / step.tokens;
    let y = height;
    for (const [id, tokens, isDecode] of step.parts) {
      const length = tokens * unit;
      context.fillStyle = colors.of(id);
      context.globalAlpha = (isDecode ? 0.55 : 1) * (this.highlight === null || this.highlight === id ? 1 : 0.2);
      // A hairline between two sequences, where there is room for one
      context.fillRect(x, y - length, BAR - 2, length > 2.5 ? length - 1 : length);
      y -= length;
    }
    context.globalAlpha = 1;
    if (step.preempted) {
      context.fillStyle = colors.warn;
      context.beginPath();
      context.moveTo(x - 0.5, y - 11);
      context.lineTo(x + BAR - 1.5, y - 11);
      context.lineTo(x + BAR / 2 - 1, y - 11 + MARK + 2);
      context.fill();
    }
    if (step.id === this.cursor) {
      context.strokeStyle = colors.ink;
      context.lineWidth = 1.5;
      context.strokeRect(x - 1, y - 1, BAR, height - y + 1);
      context.lineWidth = 1;
    }
  }

  pointAt(event) {
    const step = this.visible[Math.floor(event.offsetX / BAR)];
    if (!step) return;
    this.point(step);
    this.onHover(this.sequenceAt(step, event.offsetY));
  }

  sequenceAt(step, y) {
    const most = Math.max(4, ...this.visible.map((other) => other.tokens));
    const unit = this.lengthOf(step.tokens, most) / step.tokens;
    let above = this.height;
    for (const [id, tokens] of step.parts) {
      above -= tokens * unit;
      if (y >= above) return id;
    }
    return null;
  }

  point(step) {
    if (!step) return this.explain.say("timeline");
    this.cursor = step.id;
    this.explain.say("timeline", t("step.tip", {
      step: step.id, prefill: step.prefill, chunks: step.chunks, decodes: step.parts.length - step.chunks,
      ms: step.ms === null ? "" : t("step.ms", { ms: step.ms.toFixed(1) }),
      extra: (step.preempted ? t("step.preempted", { count: step.preempted }) : "")
        + (step.evicted ? t("step.evicted", { count: step.evicted }) : ""),
    }));
    return undefined;
  }

  leave() {
    this.cursor = null;
    this.onHover(null);
  }
}
