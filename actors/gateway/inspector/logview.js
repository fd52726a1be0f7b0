// The transcript beside the log by seq. Bands mark turns; dotted lines mark messages that wait.

import { h, segments, show } from "./dom.js";
import { Detail } from "./detail.js";
import { clock, duration, kindName, number, oneLine, outcomeOf, plainText, toneOf, words } from "./format.js";
import { placeOf } from "./api.js";
import { Rows } from "./rows.js";

const SAID = new Set((
  "system_prompt user_message agent_message action observation agent_error user_reject message_queued "
  + "message_withdrawn turn_started condensation retraction forked_from conversation_error "
  + "confirmation_requested confirmation_given paused resumed damaged"
).split(" "));
const NAMES = {
  __proto__: null,
  user_message: "user", agent_message: "agent", action: "call", observation: "result", system_prompt: "system prompt",
  agent_error: "no result", user_reject: "rejected", message_queued: "waits",
};

const CALL_BACK_MAX = 100; // the rows in which a result's call is looked for

export class LogView extends HTMLElement {
  #log;
  #options;
  #said = []; // the seqs of the transcript
  #saidUpTo = 0;
  #transcript = new Rows({ guess: 56, sticks: true, label: "Transcript", render: (index) => this.#saidRow(index) });
  #rows = new Rows({ height: 24, sticks: true, label: "Log by seq", render: (index) => this.#logRow(index + 1) });
  #below = h("button.new-below", { hidden: true, onclick: () => this.#toEnd() }, "End ↓");
  #count = h("span.rest");
  #logPane;
  #panes = h("div.switch");
  #seq = null;
  #isPlaced = false;

