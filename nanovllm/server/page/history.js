// History: the last steps in numbers, for the timeline and the small plots. Fed with the same events as Replay.

const KEPT = 400;      // steps
const WINDOW = 1;      // seconds that tokens/s looks back

export class History {
  constructor() {
    this.version = 0;
    this.clear();
  }

  clear() {
    this.version += 1;
    this.steps = [];           // {id, tokens, parts, prefill, chunks, preempted, evicted, ms}
    this.series = { ms: [], rate: [], hits: [], usage: [], drafts: [] };
    this.recent = [];          // [time, new tokens] of the last WINDOW
    this.idle = true;          // nothing is being computed: no tokens come, whatever the last window says
  }

  /** After `replay` took the event. */
  apply(event, replay) {
    if (event.type === "step" && event.entries.length + event.decodes.length) this.planned(event);
    else if (event.type === "done") this.ended(event, replay);
    else if (event.type === "snapshot") this.recent = [];  // perhaps of an engine that was started anew, with its clock
    const idle = replay.paused || !replay.running.length;
    if (idle !== this.idle) this.version += 1;
    this.idle = idle;
  }

  /** The values of a plot, oldest first. */
  values(name) {
    const series = this.series[name];
    return name === "rate" && this.idle && series.length ? [...series, 0] : series;
  }

  planned(event) {
    this.version += 1;
    // As the plan itself tells them apart: a decode feeds one token and samples the next (k of them, if decoded ahead).
    const parts = event.entries.map(([id, , numNew, , , samples]) => {
      const isDecode = numNew === 1 && Boolean(samples);
      return [id, isDecode ? event.k : numNew, isDecode];
    });
    for (const id of event.decodes) parts.push([id, event.k, true]);
    const chunks = parts.filter((part) => !part[2]);
    keep(this.steps, {
      id: event.step, parts, tokens: sum(parts), prefill: sum(chunks), chunks: chunks.length, ms: null,
      preempted: event.left.filter(([, reason]) => reason === "preempted").length, evicted: event.evicted.length,
    });
  }

  ended(event, replay) {
    this.version += 1;
    const step = this.steps.findLast((one) => one.id === event.step);
    if (step) step.ms = event.ms;
    this.recent.push([event.t, event.tokens]);
    while (this.recent.length > 2 && this.recent[0][0] < event.t - WINDOW) this.recent.shift();
    // The first of them began the window; its tokens were made before it.
    const seconds = event.t - this.recent[0][0];
    const made = this.recent.slice(1).reduce((total, [, tokens]) => total + tokens, 0);
    keep(this.series.ms, event.ms);
    keep(this.series.rate, seconds > 0 ? made / seconds : 0);
    keep(this.series.hits, replay.queries ? replay.hits / replay.queries : 0);
    keep(this.series.usage, replay.numOwned / replay.numBlocks);
    if (replay.drafted) keep(this.series.drafts, replay.accepted / replay.drafted);
  }
}

function keep(list, value) {
  list.push(value);
  if (list.length > 2 * KEPT) list.splice(0, list.length - KEPT);
}

function sum(parts) {
  return parts.reduce((total, [, tokens]) => total + tokens, 0);
}
