// One cell of the KV cache on a canvas. The grid and its legend are painted by this, so that they look alike.
//
//   paintCell(context, colors, { x, y, side }, { state: "owned", hues: ["#47a"], level: 0.4 })
//
// state: "free" | "cached" | "held" | "owned"; hues: the colours of up to two owners; count: of all owners; level: how
// much of the block is filled, 0 to 1.

const CORNER = 2.5;
const SMALL = 8;       // px: below it no rounded corners and no lines
const WITH_COUNT = 15; // px: from here on a reference count can be read

export function paintCell(context, colors, place, cell) {
  square(context, place, colors.cell);
  if (cell.state === "owned") owned(context, colors, place, cell);
  else if (cell.state === "cached") hatch(context, colors, place);
  else if (cell.state === "held") dot(context, colors, place);
}

export function paintRing(context, { x, y, side }, color, alpha) {
  context.globalAlpha = alpha;
  context.strokeStyle = color;
  context.lineWidth = Math.min(2, side / 3);
  context.strokeRect(x + 1, y + 1, side - 2, side - 2);
  context.globalAlpha = 1;
}

function square(context, { x, y, side }, color) {
  context.fillStyle = color;
  context.beginPath();
  context.roundRect(x, y, side, side, side < SMALL ? 0 : CORNER);
  context.fill();
}

function owned(context, colors, place, { hues, count = 1, level = 1 }) {
  const { x, y, side } = place;
  const before = context.globalAlpha;
  context.save();
  context.beginPath();
  context.roundRect(x, y, side, side, side < SMALL ? 0 : CORNER);
  context.clip();
  context.fillStyle = hues[0];
  if (level < 1) {              // the unfilled part: taken, but empty
    context.globalAlpha = before * 0.3;
    context.fillRect(x, y, side, side);
    context.globalAlpha = before;
  }
  context.fillRect(x, y + side * (1 - level), side, side * level);
  if (count > 1) {              // the second owner's colour below the diagonal, also where a number does not fit
    context.fillStyle = hues[1];
    context.beginPath();
    context.moveTo(x + side, y);
    context.lineTo(x + side, y + side);
    context.lineTo(x, y + side);
    context.fill();
  }
  context.restore();
  if (count > 1 && side >= WITH_COUNT) label(context, colors, place, count > 99 ? "99+" : String(count));
}

/** A number on a ground of its own: readable on every colour. */
function label(context, colors, { x, y, side }, text) {
  const size = Math.max(10, Math.min(14, Math.round(side * (text.length > 2 ? 0.36 : 0.46))));
  context.font = `700 ${size}px system-ui, sans-serif`;
  const width = Math.min(side - 2, Math.max(size + 4, context.measureText(text).width + 7)), height = size + 4;
  context.fillStyle = colors.card;
  context.beginPath();
  context.roundRect(x + (side - width) / 2, y + (side - height) / 2, width, height, height / 2);
  context.fill();
  context.fillStyle = colors.ink;
  context.textAlign = "center";
  context.textBaseline = "middle";
  context.fillText(text, x + side / 2, y + side / 2 + 0.5);
}

function hatch(context, colors, place) {
  const { x, y, side } = place;
  const before = context.globalAlpha;
  if (side < SMALL) {
    context.globalAlpha = before * 0.55;
    square(context, place, colors.faint);
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

function dot(context, colors, { x, y, side }) {
  context.fillStyle = colors.soft;
  context.beginPath();
  context.arc(x + side / 2, y + side / 2, Math.max(1, side * 0.18), 0, 2 * Math.PI);
  context.fill();
}
