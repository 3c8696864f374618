// All the words of the page, in English and Chinese, and the choice between them.
//
//   t("stats", { tokens: 12 })         a text with its {names} filled in
//   translate(root)                    fills every element with data-t (text), data-t-label, data-t-hint (placeholder)

import { load, save } from "./store.js";

const LANGUAGE = "language";

const EN = {
  "tab.chat": "Chat", "tab.engine": "Engine", "theme": "Light or dark", "language": "中文", "tabs": "Views",
  "noscript": "This page needs JavaScript.",
  "key.title": "This server asks for a key", "key.wrong": "That key was not accepted. Try another one.",
  "key.hint": "It is kept in this tab only.", "key.label": "API key", "key.use": "Use it", "key.cancel": "Cancel",

  "chat.empty": "Ask something.", "chat.empty.more": "The conversation stays in this browser. Open the Engine tab while an answer is written, and watch where its tokens live.",
  "chat.hint": "Message", "chat.send": "Send", "chat.stop": "Stop", "chat.clear": "Clear", "chat.you": "You", "chat.model": "Model",
  "chat.settings": "Sampling", "chat.again": "Retry", "chat.log": "Conversation",
  "chat.stats": "{tokens} tokens · {rate} tokens/s · first after {first} ms", "chat.stopped": "stopped", "chat.cut": "reached max tokens",
  "chat.waiting": "waiting for the first token",
  "set.temperature": "Temperature", "set.top_p": "Top p", "set.top_k": "Top k", "set.max_tokens": "Max tokens", "set.seed": "Seed",
  "set.seed.hint": "random", "set.system": "System prompt", "set.system.hint": "none", "set.reset": "Defaults",
  "set.temperature.why": "0 always takes the likeliest token", "set.top_p.why": "smallest set of tokens with this much probability",
  "set.top_k.why": "only the k likeliest tokens; 0 means all",

  "error.offline": "The server does not answer. Is it still running?",
  "error.401": "The server asks for a key.", "error.429": "The server is full. Try again in {seconds} s.",
  "error.busy": "The server is full. Try again in a moment.", "error.503": "The engine cannot serve: {why}",
  "error.status": "The server answered {status}.", "error.trace": "{name} is not a trace of this engine: {why}.",

  "off.title": "The engine is not being watched",
  "off.text": "Events are off, as they should be in production. Start the server with --events to see every block, queue and step here:",
  "off.file": "A recorded trace can be opened without a server's help:",
  "live": "live", "lost": "connecting", "replay": "replay", "paused": "paused",

  "ctl.pause": "Pause", "ctl.resume": "Resume", "ctl.step": "One step", "ctl.policy": "Policy", "ctl.open": "Open a trace",
  "ctl.live": "Back to live", "ctl.show": "Show me", "ctl.prefix": "a shared prefix", "ctl.convoy": "the convoy effect", "ctl.controls": "Controls",
  "rep.play": "Play", "rep.pause": "Pause", "rep.back": "Step back", "rep.next": "Step forward", "rep.seek": "Place in the trace", "rep.speed": "Speed",
  "convoy.why": "Convoy effect: when one long prompt is served first, every short one behind it waits; sjf lets the short ones pass.",
  "convoy.run": "{policy}: a long prompt and {count} short ones are on their way …",
  "convoy.result": "Short prompts waited {fcfs} ms on average with fcfs, {sjf} ms with sjf.",
  "prefix.run": "{count} prompts with the same beginning are on their way …",
  "prefix.result": "Found in the prefix cache: {cached} of {total} prompt tokens.",

  "grid.title": "KV cache", "grid.facts": "{count} blocks of {size} tokens", "grid.label": "KV blocks; arrow keys move, the line below explains",
  "zoom.in": "Larger blocks", "zoom.out": "Smaller blocks",
  "leg.owned": "owned", "leg.shared": "shared", "leg.cached": "cached, free", "leg.held": "held", "leg.free": "free", "leg.evicted": "evicted",
  "time.title": "Steps", "time.facts": "one bar a step, height = tokens (square-root scale)", "time.label": "Steps; arrow keys move, the line below explains",
  "leg.prefill": "prefill chunk", "leg.decode": "decode", "leg.preempted": "preemption",
  "plot.ms": "Step time", "plot.rate": "Tokens/s", "plot.hits": "Cache hits", "plot.usage": "Cache in use",
  "queue.running": "Running", "queue.waiting": "Waiting", "queue.none": "nobody", "queue.more": "and {count} more",
  "seq.prompt": "prompt {done}/{all}", "seq.output": "output {done}/{all}", "seq.cached": "{count} cached", "seq.preempted": "preempted ×{count}",
  "seq.label": "Sequence {id}: prompt {prompt}, output {output}.",

  "block.owned": "Block {block}: sequence {ids} keeps its tokens {from}–{to} here.",
  "block.shared": "Block {block}: {count} sequences ({ids}) share tokens {from}–{to}; computed once, stored once.",
  "block.cached": "Block {block}: nobody owns it, but its content can still be found; it is reused if a prompt begins the same way.",
  "block.held": "Block {block}: its owner left, but a step in flight may still read it, so it is given to nobody yet.",
  "block.free": "Block {block} is free.",
  "step.tip": "Step {step}: prompt tokens {prefill} (chunks: {chunks}), decodes {decodes}{ms}{extra}.",
  "step.ms": ", {ms} ms", "step.preempted": ", {count} preempted", "step.evicted": ", {count} blocks evicted",

  "x.start": "Point at anything, tap it or reach it with Tab: this line says what it is and which file does it.",
  "x.grid": "The KV cache is cut into blocks; a block table maps each sequence to blocks anywhere in it, so no memory is reserved ahead: that is PagedAttention.",
  "x.owned": "A block in use, in the colour of its sequence; the last one of a sequence fills up token by token.",
  "x.shared": "A block of a common prefix; the number is its reference count, and it is freed when that falls to zero.",
  "x.cached": "Free, but its content is kept until the block is needed: the prefix cache costs no memory of its own.",
  "x.held": "Given up while a step that may read it is still running; it is free when that step has ended.",
  "x.free": "Holds nothing; taken before any cached block is sacrificed.",
  "x.evicted": "A cached block was just taken for something else, least recently used first; its old content is lost.",
  "x.timeline": "Each step mixes prompt chunks and decodes of many sequences under one token budget: continuous batching.",
  "x.prefill": "A chunk of a prompt: as many of its tokens as the step's budget leaves room for.",
  "x.decode": "One new token for one sequence (several if nobody waits and the engine decodes ahead).",
  "x.preempted": "No block was free, so the last sequence in rank gave up all of its blocks and waits again; its tokens are kept.",
  "x.running": "Sequences that take part in steps, in rank order; each needs a block whenever its last one is full.",
  "x.waiting": "Sequences in the order they would be admitted: fcfs by arrival, sjf by the length of what is left to compute.",
  "x.ms": "Wall time of one step, from plan to sampled tokens.",
  "x.rate": "New tokens per second over the last second of steps, all sequences together.",
  "x.hits": "Share of prompt tokens that were found in the prefix cache since the start and not computed again.",
  "x.usage": "Share of blocks owned by running sequences; cached blocks count as free.",
  "x.pause": "Stops the engine between two steps; requests may still arrive and wait.",
  "x.resume": "Lets the engine run on.",
  "x.step": "Runs exactly one step while paused.",
  "x.policy": "fcfs serves in order of arrival; sjf serves the shortest prompt first, with aging so that nobody starves.",
  "x.convoy": "A long prompt served first makes the short ones behind it wait; this runs the same requests under both policies and compares.",
  "x.prefix": "Sends prompts that begin alike: their common blocks are computed once and shared.",
  "x.replay": "Plays events that were recorded with --trace; the file is read here and sent nowhere.",
  "x.feed": "The engine's plans as server-sent events; the page rebuilds from them what you see.",
};

