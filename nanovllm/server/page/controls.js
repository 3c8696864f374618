// The controls of a running engine: pause, one step, the policy, and the demonstrations.

import { json } from "./api.js";
import { ConvoyBars } from "./convoy.js";
import { convoy, prefix, work } from "./demos.js";
import { t } from "./words.js";

export class Controls {
  /** `engine`: info, replay and refresh() of the Engine tab */
  constructor(root, engine) {
    this.root = root;
    this.engine = engine;
    this.find = (role) => root.querySelector(`[data-role=${role}]`);
    this.bars = new ConvoyBars(this.find("bars"));
    this.working = null;      // ends the work that was sent
    const control = (action) => json("engine/control", { body: { action } });
    this.click("pause", () => control(engine.replay.paused ? "resume" : "pause"));
    this.click("step", () => control("step"));
    this.click("convoy", () => this.demo(convoy, this.bars));
    this.click("prefix", () => this.demo(prefix));
    this.click("work", () => this.work());
    for (const button of root.querySelectorAll("[data-policy]")) {
      button.addEventListener("click", () => this.guarded(async () => {
        await json("engine/policy", { body: { policy: button.dataset.policy } });
        this.say(t("convoy.why"));
      }));
    }
  }

  click(role, action) {
    this.find(role).addEventListener("click", () => this.guarded(action));
  }

  async guarded(action) {
    try {
      await action();
    } catch (error) {
      this.say(error.message, true);
    }
    this.engine.refresh();
  }

  async demo(run, extra) {
    const buttons = [this.find("convoy"), this.find("prefix"), this.find("work")];
    for (const button of buttons) button.disabled = true;
    try {
      await run(this.engine.info, this.engine.replay, (text) => this.say(text), extra);
    } finally {
      for (const button of buttons) button.disabled = false;
    }
  }

  /** Sends some work, or ends what is under way. */
  async work() {
    if (this.working) return this.working.abort();
    this.working = new AbortController();
    this.engine.refresh();
    try {
      await work(this.engine.info, this.engine.replay, (text) => this.say(text), this.working.signal);
    } catch (error) {
      if (error.name !== "AbortError") throw error;
      this.say("");
    } finally {
      this.working = null;
    }
    return undefined;
  }

  say(text, bad = false) {
    const message = this.find("message");
    message.textContent = text;
    message.classList.toggle("bad", bad);
  }

  /** Takes back what went wrong, now that it is well again. */
  unsay() {
    if (this.find("message").classList.contains("bad")) this.say("");
  }

  refresh(replay) {
    this.find("pause").textContent = t(replay.paused ? "ctl.resume" : "ctl.pause");
    this.find("pause").dataset.x = replay.paused ? "resume" : "pause";
    this.find("step").disabled = !replay.paused;
    for (const role of ["work", "tour-work"]) this.find(role).textContent = t(this.working ? "ctl.work.stop" : "ctl.work");
    for (const button of this.root.querySelectorAll("[data-policy]")) {
      button.setAttribute("aria-pressed", String(button.dataset.policy === replay.policyName));
    }
    this.find("order").textContent = t(`order.${replay.policyName === "sjf" ? "sjf" : "fcfs"}`);
  }
}
