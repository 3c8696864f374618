// All the words of the page, in English and Chinese, and the choice between them.
//
//   t("stats", { tokens: 12 })         a text with its {names} filled in
//   translate(root)                    fills every element with data-t (text), data-t-label, data-t-hint (placeholder)

import { load, save } from "./store.js";
import { EN } from "./words-en.js";
import { ZH } from "./words-zh.js";

const LANGUAGE = "language";

const ALL = { en: EN, zh: ZH };

function initial() {
  const kept = load(LANGUAGE);
  if (kept in ALL) return kept;
  return navigator.language.toLowerCase().startsWith("zh") ? "zh" : "en";
}

let language = initial();

export function currentLanguage() {
  return language;
}

export function setLanguage(chosen) {
  language = chosen;
  save(LANGUAGE, chosen);
}

export function t(key, values = {}) {
  const text = ALL[language][key] ?? key;
  return text.replace(/\{(\w+)\}/g, (whole, name) => values[name] ?? whole);
}

export function translate(root) {
  document.documentElement.lang = language === "zh" ? "zh-CN" : "en";
  for (const element of root.querySelectorAll("[data-t]")) element.textContent = t(element.dataset.t);
  for (const element of root.querySelectorAll("[data-t-label]")) element.setAttribute("aria-label", t(element.dataset.tLabel));
  for (const element of root.querySelectorAll("[data-t-hint]")) element.placeholder = t(element.dataset.tHint);
  for (const element of root.querySelectorAll("[data-t-title]")) element.title = t(element.dataset.tTitle);
}

/** For the test that no language lacks a word. */
export const WORDS = ALL;
