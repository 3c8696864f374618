// The conversation of this tab, kept in this browser. Each tab writes to a place of its own, so that two of them do not
// overwrite each other; a new tab begins with a copy of the newest one.

import { keys, load, onChange, save } from "./store.js";

const ID = "nanovllm.conversation";   // in sessionStorage: stays with the tab, also over a reload
const PLACE = "chat.";                // in localStorage, with the id
const KEPT = 5;                       // conversations
const MESSAGES = 200;                 // of one, and characters of them: a browser gives a site about five million
const CHARACTERS = 400_000;

export class Conversation {
  constructor() {
    this.id = sessionStorage.getItem(ID);
    const stored = this.id ? load(PLACE + this.id) : newest();
    this.messages = stored?.messages ?? load("chat", []);   // "chat": where one page of an older version kept it
    save("chat", null);
    this.id ??= newId();
    for (const message of this.messages) {
      // One that was being written when it was stored, here or in another tab
      if (message.role === "assistant" && !message.finish && !message.error) message.finish = "partial";
    }
    // A duplicated tab has the same id: a tab that sees the other one write takes a new id.
    onChange((name) => { if (name === PLACE + this.id) this.move(); });
  }

  move() {
    this.id = newId();
    this.keep();
  }

  /** After every change. A copy that nobody continued is not stored a second time. */
  keep() {
    sessionStorage.setItem(ID, this.id);
    let kept = this.messages.slice(-MESSAGES);
    const size = () => kept.reduce((total, message) => total + message.content.length, 0);
    while (kept.length > 1 && size() > CHARACTERS) kept = kept.slice(1);
    save(PLACE + this.id, kept.length ? { at: Date.now(), messages: kept } : null);
    for (const place of byAge().slice(KEPT)) if (place !== PLACE + this.id) save(place, null);
  }
}

function newId() {
  return crypto.getRandomValues(new Uint32Array(2)).join("-");
}

function byAge() {
  const places = keys(PLACE).map((place) => [place, load(place)?.at ?? 0]);
  return places.sort((one, other) => other[1] - one[1]).map(([place]) => place);
}

function newest() {
  const [place] = byAge();
  return place ? load(place) : null;
}
