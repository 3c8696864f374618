// Replay: from the engine's events to what the engine holds. No DOM here; the Python twin is nanovllm/telemetry/trace.py.
//
//   const replay = new Replay(info);          // the body of /engine/info, or the header line of a trace
//   replay.apply(event);                      // in order; a "snapshot" replaces all that came before
//   replay.owners.get(block)                  // the sequences that share a block, undefined if none owns it
//
// A feed of *plans* is enough. A plan names the blocks that enter each block table and the sequences that left; all else
// (reference counts, free blocks, progress) follows. What is drawn is therefore computed here a second time, and a test
// compares it with a fresh snapshot of the server.

export class Replay {
  constructor(info) {
    this.numBlocks = info.num_blocks;
    this.blockSize = info.block_size;
    this.dirty = new Set();    // blocks that look different since they were last drawn; the grid empties it
    this.evictions = [];       // blocks whose content was thrown away; the grid empties it
    this.version = 0;          // counts events, so that a panel knows whether it is out of date
    this.resets = 0;           // counts snapshots: after one, nothing that was drawn can be trusted
    this.clear();
  }

  clear() {
    this.seqs = new Map();     // id -> sequence, running or waiting
    this.waiting = [];         // ids in the order they would be served
    this.numWaiting = 0;
    this.owners = new Map();   // block -> ids of the sequences whose tables hold it
    this.places = new Map();   // block -> its index in those tables: the same in all, since a prefix begins at 0
    this.published = new Set();  // blocks a later prompt can find by their content
    this.held = new Map();     // block -> the step that must end before anybody may have it
    this.flights = [];         // steps planned and not done, oldest first: the next is planned while one still runs
    this.lastStep = 0;
    this.policyName = "";
    this.paused = false;
    this.time = 0;
    this.hits = this.queries = this.preemptions = this.drafted = this.accepted = 0;
    this.finished = 0;
  }

  apply(event) {
    this.version += 1;
    if (typeof event.t === "number") this.time = event.t;
    if (["snapshot", "add", "step", "done", "left", "policy"].includes(event.type)) this[event.type](event);
    else if (event.type === "pause") this.paused = event.paused;
    // "failed" needs nothing: a snapshot comes after it
  }

  snapshot(event) {
    this.clear();
    this.resets += 1;
    this.time = event.t;
    this.lastStep = event.step;
    this.policyName = event.policy;
    this.paused = event.paused;
    this.hits = event.hits;
    this.queries = event.queries;
    this.preemptions = event.preemptions;
    for (const seq of event.seqs) {
      this.seqs.set(seq.id, { ...seq, blocks: [] });
      this.give(this.seqs.get(seq.id), seq.blocks);
    }
    this.waiting = event.seqs.filter((seq) => seq.status === "waiting").map((seq) => seq.id);
    this.numWaiting = event.num_waiting;
    for (const block of [...event.cached, ...event.published]) this.published.add(block);
    event.held.forEach((block, index) => this.held.set(block, event.until[index]));
    this.flights = [...event.flights];
  }

  add(event) {
    this.seqs.set(event.id, {
      id: event.id, request: event.request, status: "waiting", prompt: event.prompt, max_tokens: event.max_tokens,
      tokens: event.prompt, computed: 0, preemptions: 0, cached: 0, blocks: [],
    });
    this.waiting.push(event.id);
    this.numWaiting += 1;
  }

  // Sequences that left come first: a plan may give their blocks to one that arrives.
  step(event) {
    this.left(event);
    for (const block of event.evicted) {
      this.published.delete(block);
      this.touch(block);
      this.evictions.push(block);
    }
    for (const [id, cached] of event.arrivals) {
      const seq = this.seqs.get(id);
      seq.status = "running";
      if (!seq.preemptions) seq.cached = cached;
    }
    for (const [id, start, numNew, , blocks, samples] of event.entries) {
      const seq = this.seqs.get(id);
      this.give(seq, blocks);
      this.feed(seq, start + numNew + event.k - 1);
      if (samples) seq.tokens = seq.computed + 1;  // sure to come, though not known yet
    }
    for (const id of event.decodes) {  // one token behind the last, no new block: the id says all
      const seq = this.seqs.get(id);
      this.feed(seq, seq.computed + event.k);
      seq.tokens = seq.computed + 1;
    }
    this.publish(event.published);
    this.flights.push(event.step);
    this.lastStep = event.step;
    this.setLine(event);
    this.hits = event.hits;
    this.queries = event.queries;
    this.preemptions = event.preemptions;
  }

