// Colours for canvases: those of the style sheet, resolved for the theme, and one for each sequence.
//
// Six hues that people with the common forms of colour blindness can tell apart (after Paul Tol's "bright" set), the
// same six in a second shade, then made ones. Sequences that live at the same time have different colours: one is
// given when a sequence first gets blocks, taken from those whose last holder is gone, and stays its own, so that the
// past steps of the timeline keep theirs.

const NUM_HUES = 6;
const KEPT = 4000;     // sequences whose colour is remembered
const NAMES = ["ink", "soft", "faint", "line", "card", "accent", "warn", "cell"];

export class Colors {
  constructor() {
    this.probe = document.body.appendChild(document.createElement("i"));
    this.probe.hidden = true;
    this.forget();
    this.read();
  }

  /** For another engine or another recording, whose ids mean something else. */
  forget() {
    this.slots = new Map();    // id -> index of its colour
    this.holders = [];         // index of a colour -> the last id that got it
    this.next = 0;
  }

  /** Again after a change of theme. */
  read() {
    for (const name of NAMES) this[name] = this.resolve(`var(--${name})`);
    this.hues = [];
    for (const shade of ["a", "b"]) {
      for (let hue = 0; hue < NUM_HUES; hue += 1) this.hues.push(this.resolve(`var(--seq-${hue}${shade})`));
    }
  }

  // light-dark() and color-mix() are resolved by the browser: a canvas wants the result.
  resolve(value) {
    this.probe.style.color = value;
    return getComputedStyle(this.probe).color;
  }

  /** A colour for this sequence. `isAlive(id)`: whether another one still needs its own. */
  give(id, isAlive) {
    if (this.slots.has(id)) return;
    const count = Math.max(2 * NUM_HUES, this.holders.length);
    let slot = this.holders.length;  // if all are in use
    for (let tried = 0; tried < count; tried += 1) {
      const place = (this.next + tried) % count;
      if (this.holders[place] !== undefined && isAlive(this.holders[place])) continue;
      slot = place;
      break;
    }
    this.next = slot + 1;
    this.holders[slot] = id;
    this.slots.set(id, slot);
    if (this.slots.size > KEPT) this.slots.delete(this.slots.keys().next().value);
  }

  /** One that never had a block has no colour yet. */
  of(id) {
    const slot = this.slots.get(id);
    if (slot === undefined) return this.faint;
    this.hues[slot] ??= this.made(slot);
    return this.hues[slot];
  }

  // Steps of the golden angle never meet; three degrees of lightness hold neighbours on the circle apart.
  made(slot) {
    return this.resolve(`oklch(${[0.5, 0.62, 0.74][slot % 3]} 0.13 ${(slot * 137.508) % 360})`);
  }
}
