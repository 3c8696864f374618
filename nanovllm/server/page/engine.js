// The Engine tab: one source of events (live or recorded), one Replay, and the panels that draw it.
//
// Events are applied when they come, however fast; panels are drawn once a frame, from the state. So a thousand steps a
// second cost a thousand small updates and sixty drawings.

import { json, call } from "./api.js";
import { Controls } from "./controls.js";
import { Experts } from "./experts.js";
import { Explain } from "./explain.js";
import { Live, Recording, parseTrace } from "./feed.js";
import { Grid } from "./grid.js";
import { History } from "./history.js";
import { drawLegend } from "./legend.js";
import { CacheMap } from "./map.js";
import { Player } from "./player.js";
import { Plots } from "./plots.js";
import { Queues } from "./queues.js";
import { Replay } from "./replay.js";
import { Strip } from "./strip.js";
import { Timeline } from "./timeline.js";
import { Tour } from "./tour.js";
import { t } from "./words.js";

export class Engine {
  constructor(root, colors, info) {
    this.root = root;
    this.info = info;
    this.colors = colors;
    this.find = (role) => root.querySelector(`[data-role=${role}]`);
    this.explain = new Explain(root, this.find("explain"));
    const onHover = (id) => this.setHighlight(id), onChoose = (id) => this.strip.choose(id);
    this.grid = new Grid(this.find("grid"), colors, this.explain, { onHover, onChoose });
    this.map = new CacheMap(this.find("map"), colors, this.grid);
    this.strip = new Strip(root.querySelector(".card.strip"), colors, this.explain, onHover);
    this.timeline = new Timeline(this.find("timeline"), colors, this.explain, onHover);
    this.queues = new Queues(root, colors, this.explain, { onHover, onChoose });
    this.experts = new Experts(this.find("experts"), colors, this.explain);
    this.controls = new Controls(root, this);
    this.player = new Player(root, () => this.backToLive());
    this.tour = new Tour(root, { onWork: () => this.controls.guarded(() => this.controls.work()) });
    this.plots = new Plots(root, colors);
    this.history = new History();
    this.live = new Live({
      onConnect: () => this.meet(),
      onEvent: (event) => this.apply(event),
      onState: (state, why) => this.setFeed(state, why),
    });
    this.recording = null;
    this.feedState = "lost";
    this.replay = null;
    this.shown = false;
    this.wire();
  }

  // ---- events into state ----------------------------------------------------------------------------------------

  begin(info) {
    this.facts = info;
    this.replay = new Replay(info);
    this.history.clear();
    this.experts.clear();
    this.grid.show(this.replay);
    this.strip.repaint();
  }

  apply(event) {
    this.replay.apply(event);
    this.giveColors(event);
    this.history.apply(event, this.replay);
  }

  /** To all who begin to run, when they do: a recording that is played again gives everyone the colour it had. */
  giveColors(event) {
    const arrived = event.type === "snapshot" ? this.replay.running.map((seq) => [seq.id]) : event.arrivals ?? [];
    for (const [id] of arrived) this.colors.give(id, (other) => this.replay.seqs.has(other));
  }

  get isLive() {
    return !this.recording && this.feedState === "live" && Boolean(this.replay);
  }

  // What a Recording calls
  reset() {
    this.begin(this.facts);
  }

  toSnapshot() {
    return this.replay.toSnapshot();
  }

  /** When the tab is first looked at: until then this page takes nobody's place among the watchers. */
  async start() {
    if (this.info.replay) {
      await this.controls.guarded(async () => this.record(await (await call("engine/trace")).text(), this.info.file ?? ""));
    } else if (this.info.events) {
      this.begin(this.info);
      this.live.start();
    }
    this.refresh();
    if (this.replay && !this.recording) this.tour.offer();
  }

  /** A server that went away may come back with another cache. */
  async meet() {
    const info = await json("engine/info");
    const same = info.num_blocks === this.facts.num_blocks && info.block_size === this.facts.block_size;
    this.info = info;
    if (!same) {
      this.colors.forget();
      this.begin(info);
    }
  }

  record(text, name) {
    let trace;
    try {
      trace = parseTrace(text);
    } catch (error) {
      this.controls.say(t("error.trace", { name, why: error.message }), true);
      return;
    }
    this.live.stop();
    this.feedState = "lost";
    this.colors.forget();
    this.begin(trace.header);
    this.recording = new Recording(trace, this);
    this.player.show(this.recording);
    this.controls.say(name);
    this.refresh();
  }

