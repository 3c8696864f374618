// A button that copies a text and then shows "Copied".

import { t } from "./words.js";

const SAID = 1500;   // ms

export function copyButton(text) {
  const button = document.createElement("button");
  button.type = "button";
  button.className = "quiet small";
  button.dataset.act = "copy";
  button.dataset.t = "chat.copy";
  button.textContent = t("chat.copy");
  button.setAttribute("aria-live", "polite");
  button.addEventListener("click", async () => {
    button.textContent = t(await copy(text()) ? "chat.copied" : "chat.copy.failed");
    setTimeout(() => { button.textContent = t("chat.copy"); }, SAID);
  });
  return button;
}

async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    return copyOldWay(text);   // browsers keep the clipboard from pages without TLS, but for localhost
  }
}

function copyOldWay(text) {
  const field = document.body.appendChild(document.createElement("textarea"));
  field.value = text;
  field.select();
  try {
    return document.execCommand("copy");
  } finally {
    field.remove();
  }
}
