// The convoy effect as bars: what the same requests waited for under fcfs and under sjf.

import { t } from "./words.js";

export class ConvoyBars {
  constructor(card) {
    this.card = card;
    this.figures = {};
    card.querySelector("[data-role=convoy-close]").addEventListener("click", () => { card.hidden = true; });
  }

  begin() {
    this.figures = {};
    this.card.hidden = false;
    this.draw();
  }

  /** figures: {short, long} in ms, of one policy */
  set(policy, figures) {
    this.figures[policy] = figures;
    this.draw();
  }

  draw() {
    const longest = Math.max(1, ...Object.values(this.figures).flatMap(({ short, long }) => [short, long]));
    for (const row of this.card.querySelectorAll("[data-bar]")) {
      const [policy, kind] = row.dataset.bar.split(" ");
      const ms = this.figures[policy]?.[kind];
      row.querySelector("i").style.width = `${(100 * (ms ?? 0)) / longest}%`;
      row.querySelector("output").textContent = ms === undefined ? "…" : t("ms", { ms: Math.round(ms).toLocaleString() });
    }
    const { fcfs, sjf } = this.figures;
    const verdict = this.card.querySelector("[data-role=verdict]");
    verdict.textContent = !fcfs || !sjf ? t("bars.wait")
      : sjf.short < fcfs.short ? t("bars.better", { times: (fcfs.short / sjf.short).toFixed(1) }) : t("bars.same");
  }
}
