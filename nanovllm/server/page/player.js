// The controls of a recording: play, one step, a place, a speed.

import { t } from "./words.js";

export class Player {
  constructor(root, onLive) {
    this.find = (role) => root.querySelector(`[data-role=${role}]`);
    this.recording = null;
    const click = (role, action) => this.find(role).addEventListener("click", action);
    click("play", () => this.play());
    click("next", () => this.recording.forward());
    click("back", () => this.recording.back());
    click("live", onLive);
    this.find("seek").addEventListener("input", (event) => this.recording.seek(Number(event.target.value)));
    this.find("speed").addEventListener("change", (event) => { this.recording.speed = Number(event.target.value); });
  }

  show(recording) {
    this.recording = recording;
    if (recording) this.find("seek").max = recording.length;
  }

  play() {
    const { recording } = this;
    if (!recording.playing && recording.place >= recording.length) recording.seek(1);
    recording.playing = !recording.playing;
    recording.speed = Number(this.find("speed").value);
  }

  draw() {
    const { recording } = this;
    if (!recording) return;
    this.find("seek").value = recording.place;
    this.find("clock").textContent = `${recording.time.toFixed(2)} / ${recording.duration.toFixed(2)} s`;
    this.find("play").textContent = t(recording.playing ? "rep.pause" : "rep.play");
  }
}
