// Three steps that explain PagedAttention on the page itself: offered at the first visit, and by a button later.

import { load, save } from "./store.js";
import { t } from "./words.js";

const STEPS = [".card.cache", ".card.strip", ".card.steps"];   // the texts are tour.1, tour.2, tour.3
const BESIDE = 900;   // px of width: from here on the card stands beside what it explains, else at the bottom
const MARGIN = 16;

export class Tour {
  constructor(root, { onWork }) {
    this.root = root;
    this.card = root.querySelector("[data-role=tour]");
    this.find = (role) => this.card.querySelector(`[data-role=${role}]`);
    this.opener = root.querySelector("[data-role=tour-start]");
    this.index = 0;
    this.opener.addEventListener("click", () => this.start(true));
    this.find("tour-next").addEventListener("click", () => this.next());
    this.find("tour-end").addEventListener("click", () => this.end());
    this.find("tour-work").addEventListener("click", onWork);
    this.card.addEventListener("keydown", (event) => { if (event.key === "Escape") this.end(); });
    addEventListener("resize", () => this.place());
    root.querySelector(".board").addEventListener("scroll", () => this.place());
  }

  /** Once in a browser. Focus stays where it is: nobody asked for the tour. */
  offer() {
    if (!load("tour")) this.start(false);
  }

  start(focus) {
    this.card.hidden = false;
    this.show(0);
    if (focus) this.find("tour-next").focus();
  }

  next() {
    if (this.index + 1 < STEPS.length) this.show(this.index + 1);
    else this.end();
  }

  show(index) {
    this.index = index;
    for (const [place, selector] of STEPS.entries()) {
      this.root.querySelector(selector).classList.toggle("toured", place === index);
    }
    this.target.scrollIntoView({ block: innerWidth > BESIDE ? "nearest" : "start" });
    this.translate();
    this.place();
  }

  get target() {
    return this.root.querySelector(STEPS[this.index]);
  }

  translate() {
    const number = this.index + 1;
    this.find("tour-count").textContent = t("tour.count", { number, count: STEPS.length });
    this.find("tour-title").textContent = t(`tour.${number}.title`);
    this.find("tour-text").textContent = t(`tour.${number}`);
    this.find("tour-next").textContent = t(number < STEPS.length ? "tour.next" : "tour.last");
  }

  place() {
    if (this.card.hidden) return;
    const { style } = this.card;
    if (innerWidth <= BESIDE) {
      style.left = style.top = "";
      return;
    }
    const { top, right } = this.target.getBoundingClientRect(), { offsetWidth, offsetHeight } = this.card;
    const lowest = innerHeight - offsetHeight - MARGIN;
    style.left = `${Math.min(right + MARGIN, innerWidth - offsetWidth - MARGIN)}px`;
    style.top = `${Math.max(MARGIN, Math.min(top, lowest))}px`;
  }

  end() {
    const hadFocus = this.card.contains(document.activeElement);
    this.card.hidden = true;
    this.target.classList.remove("toured");
    save("tour", "seen");
    if (hadFocus) this.opener.focus();
  }
}