  backToLive() {
    this.recording = null;
    this.player.show(null);
    this.colors.forget();
    this.controls.say("");
    this.begin(this.info);
    this.live.start();
    this.refresh();
  }

  setFeed(state, why) {
    this.feedState = state;
    if (why) this.controls.say(why, true);
    else this.controls.unsay();
    this.refresh();
  }

  // ---- buttons and files ------------------------------------------------------------------------------------------

  wire() {
    const click = (role, action) => this.find(role).addEventListener("click", action);
    click("zoom-in", () => this.grid.zoomBy(1.4));
    click("zoom-out", () => this.grid.zoomBy(1 / 1.4));
    click("follow", () => this.grid.setFollow(!this.grid.follows));
    for (const input of this.root.querySelectorAll("input[type=file]")) {
      input.addEventListener("change", async () => {
        const [file] = input.files;
        if (file) this.record(await file.text(), file.name);
        input.value = "";        // so that the same file can be opened again
      });
    }
    // The board and not the tab: it also appears later than its tab does, when a recording has been read.
    new ResizeObserver(() => this.layout()).observe(this.find("on"));
  }

  // ---- state onto the screen --------------------------------------------------------------------------------------

  setHighlight(id) {
    this.grid.setHighlight(this.replay?.seqs.has(id) ? id : null);  // one that is gone has no blocks to show
    this.timeline.setHighlight(id);
    this.queues.highlight = id;
  }

  layout() {
    this.grid.layout();
    drawLegend(this.root, this.colors);
    this.timeline.layout();
    this.plots.repaint();
  }

  /** After a change of language or theme. */
  repaint() {
    this.colors.read();
    for (const panel of [this.grid, this.map, this.strip, this.timeline, this.queues, this.plots, this.experts]) panel.repaint();
    this.explain.translate();
    this.tour.translate();
    this.controls.bars.draw();
    drawLegend(this.root, this.colors);
    this.refresh();
  }

  show(shown) {
    this.shown = shown;
    if (!shown) return;
    if (!this.started) {
      this.started = true;
      this.start();
    }
    if (this.loop) return;
    this.loop = true;
    let before = performance.now();
    const frame = (now) => {
      if (!this.shown) {
        this.loop = false;
        return;
      }
      this.recording?.tick(Math.min(0.25, (now - before) / 1000));
      before = now;
      this.draw(now);
      requestAnimationFrame(frame);
    };
    requestAnimationFrame(frame);
  }

  draw(now) {
    if (!this.replay) return;
    this.grid.draw(now);
    this.map.draw(this.replay);
    this.strip.draw(this.replay, now);
    this.queues.chosen = this.strip.shown;
    this.timeline.draw(this.history);
    this.experts.draw(this.isLive, now);
    this.plots.draw(this.history);
    this.queues.draw(this.replay, now);
    if (this.refreshed !== this.replay.version) this.refresh();
    this.player.draw();
    this.find("follow").setAttribute("aria-pressed", String(this.grid.follows));
  }

  /** Everything of this tab that is words and buttons. */
  refresh() {
    const { replay, recording } = this;
    this.refreshed = replay?.version;
    const watching = Boolean(replay);
    this.find("off").hidden = watching;
    this.find("on").hidden = !watching;
    this.find("off-error").textContent = this.info.error ?? "";
    if (!watching) return;
    this.find("live-controls").hidden = Boolean(recording);
    this.find("demos").hidden = Boolean(recording);
    this.find("player").hidden = !recording;
    this.find("live").hidden = !recording || !this.info.events;
    const state = recording ? "replay" : this.feedState === "live" && replay.paused ? "paused" : this.feedState;
    const feed = this.find("feed");
    if (feed.dataset.state !== state || feed.textContent !== t(state)) {
      feed.dataset.state = state;
      feed.textContent = t(state);
    }
    this.controls.refresh(replay);
    const count = replay.numBlocks.toLocaleString();
    this.find("grid-facts").textContent = t("grid.facts", { count, size: replay.blockSize });
    this.find("step-count").textContent = replay.lastStep;
    this.root.dataset.step = replay.lastStep;
    this.root.dataset.owned = replay.numOwned;
  }
}
