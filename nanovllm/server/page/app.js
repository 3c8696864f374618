// Starts the page: language, theme, tabs, the key dialog; then the two views.
//
// Plain modules, no build step: what you read here is what runs. Nothing is loaded from anywhere but this server.

import { json, onKeyNeeded } from "./api.js";
import { Chat } from "./chat.js";
import { Colors } from "./colors.js";
import { Engine } from "./engine.js";
import { PausedBanner } from "./paused.js";
import { load, save } from "./store.js";
import { currentLanguage, setLanguage, translate } from "./words.js";

const page = document.documentElement;
const views = { chat: document.getElementById("chat"), engine: document.getElementById("engine") };
const tabs = { chat: document.getElementById("tab-chat"), engine: document.getElementById("tab-engine") };
const dialog = document.getElementById("key");

function applyTheme() {
  const chosen = load("theme");
  if (chosen) page.dataset.theme = chosen;
  else delete page.dataset.theme;
}

function isDark() {
  return page.dataset.theme ? page.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
}

function askForKey(wasWrong) {
  const input = dialog.querySelector("input");
  dialog.querySelector("[data-role=wrong]").hidden = !wasWrong;
  dialog.returnValue = input.value = "";  // Escape leaves the last answer standing
  dialog.showModal();
  return new Promise((resolve) => {
    const answer = () => resolve(dialog.returnValue === "use" ? input.value : null);
    dialog.addEventListener("close", answer, { once: true });
  });
}

function show(name, engine) {
  for (const [other, view] of Object.entries(views)) {
    const chosen = other === name;
    view.hidden = !chosen;
    tabs[other].setAttribute("aria-selected", String(chosen));
    tabs[other].tabIndex = chosen ? 0 : -1;
  }
  save("tab", name);
  engine?.show(name === "engine");
}

async function facts() {
  try {
    return await json("engine/info");
  } catch (error) {
    // An older server, or a refused key: chat may still work, and a trace file can be opened.
    return { events: false, replay: false, model: "", error: error.message };
  }
}

async function main() {
  applyTheme();
  translate(document);
  page.classList.add("ready");
  onKeyNeeded(askForKey);
  const info = await facts();
  document.getElementById("model").textContent = info.model ?? "";
  const chat = new Chat(views.chat, info);
  const engine = new Engine(views.engine, new Colors(), info);
  new PausedBanner(document.getElementById("paused"), engine, info);
  window.nanovllm = { chat, engine, info };  // for the curious, and for the tests

  const repaint = () => {
    translate(document);
    chat.draw();
    engine.repaint();
  };
  document.getElementById("language").addEventListener("click", () => {
    setLanguage(currentLanguage() === "en" ? "zh" : "en");
    repaint();
  });
  document.getElementById("theme").addEventListener("click", () => {
    save("theme", isDark() ? "light" : "dark");
    applyTheme();
    engine.repaint();
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => engine.repaint());

  for (const [name, tab] of Object.entries(tabs)) tab.addEventListener("click", () => show(name, engine));
  document.querySelector("[role=tablist]").addEventListener("keydown", (event) => {
    if (event.key !== "ArrowLeft" && event.key !== "ArrowRight") return;
    const other = views.chat.hidden ? "chat" : "engine";
    if (tabs[other].disabled) return;
    tabs[other].focus();
    show(other, engine);
  });
  tabs.chat.disabled = Boolean(info.replay);  // a recording answers nobody
  show(info.replay ? "engine" : load("tab", "chat"), engine);
  document.title = info.model ? `${info.model} · Nano-vLLM` : "Nano-vLLM";
  page.dataset.started = "yes";
}

main();
