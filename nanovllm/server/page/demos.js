// "Show me": requests that make one effect visible, sent through the public API like anyone's.
//
// Prompts are token ids, so that their lengths are known, with a salt of their own, so that nothing is found in the
// cache that an earlier demonstration left there. All prompts of one go travel in one request: browsers open only six
// connections to a server, and the event feed holds one of them.

import { chunks, json } from "./api.js";
import { t } from "./words.js";

const NUM_SHORT = 6;
const SHORT = 12;            // tokens
const LONGEST = 3 * 768;     // tokens of all long prompts: some seconds on a laptop's CPU
const WORK = 12_000;         // ms
const LINE_UP = 5000;        // ms for all requests to reach the queue

function ids(count, seed) {
  // Small ids exist in every vocabulary. The answers are not shown.
  return Array.from({ length: count }, (_, index) => 20 + ((index * 7 + seed * 13) % 200));
}

/** Sends the prompts at once; resolves to ms from `began()` to the first token of each. */
async function send(prompts, maxTokens, began, signal) {
  const first = new Array(prompts.length).fill(null);
  const salt = `show-me-${crypto.getRandomValues(new Uint32Array(2)).join("-")}`;
  const body = { prompt: prompts, max_tokens: maxTokens, temperature: 0, ignore_eos: true, cache_salt: salt };
  for await (const chunk of chunks("v1/completions", body, signal)) {
    for (const choice of chunk.choices) first[choice.index] ??= performance.now() - began();
  }
  return first;
}

async function until(condition, ms) {
  const end = performance.now() + ms;
  while (!condition() && performance.now() < end) await new Promise((resolve) => { setTimeout(resolve, 20); });
}

/** How long are the long prompts, and how many does it take to fill several steps? */
function longPrompts(info) {
  const capacity = info.num_blocks * info.block_size;
  const wanted = Math.min(3 * info.max_num_batched_tokens, LONGEST, Math.floor(capacity * 0.6));
  const length = Math.min(wanted, Math.floor(info.max_model_len * 0.8));
  const count = Math.max(1, Math.min(8, Math.floor(wanted / length)));
  return Array.from({ length: count }, (_, index) => ids(length, index + 1));
}

/** The same requests under both policies. Paused while they line up, so that all of them are there to choose from. */
export async function convoy(info, replay, say, bars) {
  const before = replay.policyName;
  const long = longPrompts(info);
  const prompts = [...long, ...Array.from({ length: NUM_SHORT }, (_, index) => ids(SHORT, 40 + index))];
  const mean = {};
  bars.begin();
  try {
    for (const policy of ["fcfs", "sjf"]) {
      say(t("convoy.run", { policy, count: NUM_SHORT }));
      await json("engine/policy", { body: { policy } });
      await json("engine/control", { body: { action: "pause" } });
      let began = performance.now();
      const others = replay.numWaiting;
      const answer = send(prompts, 4, () => began);
      answer.catch(() => {});  // awaited below; a refusal must not count as unhandled until then
      await until(() => replay.numWaiting - others >= prompts.length, LINE_UP);
      began = performance.now();
      await json("engine/control", { body: { action: "resume" } });
      const waited = await answer;
      const short = average(waited.slice(-NUM_SHORT));
      mean[policy] = Math.round(short);
      bars.set(policy, { short, long: average(waited.slice(0, long.length)) });
    }
  } finally {
    await json("engine/control", { body: { action: "resume" } });
    if (before === "fcfs" || before === "sjf") await json("engine/policy", { body: { policy: before } });
  }
  say(t("convoy.result", mean));
  return mean;
}

function average(values) {
  return values.reduce((total, value) => total + value, 0) / values.length;
}

/** Prompts with a common beginning of some blocks and ends of their own. */
export async function prefix(info, replay, say) {
  const capacity = info.num_blocks * info.block_size;
  const common = Math.min(6 * info.block_size, Math.floor(info.max_model_len / 3), Math.floor(capacity / 4));
  const prompts = Array.from({ length: NUM_SHORT }, (_, index) => [...ids(common, 1), ...ids(SHORT, 60 + index)]);
  say(t("prefix.run", { count: NUM_SHORT }));
  const before = { hits: replay.hits, queries: replay.queries };
  await send(prompts, Math.min(48, Math.floor(info.max_model_len / 3)), () => 0);
  // The events come over another connection, and may be behind the answers.
  await until(() => replay.queries - before.queries >= prompts.flat().length, LINE_UP);
  say(t("prefix.result", { cached: replay.hits - before.hits, total: replay.queries - before.queries }));
}

/** A little of everything, again and again for WORK ms: a shared beginning, ends and lengths of their own, one long prompt.
    On a slow machine one round takes longer than that; `signal` ends it. */
export async function work(info, replay, say, signal) {
  const capacity = info.num_blocks * info.block_size;
  const room = Math.min(info.max_model_len, Math.floor(capacity / 3));
  const tokens = (wanted) => Math.max(1, Math.min(wanted, Math.floor(room / 3)));
  const common = ids(tokens(4 * info.block_size), 1);
  const alike = [9, 21, 14, 30].map((length, index) => [...common, ...ids(tokens(length), 60 + index)]);
  const end = performance.now() + WORK;
  say(t("work.run"));
  for (let round = 0; round === 0 || performance.now() < end; round += 1) {
    const others = [11, 40, 26, 150].map((length, index) => ids(tokens(length), 80 + 7 * round + index));
    await Promise.all([
      send(alike, tokens(72), () => 0, signal), send(others.slice(0, 2), tokens(120), () => 0, signal),
      send(others.slice(2), tokens(48), () => 0, signal),
    ]);
  }
  say(t("work.done"));
}
