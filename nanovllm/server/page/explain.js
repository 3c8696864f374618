// The line at the bottom of the Engine tab: what the thing under the pointer is, in a sentence, and which file does it.
//
// A fixed line instead of a floating tip: it is there on a phone, for the keyboard and for a screen reader alike, it
// hides nothing, and its link can be reached.

import { t } from "./words.js";

const CACHE = "nanovllm/scheduling/block_manager.py";
const SCHEDULER = "nanovllm/scheduling/scheduler.py";
const POLICY = "nanovllm/scheduling/policy.py";

export const FILES = {
  start: "nanovllm/engine/llm_engine.py",
  grid: CACHE, owned: CACHE, shared: CACHE, cached: CACHE, held: CACHE, free: CACHE, evicted: CACHE,
  timeline: SCHEDULER, prefill: SCHEDULER, decode: "nanovllm/scheduling/plan.py", preempted: SCHEDULER,
  running: SCHEDULER, waiting: POLICY, seq: "nanovllm/scheduling/sequence.py",
  ms: "nanovllm/runner/model_runner.py", rate: "nanovllm/engine/llm_engine.py", hits: CACHE, usage: CACHE,
  drafts: "nanovllm/runner/verify.py",
  pause: "nanovllm/engine/async_engine.py", resume: "nanovllm/engine/async_engine.py",
  step: "nanovllm/engine/llm_engine.py", convoy: POLICY, prefix: CACHE,
  fcfs: POLICY, sjf: POLICY, strip: CACHE, map: CACHE, work: "nanovllm/engine/async_engine.py", tour: CACHE,
  experts: "nanovllm/moe/load.py", replay: "nanovllm/telemetry/trace.py", feed: "nanovllm/telemetry/feed.py",
};

export class Explain {
  constructor(root, bar) {
    this.text = bar.querySelector("[data-role=text]");
    this.link = bar.querySelector("a");
    const show = (event) => {
      const about = event.target.closest?.("[data-x]");
      if (about) this.say(about.dataset.x);
    };
    for (const kind of ["pointerover", "focusin", "click"]) root.addEventListener(kind, show);
    this.say("start");
  }

  /** `about` chooses the sentence and the file; `now` is what holds for this very thing, put before it. */
  say(about, now = "") {
    this.said = [about, now];
    const sentence = about === "seq" ? "" : t(`x.${about}`);
    this.text.textContent = now && sentence ? `${now} ${sentence}` : now || sentence;
    this.link.textContent = FILES[about];
    this.link.href = `source/${FILES[about]}`;
  }

  translate() {
    this.say(this.said[0]);
  }
}
