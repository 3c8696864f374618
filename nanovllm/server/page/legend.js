// The keys of the grid's legend, painted as the cells are (cells.js), so that the two cannot differ.

import { paintCell, paintRing } from "./cells.js";

const SAMPLES = {  // by the data-x of their entry
  owned: { state: "owned", level: 0.6 }, shared: { state: "owned", count: 2 }, cached: { state: "cached" },
  held: { state: "held" }, free: { state: "free" }, evicted: { state: "free" },
};

export function drawLegend(root, colors) {
  for (const canvas of root.querySelectorAll("canvas.key")) {
    const about = canvas.closest("[data-x]").dataset.x;
    const side = canvas.clientWidth, ratio = window.devicePixelRatio || 1;
    canvas.width = canvas.height = side * ratio;
    const context = canvas.getContext("2d"), place = { x: 0, y: 0, side };
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    paintCell(context, colors, place, { hues: colors.hues, ...SAMPLES[about] });
    if (about === "evicted") paintRing(context, place, colors.warn, 1);
  }
}
