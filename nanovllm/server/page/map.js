// The whole cache in one bar, below a grid that shows a part of it: where blocks are in use, and where the window is.

const HEIGHT = 12;   // px

export class CacheMap {
  constructor(canvas, colors, grid) {
    this.canvas = canvas;
    this.colors = colors;
    this.grid = grid;
    this.drawn = "";
    const go = (event) => {
      if (event.type === "pointermove" && !event.buttons) return;
      const row = Math.floor((event.offsetX / canvas.clientWidth) * grid.rows);
      grid.follows = false;
      grid.scrollTo(row - Math.floor(grid.height / grid.size / 2));
    };
    canvas.addEventListener("pointerdown", go);
    canvas.addEventListener("pointermove", go);
  }

  repaint() {
    this.drawn = "";
  }

  draw(replay) {
    const { canvas, grid, colors } = this;
    const isNeeded = Boolean(grid.size) && !grid.isWhole;
    canvas.parentElement.hidden = !isNeeded;
    const state = `${replay.version} ${grid.top} ${grid.size} ${canvas.clientWidth}`;
    if (!isNeeded || state === this.drawn) return;
    this.drawn = state;
    const width = canvas.clientWidth, ratio = window.devicePixelRatio || 1;
    canvas.width = width * ratio;
    canvas.height = HEIGHT * ratio;
    const context = canvas.getContext("2d");
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    context.fillStyle = colors.cell;
    context.fillRect(0, 0, width, HEIGHT);
    const perBlock = width / replay.numBlocks;
    const marks = (blocks, color) => {
      context.fillStyle = color;
      for (const block of blocks) context.fillRect(block * perBlock, 0, Math.max(1, perBlock), HEIGHT);
    };
    marks(replay.published, colors.faint);
    marks(replay.owners.keys(), colors.accent);
    const whole = grid.rows * grid.size;
    const from = (grid.top / whole) * width, length = Math.max(8, (grid.height / whole) * width);
    context.strokeStyle = colors.ink;
    context.lineWidth = 2;
    context.strokeRect(Math.min(from, width - length) + 1, 1, length - 2, HEIGHT - 2);
  }
}
