// The banner on both tabs while the engine is paused: an answer that does not come has a reason and a way out.
//
// The Engine tab's feed reports it at once. Before that tab was opened there is no feed, and the page fetches it from the
// server now and then, as long as the page is visible.

import { json } from "./api.js";

const EVERY = 250;     // ms between two looks at the feed
const ASK = 8;         // of these looks between two questions to the server

export class PausedBanner {
  constructor(banner, engine, info) {
    this.banner = banner;
    this.engine = engine;
    this.set(Boolean(info.paused));
    banner.querySelector("button").addEventListener("click", async () => {
      await json("engine/control", { body: { action: "resume" } });
      this.set(false);
    });
    if (info.events) this.watch();
  }

  set(paused) {
    if (this.banner.hidden === paused) this.banner.hidden = !paused;
  }

  async watch() {
    for (let look = 1; ; look += 1) {
      await new Promise((resolve) => { setTimeout(resolve, EVERY); });
      if (this.engine.isLive) this.set(this.engine.replay.paused);
      else if (look % ASK === 0 && !document.hidden) await this.ask();
    }
  }

  async ask() {
    try {
      this.set((await json("engine/info", { quiet: true })).paused);
    } catch { /* gone for now: whoever sends something is told */ }
  }
}
