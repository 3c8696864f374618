// What survives a reload: small JSON values in localStorage. A browser may forbid or fill it; the page works without.

const PREFIX = "nanovllm.";

export function load(name, otherwise = null) {
  try {
    return JSON.parse(localStorage.getItem(PREFIX + name)) ?? otherwise;
  } catch {
    return otherwise;
  }
}

export function save(name, value) {
  try {
    if (value === null) localStorage.removeItem(PREFIX + name);
    else localStorage.setItem(PREFIX + name, JSON.stringify(value));
  } catch { /* full or forbidden: nothing is lost but the memory of it */ }
}

/** The names that begin with this. */
export function keys(beginning) {
  try {
    const names = Object.keys(localStorage).filter((key) => key.startsWith(PREFIX + beginning));
    return names.map((key) => key.slice(PREFIX.length));
  } catch {
    return [];
  }
}

/** Calls heard(name) when another tab has changed something. */
export function onChange(heard) {
  addEventListener("storage", (event) => { if (event.key?.startsWith(PREFIX)) heard(event.key.slice(PREFIX.length)); });
}
