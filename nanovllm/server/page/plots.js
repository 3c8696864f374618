// Small plots: the newest value in figures, the last steps as a line. That of guesses is there only if some were made.

const POINTS = 120;   // at most; fewer are spread out, down to FEWEST
const FEWEST = 30;

const FORMATS = {
  ms: (value) => (value < 10 ? `${value.toFixed(1)} ms` : `${Math.round(value)} ms`),
  rate: (value) => String(Math.round(value)),
  hits: (value) => `${Math.round(100 * value)} %`,
  usage: (value) => `${Math.round(100 * value)} %`,
  drafts: (value) => `${Math.round(100 * value)} %`,
};
const LIMITS = { hits: 1, usage: 1, drafts: 1 };  // shares are drawn against the whole, the others against their largest value

export class Plots {
  constructor(root, colors) {
    this.colors = colors;
    this.drawn = -1;
    this.plots = Object.keys(FORMATS).map((name) => {
      const card = root.querySelector(`[data-plot=${name}]`);
      return { name, card, value: card.querySelector("output"), canvas: card.querySelector("canvas") };
    });
  }

  repaint() {
    this.drawn = -1;
  }

  draw(history) {
    if (this.drawn === history.version) return;
    this.drawn = history.version;
    for (const plot of this.plots) {
      const values = history.values(plot.name).slice(-POINTS);
      if (plot.name === "drafts") plot.card.hidden = !values.length;
      plot.value.textContent = values.length ? FORMATS[plot.name](values.at(-1)) : plot.name === "rate" ? "0" : "–";
      this.line(plot.canvas, values, LIMITS[plot.name] ?? Math.max(1e-9, ...values));
    }
  }

  line(canvas, values, limit) {
    const ratio = window.devicePixelRatio || 1;
    const width = canvas.clientWidth, height = canvas.clientHeight;
    if (!width) return this.repaint();
    if (canvas.width !== Math.round(width * ratio) || canvas.height !== Math.round(height * ratio)) {
      canvas.width = Math.round(width * ratio);
      canvas.height = Math.round(height * ratio);
    }
    const context = canvas.getContext("2d");
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    context.clearRect(0, 0, width, height);
    const x = (index) => width - (values.length - 1 - index) * (width / (Math.max(FEWEST, values.length) - 1));
    const y = (value) => height - 1.5 - (height - 4) * Math.min(1, value / limit);
    context.beginPath();
    values.forEach((value, index) => context.lineTo(x(index), y(value)));
    context.strokeStyle = this.colors.accent;
    context.lineWidth = 1.5;
    context.lineJoin = "round";
    context.stroke();
    if (values.length > 1) {
      context.lineTo(width, height);
      context.lineTo(x(0), height);
      context.globalAlpha = 0.1;
      context.fillStyle = this.colors.accent;
      context.fill();
      context.globalAlpha = 1;
    }
    return undefined;
  }
}