const ZH = {
  "tab.chat": "对话", "tab.engine": "引擎", "theme": "浅色或深色", "language": "English", "tabs": "视图",
  "noscript": "本页需要 JavaScript。",
  "key.title": "服务器需要密钥", "key.wrong": "密钥未被接受，请换一个。",
  "key.hint": "只保存在当前标签页中。", "key.label": "API 密钥", "key.use": "使用", "key.cancel": "取消",

  "chat.empty": "问点什么吧。", "chat.empty.more": "对话保存在此浏览器中。回答生成时打开“引擎”页，看看它的词元住在哪里。",
  "chat.hint": "输入消息", "chat.send": "发送", "chat.stop": "停止", "chat.clear": "清空", "chat.you": "你", "chat.model": "模型",
  "chat.settings": "采样参数", "chat.again": "重试", "chat.log": "对话",
  "chat.stats": "{tokens} 个词元 · {rate} 词元/秒 · 首词元 {first} 毫秒", "chat.stopped": "已停止", "chat.cut": "达到最大词元数",
  "chat.waiting": "等待第一个词元",
  "set.temperature": "温度", "set.top_p": "Top p", "set.top_k": "Top k", "set.max_tokens": "最大词元数", "set.seed": "随机种子",
  "set.seed.hint": "随机", "set.system": "系统提示词", "set.system.hint": "无", "set.reset": "恢复默认",
  "set.temperature.why": "0 表示总取概率最大的词元", "set.top_p.why": "累计概率达到此值的最小词元集合",
  "set.top_k.why": "只取概率最大的 k 个；0 表示全部",

  "error.offline": "服务器没有响应，它还在运行吗？",
  "error.401": "服务器需要密钥。", "error.429": "服务器已满，请在 {seconds} 秒后重试。",
  "error.busy": "服务器已满，请稍后重试。", "error.503": "引擎无法服务：{why}",
  "error.status": "服务器返回 {status}。", "error.trace": "{name} 不是本引擎的轨迹文件：{why}。",

  "off.title": "引擎未被观察",
  "off.text": "事件流默认关闭（生产环境应当如此）。用 --events 启动服务器，就能在这里看到每个块、队列和步骤：",
  "off.file": "打开录制的轨迹文件不需要服务器：",
  "live": "实时", "lost": "连接中", "replay": "回放", "paused": "已暂停",

  "ctl.pause": "暂停", "ctl.resume": "继续", "ctl.step": "单步", "ctl.policy": "调度策略", "ctl.open": "打开轨迹",
  "ctl.live": "回到实时", "ctl.show": "演示", "ctl.prefix": "共享前缀", "ctl.convoy": "护航效应", "ctl.controls": "控制",
  "rep.play": "播放", "rep.pause": "暂停", "rep.back": "后退一步", "rep.next": "前进一步", "rep.seek": "轨迹中的位置", "rep.speed": "速度",
  "convoy.why": "护航效应：先服务一个很长的提示，后面的短提示都要等；sjf 让短的先过。",
  "convoy.run": "{policy}：一个长提示和 {count} 个短提示正在路上……",
  "convoy.result": "短提示平均等待：fcfs {fcfs} 毫秒，sjf {sjf} 毫秒。",
  "prefix.run": "{count} 个开头相同的提示正在路上……",
  "prefix.result": "前缀缓存命中：{total} 个提示词元中的 {cached} 个。",

  "grid.title": "KV 缓存", "grid.facts": "{count} 个块，每块 {size} 个词元", "grid.label": "KV 块；方向键移动，下方一行给出说明",
  "zoom.in": "放大", "zoom.out": "缩小",
  "leg.owned": "占用", "leg.shared": "共享", "leg.cached": "空闲但有缓存", "leg.held": "暂扣", "leg.free": "空闲", "leg.evicted": "被淘汰",
  "time.title": "步骤", "time.facts": "每步一条，高度为词元数（平方根刻度）", "time.label": "步骤；方向键移动，下方一行给出说明",
  "leg.prefill": "预填充分块", "leg.decode": "解码", "leg.preempted": "抢占",
  "plot.ms": "步耗时", "plot.rate": "词元/秒", "plot.hits": "缓存命中", "plot.usage": "缓存占用",
  "queue.running": "运行中", "queue.waiting": "等待中", "queue.none": "无", "queue.more": "还有 {count} 个",
  "seq.prompt": "提示 {done}/{all}", "seq.output": "输出 {done}/{all}", "seq.cached": "缓存 {count}", "seq.preempted": "被抢占 ×{count}",
  "seq.label": "序列 {id}：提示 {prompt}，输出 {output}。",

  "block.owned": "块 {block}：序列 {ids} 的第 {from}–{to} 个词元存放于此。",
  "block.shared": "块 {block}：{count} 个序列（{ids}）共享第 {from}–{to} 个词元；只算一次，只存一份。",
  "block.cached": "块 {block}：无人占用，但内容仍可被找到；开头相同的提示会再次使用它。",
  "block.held": "块 {block}：原主已离开，但正在执行的步骤可能还要读它，暂时不分给别人。",
  "block.free": "块 {block} 空闲。",
  "step.tip": "第 {step} 步：提示词元 {prefill}（分块 {chunks}），解码 {decodes}{ms}{extra}。",
  "step.ms": "，{ms} 毫秒", "step.preempted": "，抢占 {count} 个", "step.evicted": "，淘汰 {count} 块",

  "x.start": "把鼠标移到任何东西上，点一下，或用 Tab 键选中：这一行会说明它是什么、由哪个文件完成。",
  "x.grid": "KV 缓存被切成块；块表把每个序列映射到任意位置的块，不必预留内存：这就是 PagedAttention。",
  "x.owned": "使用中的块，颜色代表所属序列；序列的最后一块随词元逐渐填满。",
  "x.shared": "公共前缀的块；数字是引用计数，归零时释放。",
  "x.cached": "空闲，但内容保留到该块被需要为止：前缀缓存不额外占内存。",
  "x.held": "在可能读它的步骤尚未结束时被交还；该步结束后才空闲。",
  "x.free": "没有内容；先用它们，再牺牲缓存块。",
  "x.evicted": "一个缓存块刚被挪作他用，最久未用者先走；旧内容丢失。",
  "x.timeline": "每一步在同一个词元预算下混合多个序列的提示分块和解码：这就是连续批处理。",
  "x.prefill": "提示的一个分块：这一步的预算还能容纳多少词元，就取多少。",
  "x.decode": "为一个序列生成一个新词元（无人等待时引擎可一次解码多个）。",
  "x.preempted": "没有空闲块，排名最后的序列交出全部块重新等待；它的词元保留。",
  "x.running": "参与各步的序列，按排名排列；最后一块写满时就需要新块。",
  "x.waiting": "按将被接纳的次序排列：fcfs 按到达时间，sjf 按剩余计算长度。",
  "x.ms": "一步的实际耗时，从计划到采样出词元。",
  "x.rate": "最近一秒的步骤中所有序列每秒生成的新词元数。",
  "x.hits": "启动以来在前缀缓存中找到、无需重算的提示词元比例。",
  "x.usage": "被运行中序列占用的块的比例；缓存块算空闲。",
  "x.pause": "让引擎停在两步之间；请求仍可到达并等待。",
  "x.resume": "让引擎继续运行。",
  "x.step": "在暂停时恰好执行一步。",
  "x.policy": "fcfs 按到达次序；sjf 最短提示优先，并有老化机制，无人饿死。",
  "x.convoy": "先服务长提示会让后面的短提示等待；这里用两种策略运行同样的请求并比较。",
  "x.prefix": "发送开头相同的提示：公共块只计算一次，大家共享。",
  "x.replay": "播放用 --trace 录制的事件；文件只在本地读取，不会上传。",
  "x.feed": "引擎的计划以服务器推送事件的形式到来，页面据此重建你看到的一切。",
};

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
