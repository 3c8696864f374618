// Colours for canvases: those of the style sheet, resolved for the theme, and one for each sequence.
//
// Six hues that people with the common forms of colour blindness can tell apart (after Paul Tol's "bright" set), then
// the same six in a second shade. A sequence keeps its colour for life, since it depends on its id alone; where two of
// twelve colours meet by chance, the numbers beside them decide.

const NUM_HUES = 6;
const NAMES = ["ink", "soft", "faint", "line", "card", "accent", "warn", "cell"];

export class Colors {
  constructor() {
    this.probe = document.body.appendChild(document.createElement("i"));
    this.probe.hidden = true;
    this.read();
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

  of(id) {
    return this.hues[id % this.hues.length];
  }
}
