// Time travel: the state and the view at any seq, the difference of two, and the model's requests.

import { pause, together } from "./api.js";
import { empty, h, reading, segments, show, svg } from "./dom.js";
import { jsonView } from "./detail.js";
import { kindName, number, plainText, plural, toneOf, words } from "./format.js";
import { Rows, clamp } from "./rows.js";

const WINDOW = 60;
const BRIEF = 1_000;
const LISTED = 100;
const MESSAGES = 400;
const SHAPES = [["openai-chat", "OpenAI chat"], ["openai-responses", "OpenAI responses"], ["anthropic", "Anthropic"]];

export class Travel extends HTMLElement {
  #log;
  #seq = null; // null: the end of the log, wherever it is
  #from = null; // compared with
  #mode = "view";
  #reads = new AbortController();
  #state = null;
  #stateFrom = null;
  #view = null; // {seq, signal, events by place, parts of it that were asked for}
  #differences = [];
  #shape = "openai-chat";
  #step = null;
  #isRaw = false;
  #isMissed = false; // the server did not answer when this place was read

  #range = h("input", { type: "range", min: 0, "aria-label": "Seq", oninput: (event) => this.#move(Number(event.target.value)) });
  #strip = svg("svg", { "aria-hidden": "true", preserveAspectRatio: "none" });
  #number = seqField("Seq", (seq) => this.#move(seq));
  #fromNumber = seqField("Compare with seq", (seq) => this.#compare(seq));
  #compared = h("input", { type: "checkbox", id: "compared", onchange: (event) => this.#compare(event.target.checked ? Math.max(0, this.seq - 1) : null) });
  #event = h("span.ellipsis.quiet");
  #facts = h("div.travel-facts", { tabindex: 0, role: "region", "aria-label": "State" });
  #main = h("div.travel-view");
  #modes = h("div");
  #rows = new Rows({ label: "What the model sees", render: (index) => this.#render(index) });
  #loaded; // the promise of the newest load
  #follow = together(50, async () => {
    await this.#loaded; // else a log that grows quickly would end each load
    if (this.#isFollowing) this.#moved();
    await this.#loaded;
  });

  constructor(log) {
    super();
    this.#log = log;
    log.addEventListener("outline", () => {
      this.#showStrip();
      if (this.#isFollowing) this.#follow();
    });
    log.addEventListener("rows", () => this.#nameEvent());
    this.addEventListener("focusout", () => {
      if (this.#isFollowing && this.#range.max < log.head) this.#follow();
    });
    this.#rows.addEventListener("range", ({ detail: [first, last] }) => this.#readOn(first, last));
  }

  get #isFollowing() {
    // A number that is being typed stays.
    return this.#isMissed || (this.#seq === null && document.activeElement.type !== "number");
  }

  get seq() {
    return this.#seq ?? this.#log.head;
  }

  connectedCallback() {
    if (!this.firstChild) {
      this.append(
        h("div.travel-top",
          h("div.slider", this.#strip, this.#range),
          h("div.travel-controls",
            h("div.buttons",
              this.#button("⇤", "Turn back ({)", () => this.#byTurn(-1)),
              this.#button("←", "Event back ([)", () => this.#move(this.seq - 1)),
              this.#number,
              this.#button("→", "Event on (])", () => this.#move(this.seq + 1)),
              this.#button("⇥", "Turn on (})", () => this.#byTurn(1)),
            ),
            this.#modes,
            h("span.buttons", this.#compared, h("label", { for: "compared" }, "compare with"), this.#fromNumber),
            this.#event,
          )),
        h("div.travel-body", this.#facts, this.#main),
      );
    }
    this.#showStrip();
    this.#moved();
  }

  disconnectedCallback() {
    this.#reads.abort();
  }

  go(options) {
    if (options.has("from")) this.#from = Number(options.get("from"));
    if (options.has("seq")) this.#move(Number(options.get("seq")));
  }

  key(event) {
    const moves = {
      "[": () => this.#move(this.seq - 1), "]": () => this.#move(this.seq + 1),
      "{": () => this.#byTurn(-1), "}": () => this.#byTurn(1),
    };
    moves[event.key]?.();
    return event.key in moves;
  }

  #button(text, label, act) {
    return h("button", { "aria-label": label, title: label, onclick: act }, text);
  }

  #move(seq) {
    this.#seq = clamp(Math.round(seq) || 0, 0, this.#log.head);
    this.#step = null;
    this.#moved();
  }

  #byTurn(by) {
    const marks = [0, ...this.#log.turns.map((turn) => turn.end_seq ?? this.#log.head)];
    const next = by > 0 ? marks.find((seq) => seq > this.seq) : marks.findLast((seq) => seq < this.seq);
    if (next !== undefined) this.#move(next);
  }

  #compare(seq) {
    this.#from = seq === null || Number.isNaN(seq) ? null : clamp(seq, 0, this.#log.head);
    if (this.#from !== null) this.#mode = "difference";
    else if (this.#mode === "difference") this.#mode = "view";
    this.#moved();
  }

  /** Show the place at once; read its state when the slider rests. */
  #moved() {
    const { head } = this.#log;
    this.#range.max = this.#number.max = this.#fromNumber.max = head;
    this.#range.value = this.#number.value = this.seq;
    this.#compared.checked = this.#from !== null;
    this.#fromNumber.hidden = this.#from === null;
    if (this.#from !== null) this.#fromNumber.value = this.#from;
    this.#nameEvent();
    this.#showModes();
    this.#loaded = this.#load();
  }

  #nameEvent() {
    const kind = this.#log.kindOf(this.seq);
    const event = kind && this.#log.row(this.seq)?.event;
    this.#event.textContent = kind ? `${kindName(kind)} ${event ? words(event) : ""}` : "before the first event";
    this.#range.setAttribute("aria-valuetext", `seq ${this.seq} of ${this.#log.head}, ${this.#event.textContent}`);
  }

  #showModes() {
    const modes = [["view", "View"], ["asked", "Asked"]];
    if (this.#from !== null) modes.splice(1, 0, ["difference", "Difference"]);
    show(this.#modes, segments("What is shown", modes, this.#mode, (mode) => {
      this.#mode = mode;
      this.#moved();
    }));
  }

  #showStrip() {
    const { head, turns } = this.#log;
    const width = Math.max(head, 1);
    this.#strip.setAttribute("viewBox", `0 0 ${width} 24`);
    // A bar for each turn; bars that would be too thin to see are joined.
    const bars = [];
    const thinnest = width / 2_000;
    let last = -1;
    for (const turn of turns) {
      const end = turn.end_seq ?? head;
      const isBad = turn.end_seq && turn.outcome !== "completed";
      if (end - last < thinnest && !isBad) continue;
      bars.push(svg("rect", {
        x: turn.seq - 1, width: Math.max(end - turn.seq + 1, thinnest), y: isBad ? 4 : 8, height: isBad ? 16 : 12,
        fill: isBad ? "var(--bad)" : turn.number % 2 ? "var(--accent)" : "var(--line-strong)",
      }));
      last = end;
    }
    for (const seq of this.#log.damaged.keys()) bars.push(svg("rect", { x: seq - 1, width: Math.max(1, thinnest * 2), y: 0, height: 24, fill: "var(--bad)" }));
    show(this.#strip, bars);
  }

  async #load() {
    this.#reads.abort();
    const { signal } = (this.#reads = new AbortController());
    await pause(50, signal);
    if (signal.aborted || !this.isConnected) return;
    const seq = this.seq;
    this.#isMissed = false;
    if (!this.#main.firstChild) show(this.#main, reading());
    try {
      const [state, stateFrom] = await Promise.all([
        this.#log.ask("/state", { query: { at: seq }, signal }),
        this.#from === null ? null : this.#log.ask("/state", { query: { at: this.#from }, signal }),
      ]);
      this.#state = state;
      this.#stateFrom = stateFrom;
      this.#showFacts();
      if (this.#mode === "view") await this.#loadView(seq, signal);
      else if (this.#mode === "difference") await this.#loadDifference(seq, signal);
      else await this.#loadAsked(seq, signal);
      this.dataset.shown = `${this.#mode} ${seq}`; // what is shown now; tests wait for it
    } catch (problem) {
      if (problem.name === "AbortError" || signal.aborted) return;
      this.#isMissed = problem.status === 0;
      if (!this.#isMissed) this.#showProblem(problem); // else keep what is shown
      this.dataset.shown = `problem ${seq}`;
    }
  }

  #showProblem(problem) {
    const at = problem.facts?.seq;
    show(this.#main, empty("There is no state here",
      h("p", problem.kind === "corrupt-log"
        ? `The log is damaged at seq ${number(at)}. States up to seq ${number(at - 1)} can be computed.` : problem.message),
      problem.kind === "corrupt-log" && h("button", { onclick: () => this.#move(at - 1) }, `Go to seq ${number(at - 1)}`)));
    show(this.#facts);
  }

  // --- the state ---

  #showFacts() {
    const state = this.#state;
    const before = this.#stateFrom;
    const fact = (name, read) => {
      const value = read(state);
      const isChanged = before && JSON.stringify(read(before)) !== JSON.stringify(value);
      return [h("dt", name), h("dd", { class: isChanged ? "changed" : null }, isChanged ? `${read(before)} → ${value}` : String(value))];
    };
    const total = (name) => (of) => number(of.metrics[name] ?? 0);
    const turn = state.running && this.#log.turn(state.running.turn_id);
    show(this.#facts,
      h("section",
        h("dl.facts",
          fact("status", (of) => kindName(of.status)),
          fact("turn", (of) => (of.running ? this.#log.turn(of.running.turn_id)?.number ?? "runs" : "none")),
          turn && [h("dt", "messages"), h("dd.mono", state.running.message_ids.join(", "))],
          fact("steps", (of) => of.iteration),
          fact("waits for", (of) => of.waits_for ?? "nothing"))),
      h("section", h("h2", "Open calls"), this.#listOf(state.open_calls, (call) =>
        h("li.mono", `${call} `, state.awaiting.includes(call) && h("span.chip.wait", "confirm")))),
      h("section", h("h2", "Queue"), this.#listOf(state.queued, (message) =>
        h("li.ellipsis", h("span.mono.quiet", `${message.message_id} `), message.content.slice(0, 200)))),
      h("section", h("h2", "Tokens"), h("dl.facts",
        fact("in", total("input_tokens")), fact("out", total("output_tokens")), fact("from cache", total("cached_tokens")),
        fact("cost", (of) => of.metrics.total_cost.toFixed(4)))),
      state.tasks.length > 0 && h("section", h("h2", "Tasks"), this.#listOf(state.tasks, (task) =>
        h("li", task.done ? "✓ " : "○ ", task.description))));
  }

  #listOf(values, make) {
    const more = values.length - LISTED;
    return values.length
      ? h("ul", values.slice(0, LISTED).map(make), more > 0 && h("li.quiet", `and ${number(more)} more`))
      : h("p.quiet", "none");
  }

  // --- the view ---

  async #loadView(seq, signal) {
    const view = { seq, signal, events: [], parts: new Set() };
    const count = await this.#readPart(view, 0);
    this.#view = view;
    this.#showRows(count, `What the model sees at seq ${number(seq)}: ${plural(count, "event")}`, "The model sees nothing yet");
  }

  /** Read a part of a view; return how many events the whole view has. */
  async #readPart({ seq, signal, events, parts }, part) {
    parts.add(part);
    const offset = part * WINDOW;
    const found = await this.#log.ask("/view", { query: { at: seq, offset, limit: WINDOW, brief: BRIEF }, signal });
    found.events.forEach((event, n) => (events[offset + n] = event));
    return found.count;
  }

  #readOn(first, last) {
    const view = this.#view;
    if (this.#mode !== "view" || !view) return;
    for (let part = Math.floor(first / WINDOW); part <= Math.floor(last / WINDOW); part += 1) {
      if (view.parts.has(part)) continue;
      this.#readPart(view, part).then(() => this.#rows.refresh(), (problem) => {
        view.parts.delete(part);
        this.#isMissed = problem.status === 0;
      });
    }
  }

  #showRows(count, title, nothing) {
    const head = h("div.pane-head", h("h2", title));
    if (!count) {
      show(this.#main, head, empty(nothing));
      return;
    }
    if (this.#rows.parentNode !== this.#main) show(this.#main, head, this.#rows);
    else this.#main.firstChild.replaceWith(head);
    this.#rows.count = count;
    this.#rows.refresh();
  }

  #render(index) {
    const isView = this.#mode === "view";
    const [event, how] = isView ? [this.#view?.events[index], ""] : this.#differences[index] ?? [];
    if (!event) return { content: h("div.seen", h("div.who", "…"), h("div.text", " ")) };
    const text = "content" in event ? plainText(event.content) : words(event);
    const cut = event.cut?.content;
    return {
      data: { eventId: event.id },
      content: h("div", { class: `seen tone-${toneOf(event.kind, event)} ${how}` },
        h("div.who", h("b", kindName(event.kind)), how && h("span", how === "entered" ? "came" : "left"),
          h("span.mono.ellipsis", event.tool_call_id ?? event.message_id ?? ""),
          cut && h("span", `${number(cut)} characters`)),
        h("div.text", event.text ? `${event.text}\n${text}` : text)),
    };
  }

  async #loadDifference(seq, signal) {
    const found = await this.#log.ask("/difference", { query: { first: this.#from, last: seq, brief: BRIEF }, signal });
    this.#differences = [...found.left.map((event) => [event, "left"]), ...found.entered.map((event) => [event, "entered"])];
    this.#showRows(this.#differences.length,
      `Seq ${number(this.#from)} → ${number(seq)}: ${number(found.entered_count)} came, ${number(found.left_count)} left`
        + (this.#differences.length < found.entered_count + found.left_count ? `; ${number(this.#differences.length)} of them are shown` : ""),
      "Both views are the same");
  }

  // --- what the model was asked ---

  async #loadAsked(seq, signal) {
    const turns = this.#log.turns.filter((turn) => turn.steps);
    if (!turns.length) {
      show(this.#main, empty("No model calls", h("p", "None was made yet, or the agent does not report its model calls.")));
      return;
    }
    const turn = this.#turnOfStep(turns, seq);
    const { turns: bars } = await this.#log.ask("/bars", { query: { first: turn.seq, last: turn.seq }, signal });
    const steps = bars[turn.turn_id].bars.filter((bar) => bar.kind === "model");
    let at = this.#step === null ? steps.findLastIndex((step) => step.seq <= seq) : this.#step - turn.steps_before - 1;
    at = clamp(at, 0, steps.length - 1);
    const step = steps[at];
    const place = turn.steps_before + at + 1;
    const body = h("div.scroll", { tabindex: 0, role: "region", "aria-label": "Messages" });
    show(this.#main, h("div.asked", this.#askedBar(place, step, turn), body));
    if (step.view_seq === null) {
      show(body, h("p.quiet", "The agent did not report which view its model saw."));
      return;
    }
    show(body, reading());
    const { event } = await this.#log.whole(step.seq);
    try {
      const asked = await this.#log.ask("/messages", {
        query: {
          of: "view", at: step.view_seq, shape: this.#shape, model: event.request.model,
          is_plain: event.request.is_plain, show_author: event.request.show_author,
        }, signal,
      });
      show(body, this.#isRaw ? jsonView(asked.system ? { system: asked.system, messages: asked.messages } : asked.messages) : this.#messages(asked));
    } catch (problem) {
      if (problem.name === "AbortError") throw problem;
      show(body, h("p.outcome.bad", problem.message));
    }
  }

  #turnOfStep(turns, seq) {
    if (this.#step !== null) return turns.findLast((turn) => turn.steps_before < this.#step) ?? turns[0];
    return turns.findLast((turn) => turn.seq <= seq) ?? turns[0];
  }

  #askedBar(place, step, turn) {
    const go = (to) => {
      this.#step = clamp(to, 1, this.#log.steps);
      this.#moved();
    };
    return h("div.bar",
      h("div.buttons",
        this.#button("←", "Step back", () => go(place - 1)),
        h("label", { for: "step" }, "step"),
        h("input", { id: "step", type: "number", min: 1, max: this.#log.steps, value: place, onchange: (event) => go(Number(event.target.value)) }),
        h("span.quiet", `of ${number(this.#log.steps)}`),
        this.#button("→", "Step on", () => go(place + 1))),
      segments("Shape", SHAPES, this.#shape, (shape) => {
        this.#shape = shape;
        this.#moved();
      }),
      h("button", { "aria-pressed": String(this.#isRaw), onclick: () => {
        this.#isRaw = !this.#isRaw;
        this.#moved();
      } }, "JSON"),
      h("span.quiet.small", [`turn ${turn.number}`, step.name, step.outcome, step.view_seq === null ? null : `view at seq ${step.view_seq}`].filter(Boolean).join(" · ")));
  }

  #messages({ system, messages }) {
    const all = system ? [{ role: "system", content: system }, ...messages] : messages;
    const more = all.length - MESSAGES;
    const shown = all.slice(0, MESSAGES).map((message) => {
      const role = message.role ?? message.type;
      const { role: _role, content, ...rest } = message;
      const tone = { user: "user", assistant: "model", tool: "tool", function_call: "tool", function_call_output: "tool" }[role] ?? "plain";
      return h("div", { class: `tone-${tone}` },
        h("div.seen", h("div.who", h("b", role)),
          content !== undefined && h("div.text", plainText(content)),
          Object.keys(rest).length > 0 && jsonView(rest)));
    });
    if (more > 0) shown.push(h("p.seen.quiet", `${plural(more, "more message")}; “JSON” shows all of them.`));
    return shown;
  }
}

function seqField(label, act) {
  return h("input", { type: "number", min: 0, "aria-label": label, onchange: (event) => act(Number(event.target.value)) });
}

customElements.define("tk-travel", Travel);
