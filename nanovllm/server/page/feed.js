// Where events come from: the running engine (Live) or a recording (Recording). Both hand them to a Replay.

import { ApiError, call, events } from "./api.js";
import { Replay } from "./replay.js";

const FIRST_WAIT = 500;  // ms before the first new try; doubles up to LONGEST_WAIT
const LONGEST_WAIT = 8000;

/** Follows /engine/events for ever: onConnect() before each try, onEvent(event), onState("live" or "lost", why). */
export class Live {
  constructor({ onConnect, onEvent, onState }) {
    this.onConnect = onConnect;
    this.onEvent = onEvent;
    this.onState = onState;
    this.aborter = null;
  }

  async start() {
    if (this.aborter) return;
    const aborter = this.aborter = new AbortController();
    let wait = FIRST_WAIT;
    while (!aborter.signal.aborted) {
      let why = "";
      try {
        await this.onConnect();
        const response = await call("engine/events", { signal: aborter.signal });
        for await (const { data } of events(response)) {
          if (aborter.signal.aborted) return;
          const event = JSON.parse(data);
          // The server begins with a snapshot, and sends another when this reader was too slow for it.
          if (event.type === "snapshot") this.onState("live", "");
          this.onEvent(event);
          wait = FIRST_WAIT;
        }
      } catch (error) {
        if (error.name === "AbortError") return;
        why = error.message;
        if (error instanceof ApiError && error.status === 404) wait = LONGEST_WAIT;
      }
      this.onState("lost", why);
      await new Promise((resolve) => { setTimeout(resolve, wait); });
      wait = Math.min(LONGEST_WAIT, wait * 2);
    }
  }

  stop() {
    this.aborter?.abort();
    this.aborter = null;
  }
}

/** A trace: JSON lines, the first a header, the second a snapshot. Throws an Error if it is something else. */
export function parseTrace(text) {
  const lines = text.split("\n").filter((line) => line.trim());
  const parsed = [];
  for (const [index, line] of lines.entries()) {
    try {
      parsed.push(JSON.parse(line));
    } catch (error) {
      // An engine that was killed leaves half a line at the end; anywhere else it is a fault of the file.
      if (index < lines.length - 1 || index === 0) throw error;
    }
  }
  const [header, ...rest] = parsed;
  const sound = header?.type === "header" && header.num_blocks > 0 && header.block_size > 0;
  if (!sound || rest[0]?.type !== "snapshot") throw new Error("no header and snapshot");
  // Played once in silence: a file that contradicts itself is refused here, not in the middle of a picture.
  const replay = new Replay(header);
  for (const event of rest) {
    replay.apply(event);
    if ("free" in event && event.free !== replay.numFree) throw new Error(`free blocks of event ${replay.version}`);
  }
  return { header, events: rest };
}

const HISTORY = 1500;       // events fed before the place that was sought, so that timeline and plots have a past
const SPACING = 2000;       // events between two checkpoints; a jump back replays at most SPACING + HISTORY of them

/** A trace with a place in it. `target` has apply(event), reset() and toSnapshot(). */
export class Recording {
  constructor({ header, events: list }, target) {
    this.header = header;
    this.events = list;
    this.target = target;
    this.place = 0;           // events applied so far
    this.playing = false;
    this.speed = 1;
    this.checkpoints = new Map();  // place -> snapshot
    this.seek(1);
  }

  get length() {
    return this.events.length;
  }

  get time() {
    return this.events[Math.max(0, this.place - 1)].t - this.events[0].t;
  }

  get duration() {
    return this.events.at(-1).t - this.events[0].t;
  }

  seek(place) {
    const wanted = Math.max(1, Math.min(this.length, Math.round(place)));
    if (wanted < this.place || wanted > this.place + SPACING || this.place === 0) {
      const start = Math.max(0, ...[...this.checkpoints.keys()].filter((at) => at <= wanted - HISTORY));
      this.target.reset();
      this.place = start;
      if (start) this.target.apply(this.checkpoints.get(start));
    }
    while (this.place < wanted) this.applyNext();
    this.clock = this.time;
  }

  applyNext() {
    this.target.apply(this.events[this.place]);
    this.place += 1;
    const due = this.place - Math.max(0, ...this.checkpoints.keys()) >= SPACING;
    if (due) this.checkpoints.set(this.place, this.target.toSnapshot());
  }

  /** To the next plan and its result: what one press of "step" shows. */
  forward() {
    let end = this.place;
    while (end < this.length && this.events[end].type !== "done") end += 1;
    this.seek(end + 1);
  }

  back() {
    let end = this.place - 1;
    while (end > 1 && this.events[end - 1].type !== "done") end -= 1;
    this.seek(end);
  }

  /** Move on by so many seconds of wall time. */
  tick(seconds) {
    if (!this.playing) return;
    this.clock += seconds * this.speed;
    const began = this.events[0].t;
    while (this.place < this.length && this.events[this.place].t - began <= this.clock) this.applyNext();
    if (this.place >= this.length) this.playing = false;
  }
}