  constructor(log, options) {
    super();
    this.#log = log;
    this.#options = options;
    this.#rows.addEventListener("choose", ({ detail }) => this.#choose(detail.index + 1, this.#rows, detail.isOpened));
    this.#transcript.addEventListener("choose", ({ detail }) => {
      const seq = this.#said[detail.index];
      if (seq) this.#choose(seq, this.#transcript, detail.isOpened);
    });
    log.addEventListener("outline", () => this.#update());
    log.addEventListener("rows", () => this.#refresh());
    log.addEventListener("piece", () => this.#showPiece());
    this.#rows.addEventListener("scroll", () => this.#noteBelow(), { passive: true });
  }

  connectedCallback() {
    if (!this.firstChild) {
      this.#logPane = h("section.pane.log-pane", { "aria-label": "Log" },
        h("div.pane-head", h("h2", "Log"), this.#count), this.#rows, this.#below);
      this.append(
        this.#panes,
        h("section.pane.transcript-pane", { "aria-label": "Transcript" },
          h("div.pane-head", h("h2", "Transcript"), h("span.rest", "retracted and condensed events are struck through")),
          this.#transcript),
        this.#logPane,
      );
      this.#switch("transcript");
      new ResizeObserver(() => this.#logPane.classList.toggle("is-narrow", this.#logPane.clientWidth < 620)).observe(this.#logPane);
    }
    this.#update();
    // Rows that were measured while this view was hidden are placed when it is shown.
    requestAnimationFrame(() => {
      if (!this.#isPlaced) this.#toEnd();
      this.#isPlaced = true;
    });
  }

  go(options) {
    const seq = Number(options.get("seq"));
    if (!seq || seq > this.#log.head) return;
    this.#isPlaced = true;
    this.#seq = seq;
    requestAnimationFrame(() => {
      this.#revealRow(seq);
      this.#revealSaid(seq, "center");
    });
  }

  #switch(pane) {
    this.dataset.pane = pane;
    show(this.#panes, segments("Which pane", [["transcript", "Transcript"], ["log", "Log"]], pane, (other) => this.#switch(other)));
  }

  #update() {
    if (this.#log.head < this.#saidUpTo) {
      this.#said = [];
      this.#saidUpTo = 0;
    }
    for (let seq = this.#saidUpTo + 1; seq <= this.#log.head; seq += 1) {
      if (SAID.has(this.#log.kindOf(seq))) this.#said.push(seq);
    }
    this.#saidUpTo = this.#log.head;
    if (this.#isPlaced && !this.#rows.isAtEnd && this.#log.head > this.#rows.count) this.#below.textContent = "New below ↓";
    this.#rows.count = this.#log.head;
    this.#transcript.count = this.#said.length + (this.#log.pieces ? 1 : 0);
    this.#refresh();
    this.#count.textContent = `${number(this.#log.head)} events`;
    this.#noteBelow();
  }

  #refresh() {
    this.#rows.refresh();
    this.#transcript.refresh();
  }

  #showPiece() {
    this.#transcript.count = this.#said.length + 1;
    this.#transcript.refresh(this.#said.length);
  }

  #noteBelow() {
    this.#below.hidden = this.#rows.isAtEnd || !this.#log.head;
    if (this.#below.hidden) this.#below.textContent = "End ↓";
  }

  #toEnd() {
    this.#rows.toEnd();
    this.#transcript.toEnd();
    this.#noteBelow();
  }

  #choose(seq, from, isOpened) {
    this.#seq = seq;
    if (from === this.#rows) this.#revealSaid(seq);
    else this.#revealRow(seq);
    const isShown = Boolean(this.parentNode?.querySelector("tk-detail"));
    if (isOpened || isShown) this.dispatchEvent(new CustomEvent("inspect", { detail: new Detail(this.#log, seq, this.#options) }));
  }

  #revealRow(seq) {
    this.#rows.active = seq - 1;
    this.#rows.reveal(seq - 1, "center");
  }

  #revealSaid(seq, block = "nearest") {
    let at = this.#said.findIndex((each) => each >= seq);
    if (at < 0) at = this.#said.length - 1;
    this.#transcript.active = at;
    this.#transcript.reveal(at, block);
  }

  key(event) {
    if (event.key === "t" && this.#seq) {
      location.hash = placeOf(this.#log.id, "travel", this.#seq);
      return true;
    }
    return false;
  }

  #band(seq) {
    const turn = this.#log.turnAt(seq);
    const isWaited = this.#waits(seq);
    if (!turn) return h("span.band", isWaited && h("b"));
    const isEnd = seq === turn.end_seq;
    return h("span.band", {
      class: [
        turn.number % 2 ? "odd" : "even", seq === turn.seq && "begins", isEnd && "ends",
        isEnd && turn.outcome !== "completed" && "cut",
      ],
      title: `turn ${turn.number}`,
    }, h("i"), isWaited && h("b"));
  }

  #waits(seq) {
    const spans = (message) => message.seq <= seq && seq < (message.joined_seq ?? Infinity) && message.seq !== message.joined_seq;
    if (this.#log.waiting.some(spans)) return true;
    const turn = this.#log.turnAt(seq);
    const from = turn ? turn.number - 1 : 0;
    return this.#log.turns.slice(Math.max(0, from), from + 4).some((each) => each.messages.some(spans));
  }

  #logRow(seq) {
    const kind = this.#log.kindOf(seq) ?? "";
    const left = this.#log.left.get(seq);
    const why = this.#log.damaged.get(seq);
    const event = this.#log.row(seq)?.event;
    return {
      data: { seq },
      content: h("div.log-row", { class: [`tone-${toneOf(kind, event)}`, left && "has-left", why && "is-damaged"] },
        this.#band(seq),
        h("span.seq", String(seq)),
        h("span.time", event ? clock(event.timestamp) : ""),
        h("span.kind.ellipsis", kindName(kind)),
        h("span.text.ellipsis", why ?? (event ? words(event) : "")),
        left ? h("span.tag", `${left.how} at ${left.at}`) : h("span"),
      ),
    };
  }

  #saidRow(index) {
    const seq = this.#said[index];
    if (seq === undefined) return this.#pieceRow();
    const kind = this.#log.kindOf(seq);
    if (kind === "turn_started") return this.#turnRow(seq);
    const event = this.#log.row(seq)?.event;
    const why = this.#log.damaged.get(seq);
    const left = this.#log.left.get(seq);
    const isSaid = ["user_message", "agent_message", "system_prompt"].includes(kind);
    const text = why ? `damaged: ${why}` : !event ? null : isSaid || kind === "observation" ? event.content : words(event);
    return {
      data: { seq },
      content: h("div.said", {
        class: [`tone-${toneOf(kind, event)}`, !isSaid && "is-line", kind === "user_message" && "is-user", left && "has-left"],
      }, this.#band(seq), h("div.bubble",
        h("div.who",
          h("b", event?.author ?? (event?.is_error ? "error" : NAMES[kind] ?? kindName(kind))),
          event && this.#overlapWords(event, seq),
          kind !== "action" && event?.tool_call_id && this.#callOf(event.tool_call_id, seq),
          event?.interrupted && h("span.tag", "cut off"),
          left && h("span.tag", `${left.how} at ${left.at}`),
          h("span.seq", String(seq))),
        event?.text && h("p.small", plainText(event.text)),
        text === null ? h("div.blank", { "aria-hidden": "true" }) : h("div.text", text),
        event?.cut?.content && h("p.small.quiet", `${number(event.cut.content)} characters; open it to read on`),
      )),
    };
  }

  /** Name the call that a result answers: results of calls that ran side by side come in any order. */
  #callOf(toolCallId, seq) {
    for (let at = seq - 1; at > 0 && seq - at <= CALL_BACK_MAX; at--) {
      const call = this.#log.kindOf(at) === "action" && this.#log.row(at)?.event;
      if (call?.tool_call_id === toolCallId) return h("span", `of ${oneLine(call.tool_name, 64)}, seq ${at}`);
    }
    return null;
  }

  /** Say what a message did to the turn that ran when it came. */
  #overlapWords(event, seq) {
    if (event.kind === "message_queued") {
      return h("span", event.steers ? `to join turn ${this.#log.turn(event.steers)?.number ?? "?"}` : `while turn ${this.#log.turnAt(seq)?.number ?? "?"} runs`);
    }
    if (event.kind !== "user_message" || !event.message_id) return null;
    const cut = this.#log.turns.find((turn) => turn.cut_by === event.message_id);
    if (cut) return h("span.tag", `${cut.outcome === "rolled_back" ? "rolled back" : "interrupted"} turn ${cut.number}`);
    const message = this.#log.turn(event.turn_id)?.messages.find((each) => each.message_id === event.message_id);
    if (!message || message.seq === seq) return null;
    const waited = duration(message.joined_ms - message.at_ms);
    return h("span.tag", message.steers === event.turn_id ? `joined after ${waited}` : `waited ${waited}, from seq ${message.seq}`);
  }

  #turnRow(seq) {
    const turn = this.#log.turnAt(seq);
    const parts = [h("b", `Turn ${turn?.number ?? ""}`)];
    if (turn) {
      const isOver = turn.to_ms !== null;
      parts.push(h("span", { class: `chip ${!isOver ? "running" : turn.outcome === "completed" ? "finished" : "bad"}` },
        outcomeOf(turn)));
      if (isOver) parts.push(h("span", duration(turn.to_ms - turn.from_ms)));
    }
    return {
      data: { seq },
      content: h("div.said.is-turn", this.#band(seq), h("div.line", parts)),
    };
  }

  #pieceRow() {
    return {
      content: h("div.said.tone-model", h("span.band.odd", h("i")), h("div.bubble",
        h("div.who", h("b", "agent"), h("span.live-dot", "is writing")),
        h("div.text", this.#log.pieces?.text.slice(-4_000) ?? ""))),
    };
  }
}

customElements.define("tk-log", LogView);
