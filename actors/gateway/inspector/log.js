// A conversation as this page knows it: its outline, the rows of its log that were read, and the
// changes that come while it is open. All views of a conversation share one `Log`.

import { ask, follow, pause, server, toPath, together } from "./api.js";

const CHUNK = 64;
const BRIEF = 2_000;
const CHUNKS_MAX = 400;
const LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789";

export class Log extends EventTarget {
  head = 0;
  kinds = []; // by seq - 1
  turns = []; // oldest first
  waiting = [];
  left = new Map(); // seq → {at, how}
  damaged = new Map(); // seq → why
  facts = null;
  pieces = null; // the answer that is being written
  endedBy = null;
  forkedFrom = null; // {id, seq} of its parent
  #byId = new Map();
  #chunks = new Map(); // number → {upTo, rows}: all rows of it up to a seq
  #end = new AbortController();

  constructor(id) {
    super();
    this.id = id;
    this.path = `conversations/${toPath(id)}`;
  }

  /** Read the outline; the facts, which may take the server longer, come later. Raises `Problem`. */
  async open() {
    await this.#readOutline();
    await this.#readParent().catch(() => {});
    this.#readFacts();
    this.#listen();
  }

  close() {
    this.#end.abort();
  }

  ask(part, options) {
    return ask(`${this.path}${part}`, options);
  }

  kindOf(seq) {
    return this.kinds[seq - 1];
  }

  turn(id) {
    return this.#byId.get(id);
  }

  /** The newest turn that has a chat message in the view. */
  get newestTurn() {
    const isThere = ({ joined_seq: seq }) => seq && !this.left.has(seq);
    return this.turns.findLast((turn) => turn.messages.some(isThere));
  }

  turnAt(seq) {
    let low = 0;
    let high = this.turns.length - 1;
    while (low <= high) {
      const middle = (low + high) >> 1;
      if (this.turns[middle].seq <= seq) low = middle + 1;
      else high = middle - 1;
    }
    const turn = this.turns[high];
    return turn && seq <= (turn.end_seq ?? this.head) ? turn : null;
  }

  /** Return a row if it was read; else read it, and emit "rows" when it has come. */
  row(seq) {
    const number = Math.floor((seq - 1) / CHUNK);
    let chunk = this.#chunks.get(number);
    if (!chunk) this.#chunks.set(number, (chunk = { upTo: 0, rows: new Map() }));
    if (seq > chunk.upTo) this.#read(number, chunk);
    return chunk.rows.get(seq);
  }

  async whole(seq) {
    const { rows } = await this.ask("/log", { query: { after: seq - 1, limit: 1 } });
    return rows[0];
  }

  async #read(number, chunk) {
    const upTo = this.head;
    chunk.upTo = Infinity; // one read at once
    if (this.#chunks.size > CHUNKS_MAX) this.#chunks.delete(this.#chunks.keys().next().value);
    try {
      const { rows } = await this.ask("/log", {
        query: { after: number * CHUNK, limit: CHUNK, brief: BRIEF }, signal: this.#end.signal,
      });
      for (const row of rows) chunk.rows.set(row.seq, row);
      chunk.upTo = upTo;
    } catch {
      if (this.#end.signal.aborted) return;
      await pause(1_000, this.#end.signal);
      chunk.upTo = 0;
    }
    this.dispatchEvent(new CustomEvent("rows", { detail: number }));
  }

  async #readParent() {
    const seq = this.kinds.indexOf("forked_from") + 1;
    if (!seq || this.forkedFrom) return;
    const { event } = await this.whole(seq);
    this.forkedFrom = { id: event.conversation_id, seq: event.seq };
  }

  async #readOutline() {
    const after = this.head;
    const found = await this.ask("/outline", { query: { after }, signal: this.#end.signal });
    if (found.head < this.head) return this.#begin();
    for (const letter of found.log) this.kinds.push(found.kinds[LETTERS.indexOf(letter)]);
    this.kinds.length = found.head;
    for (const turn of found.turns) {
      const known = this.#byId.get(turn.turn_id);
      if (known) Object.assign(known, turn);
      else {
        turn.number = this.turns.length + 1;
        turn.steps_before = this.steps;
        this.turns.push(turn);
        this.#byId.set(turn.turn_id, turn);
      }
    }
    for (const [from, to, at, how] of found.left) {
      for (let seq = from; seq <= to; seq += 1) this.left.set(seq, { at, how });
    }
    for (const [seq, why] of found.damaged) this.damaged.set(seq, why);
    this.waiting = found.waiting;
    this.head = found.head;
    this.dispatchEvent(new Event("outline"));
  }

  get steps() {
    return this.turns.length ? stepsUpTo(this.turns.at(-1)) : 0;
  }

  async #begin() {
    this.head = 0;
    this.kinds = [];
    this.turns = [];
    this.#byId.clear();
    this.left.clear();
    this.damaged.clear();
    this.#chunks.clear();
    await this.#readOutline();
  }

  #readFacts = together(0, async () => {
    try {
      this.facts = await this.ask("", { signal: this.#end.signal });
    } catch (problem) {
      if (!problem.status) return; // read again when the server is back
      this.facts = { problem }; // a damaged log has no state
    }
    this.dispatchEvent(new Event("facts"));
  });

  /** Follow the conversation; new events are read together, a few times a second at most. */
  async #listen() {
    const catchUp = together(120, async () => {
      try {
        await this.#readOutline();
        this.#readFacts(); // which may be slow: the log does not wait for them
      } catch {
        // The stream tells when the server is back.
      }
    });
    const signal = this.#end.signal;
    // Views whose reads failed meanwhile read again when "outline" and "facts" are emitted.
    server.addEventListener("reachable", ({ detail }) => detail && catchUp(), { signal });
    try {
      const stream = follow(`${this.path}/events`, {
        query: { pieces: true }, signal, after: String(this.head),
      });
      for await (const found of stream) {
        if (found.event === "message") {
          this.pieces = null;
          catchUp();
        } else if (found.event === "piece") {
          this.#addPiece(found.data);
        } else if (found.event === "gone") {
          this.endedBy = "gone";
        } else if (found.event === "end") {
          const { why } = found.data;
          if (this.endedBy || why === "corrupt-log" || why === "conversation-not-found") {
            this.endedBy ??= why;
            this.dispatchEvent(new Event("facts"));
            return;
          }
          catchUp();
        }
      }
    } catch (problem) {
      if (signal.aborted) return;
      this.endedBy = problem.kind ?? "failed";
      this.dispatchEvent(new Event("facts"));
    }
  }

  #addPiece(piece) {
    const key = `${piece.turn_id} ${piece.answer} ${piece.epoch} ${piece.attempt}`;
    if (this.pieces?.key !== key || piece.offset < this.pieces.length) {
      this.pieces = { key, text: "", length: 0 };
    }
    this.pieces.text += piece.text;
    this.pieces.length = piece.offset + [...piece.text].length;
    this.dispatchEvent(new Event("piece"));
  }
}

function stepsUpTo(turn) {
  return turn.steps_before + turn.steps;
}
