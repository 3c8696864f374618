// How answers are sampled. The model's own defaults hold, and are shown, until something is changed here; only what
// was changed is sent. A model that has none would be sampled at temperature 1, where small ones ramble: for such a
// model the page proposes, shows and sends its own.

import { load, save } from "./store.js";
import { t } from "./words.js";

const NAMES = ["temperature", "top_p", "top_k", "max_tokens", "seed", "system"];
const PROPOSED = { temperature: 0.7, top_p: 0.95 };
const NEUTRAL = { temperature: 1, top_p: 1, top_k: 0 };   // the server's where the model's generation_config says nothing

export class Settings {
  constructor(form, reset, info) {
    this.fields = form.elements;
    this.outputs = [...form.querySelectorAll("output")];
    const given = info.sampling_defaults ?? {};
    this.proposed = Object.keys(given).length ? {} : PROPOSED;
    this.defaults = { ...NEUTRAL, ...given, ...this.proposed };
    const stored = load("sampling", {});
    this.changed = Object.fromEntries(NAMES.filter((name) => name in stored).map((name) => [name, String(stored[name])]));
    form.addEventListener("input", (event) => this.change(event.target.name));
    form.addEventListener("submit", (event) => event.preventDefault());
    reset.addEventListener("click", () => {
      this.changed = {};
      this.keep();
    });
    this.draw();
  }

  change(name) {
    const { value } = this.fields[name];
    if (value === "" || value === this.atDefault(name)) delete this.changed[name];
    else this.changed[name] = value;
    this.keep(name);
  }

  /** Where a slider stands if nothing was changed. */
  atDefault(name) {
    if (this.fields[name].type !== "range") return "";
    const probe = this.fields[name].cloneNode();
    probe.value = this.defaults[name];
    return probe.value;
  }

  keep(typedIn) {
    save("sampling", Object.keys(this.changed).length ? this.changed : null);
    this.draw(typedIn);
  }

  /** `typedIn`: left as it is, since somebody is writing there. */
  draw(typedIn) {
    for (const name of NAMES) {
      const field = this.fields[name];
      if (name !== typedIn) field.value = this.changed[name] ?? this.atDefault(name);
      if (field.type === "number" && name in this.defaults) field.placeholder = this.defaults[name];
    }
    for (const output of this.outputs) {
      const name = output.dataset.of;
      output.textContent = this.changed[name] ?? t("set.default", { value: this.defaults[name] });
    }
  }

  get system() {
    return (this.changed.system ?? "").trim();
  }

  /** For the body of a request. */
  get numbers() {
    const { system: _, ...numbers } = this.changed;
    const changed = Object.fromEntries(Object.entries(numbers).map(([name, value]) => [name, Number(value)]));
    return { ...this.proposed, ...changed };
  }
}