  done(event) {
    this.flights.shift();
    const oldest = this.flights[0] ?? Infinity;
    for (const [block, until] of this.held) {
      if (until < oldest) {
        this.held.delete(block);
        this.touch(block);
      }
    }
    for (const [id, drafted, right] of event.drafts ?? []) {  // tokens that were guessed, and right ones
      const seq = this.seqs.get(id);
      this.drafted += drafted;
      this.accepted += right;
      if (!seq) continue;
      this.feed(seq, seq.computed + right);
      seq.tokens += right;
    }
    this.left(event);
    this.publish(event.published);
  }

  left(event) {
    for (const [id, reason] of event.left) this.leave(id, reason);
  }

  policy(event) {
    this.policyName = event.policy;
    this.setLine(event);
  }

  setLine(event) {
    this.waiting = [...event.waiting];  // a copy: `add` puts more behind them, and a recording plays its events twice
    this.numWaiting = event.num_waiting;
  }

  leave(id, reason) {
    const seq = this.seqs.get(id);
    for (const block of seq.blocks) this.drop(block, id);
    seq.blocks = [];
    seq.computed = 0;
    if (reason === "preempted") {
      seq.status = "waiting";
      seq.preemptions += 1;
      this.waiting.push(id);  // a plan that follows says where in the line
      this.numWaiting += 1;
    } else {
      if (seq.status === "waiting") {
        this.waiting = this.waiting.filter((other) => other !== id);
        this.numWaiting = Math.max(0, this.numWaiting - 1);
      }
      this.seqs.delete(id);
      this.finished += 1;
    }
  }

  give(seq, blocks) {
    for (const block of blocks) {
      const owners = this.owners.get(block);
      if (owners) owners.push(seq.id);
      else this.owners.set(block, [seq.id]);
      this.places.set(block, seq.blocks.length);
      this.held.delete(block);  // found in the prefix cache while it was held: shared at once
      seq.blocks.push(block);
      this.touch(block);
    }
  }

  drop(block, id) {
    const others = this.owners.get(block).filter((owner) => owner !== id);
    if (others.length) this.owners.set(block, others);
    else {
      this.owners.delete(block);
      // A step in flight may still read it: until that has ended it has no owner, and no sequence may get it.
      if (this.flights.length) this.held.set(block, this.flights.at(-1));
    }
    this.touch(block);
  }

  publish(blocks) {
    for (const block of blocks) {
      this.published.add(block);
      this.touch(block);
    }
  }

  feed(seq, computed) {
    const first = Math.floor(seq.computed / this.blockSize);
    seq.computed = computed;
    for (const block of seq.blocks.slice(first)) this.touch(block);  // they fill up
  }

  touch(block) {
    this.dirty.add(block);
  }

  // ---- questions ----------------------------------------------------------------------------------------------

  get numOwned() {
    return this.owners.size;
  }

  get numFree() {
    return this.numBlocks - this.owners.size - this.held.size;
  }

  state(block) {
    if (this.owners.has(block)) return "owned";
    if (this.held.has(block)) return "held";
    return this.published.has(block) ? "cached" : "free";
  }

  /** How much of a block is filled, 0 to 1. */
  level(block) {
    const owners = this.owners.get(block);
    if (!owners || owners.length > 1) return 1;
    const seq = this.seqs.get(owners[0]);
    return Math.max(0, Math.min(1, seq.computed / this.blockSize - this.places.get(block)));
  }

  get running() {
    return [...this.seqs.values()].filter((seq) => seq.status === "running");
  }

  /** The same record as the server's "snapshot" event: to start again from here, and to compare with the server's. */
  toSnapshot() {
    // The feed names only the first of many that wait; the others follow in order of arrival.
    const inLine = new Set(this.waiting.map((id) => this.seqs.get(id)).filter(Boolean));
    for (const seq of this.seqs.values()) if (seq.status === "waiting") inLine.add(seq);
    return structuredClone({
      type: "snapshot", t: this.time, step: this.lastStep, policy: this.policyName, paused: this.paused,
      seqs: [...this.running, ...inLine], num_waiting: this.numWaiting,
      cached: [...this.published].filter((block) => this.state(block) === "cached"),
      published: [...this.published].filter((block) => this.state(block) !== "cached"),
      held: [...this.held.keys()], until: [...this.held.values()], flights: this.flights,
      free: this.numFree,
      hits: this.hits, queries: this.queries, preemptions: this.preemptions,
    });
  }
}
