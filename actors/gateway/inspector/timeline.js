// The timeline: a lane for each turn, with a bar for each thing that took time in it. The axis spans
// the turns in sight, or the one that was opened, without the time in which nothing ran.

import { placeOf, together } from "./api.js";
import { eachFrame, empty, h, show, svg } from "./dom.js";
import { duration, kindName, number, oneLine, outcomeOf, plural, wholeTime } from "./format.js";
import { clamp } from "./rows.js";

const PAD = 11;
const STRIP = 16; // messages
const ROW = 18;
const GAP_PX = 44;
const AXIS = 28;
const RIGHT = 32;
const TURNS_AT_ONCE = 40;
const OPEN_MS_MAX = 300_000;
const WAITS = { confirmation: "waits for a person", pause: "paused" };
const PEN = document.createElement("canvas").getContext("2d"); // measures labels
const ENDS = { completed: ["✓", "tl-good"], interrupted: ["✕", "tl-bad"], rolled_back: ["↶", "tl-bad"], failed: ["!", "tl-bad"] };

export class Timeline extends HTMLElement {
  #log;
  #bars = new Map(); // turn id → {upTo, rows}
  #tops = [0];
  #opened = null; // the turn that the axis spans
  #active = -1;
  #said = h("p.ellipsis", { role: "status" });
  #back = h("button", { hidden: true, onclick: () => this.#open(null) }, "All turns");
  #space = h("div.timeline-space");
  #svg = svg("svg", { role: "img", "aria-label": "Turns over time" });
  #scroll = h("div.timeline-scroll", { tabindex: 0, role: "group", "aria-label": "Timeline: a lane for each turn" }, this.#space, this.#svg);
  #tip = h("div.tip", { hidden: true });
  #draw = eachFrame(() => this.#drawNow());
  #read = together(40, () => this.#readBars());
  #size = new ResizeObserver(() => this.#draw());
  #isPlaced = false;

  constructor(log) {
    super();
    this.#log = log;
    log.addEventListener("outline", () => this.#changed());
    this.#scroll.addEventListener("scroll", () => {
      this.#read();
      this.#draw();
    }, { passive: true });
    this.#scroll.addEventListener("keydown", (event) => this.#key(event));
    this.#svg.addEventListener("pointermove", (event) => this.#hover(event));
    this.#svg.addEventListener("pointerleave", () => (this.#tip.hidden = true));
    this.#svg.addEventListener("click", (event) => this.#click(event));
  }

  connectedCallback() {
    if (!this.firstChild) {
      this.append(h("div.timeline-bar", this.#back, this.#said), this.#scroll, this.#legend(), this.#tip);
      this.#size.observe(this.#scroll);
    }
    this.#changed();
  }

  #changed() {
    if (!this.isConnected) return;
    this.#measure();
    if (!this.#isPlaced && this.#scroll.clientHeight) {
      this.#isPlaced = true;
      this.#scroll.scrollTop = this.#tops.at(-1); // the newest turns
    }
    if (!this.#log.turns.length) {
      show(this.#scroll, empty("No turn yet", h("p", "A turn begins with a chat message.")));
      return;
    }
    if (this.#svg.parentNode !== this.#scroll) show(this.#scroll, this.#space, this.#svg);
    if (this.#active < 0) this.#tell();
    this.#read();
    this.#draw();
  }

  #height(turn) {
    const rows = this.#bars.get(turn.turn_id)?.rows.length ?? 1 + (turn.calls ? 1 : 0);
    return PAD * 2 + STRIP + ROW * Math.max(rows, 2);
  }

  #measure() {
    const tops = [AXIS];
    for (const turn of this.#log.turns) tops.push(tops.at(-1) + this.#height(turn));
    this.#tops = tops;
    this.#space.style.height = `${tops.at(-1)}px`;
  }

  #inSight() {
    const { scrollTop, clientHeight } = this.#scroll;
    let last = this.#tops.findIndex((top) => top >= scrollTop + clientHeight) - 1;
    if (last < 0) last = this.#log.turns.length - 1;
    // If the top of a turn is out of sight, so are its messages.
    const first = this.#tops.findIndex((top) => top + PAD >= scrollTop + AXIS);
    return [Math.min(first, last), last];
  }

  async #readBars() {
    if (!this.isConnected || !this.#log.turns.length) return;
    const [first, last] = this.#inSight();
    const { turns } = this.#log;
    const missing = turns.slice(Math.max(0, first - 2), Math.min(last + 3, first + TURNS_AT_ONCE))
      .filter((turn) => this.#bars.get(turn.turn_id)?.upTo !== turn.last_seq);
    if (!missing.length) return;
    const upTo = missing.map((turn) => turn.last_seq);
    try {
      const found = await this.#log.ask("/bars", { query: { first: missing[0].seq, last: missing.at(-1).seq } });
      for (const [n, turn] of missing.entries()) {
        const { bars } = found.turns[turn.turn_id] ?? { bars: [] };
        this.#bars.set(turn.turn_id, { upTo: upTo[n], rows: packed(bars) });
      }
    } catch {
      return;
    }
    const wasAtEnd = this.#scroll.scrollTop + this.#scroll.clientHeight >= this.#tops.at(-1) - 4;
    this.#measure();
    if (wasAtEnd) this.#scroll.scrollTop = this.#tops.at(-1);
    if (this.#active >= 0) this.#tell();
    this.#draw();
  }

  #rowsOf(turn) {
    return this.#bars.get(turn.turn_id)?.rows ?? [];
  }

  /** Return when a turn ended, or the last time that is known of a turn that has not. */
  #endOf(turn) {
    if (turn.to_ms !== null) return turn.to_ms;
    const ends = this.#rowsOf(turn).flat().map((bar) => bar.to_ms ?? bar.from_ms);
    const known = Math.max(turn.from_ms, ...ends);
    return Date.now() - known < OPEN_MS_MAX ? Date.now() : known + 1_000;
  }

  // --- the axis ---

  /** Map times to pixels, without the times in which nothing ran. */
  #axis(turns, left, width) {
    const busy = turns.map((turn) => [Math.min(turn.from_ms, ...turn.messages.map((each) => each.at_ms)), this.#endOf(turn)])
      .sort((one, other) => one[0] - other[0]);
    const parts = [];
    for (const [from, to] of busy) {
      if (parts.length && from <= parts.at(-1)[1]) parts.at(-1)[1] = Math.max(parts.at(-1)[1], to);
      else parts.push([from, to]);
    }
    const whole = parts.reduce((sum, [from, to]) => sum + to - from, 0) || 1;
    const merged = [];
    for (const part of parts) {
      // A short pause keeps its true length.
      if (merged.length && part[0] - merged.at(-1)[1] < whole * 0.06) merged.at(-1)[1] = part[1];
      else merged.push([...part]);
    }
    const time = merged.reduce((sum, [from, to]) => sum + to - from, 0) || 1;
    const scale = Math.max(1, width - GAP_PX * (merged.length - 1)) / time;
    let x = left;
    for (const part of merged) {
      part.x = x;
      x += (part[1] - part[0]) * scale + GAP_PX;
    }
    const toX = (at) => {
      const part = merged.findLast(([from]) => at >= from) ?? merged[0];
      return part.x + (Math.min(at, part[1]) - part[0]) * scale;
    };
    return { toX, scale, parts: merged };
  }

  #drawNow() {
    if (!this.isConnected || !this.#log.turns.length) return;
    const { clientWidth: width, clientHeight: height, scrollTop } = this.#scroll;
    if (!width || !height) return;
    const [first, last] = this.#inSight();
    const { turns } = this.#log;
    const spanned = this.#opened ? [this.#opened] : turns.slice(first, last + 1);
    const left = width < 700 ? 92 : 232;
    const axis = this.#axis(spanned, left + 12, width - left - 12 - RIGHT);
    const yOf = (index) => this.#tops[index] - scrollTop;
    const lanes = [];
    const overs = [];
    for (let index = Math.max(0, first - 1); index <= Math.min(last + 1, turns.length - 1); index += 1) {
      lanes.push(this.#lane(turns[index], index, yOf(index), axis, left, width));
      overs.push(this.#cut(turns[index], index, yOf, axis));
    }
    this.#svg.setAttribute("width", width);
    this.#svg.setAttribute("height", height);
    this.#svg.ariaLabel = `Turns ${first + 1} to ${last + 1} of ${turns.length} over time`;
    show(this.#svg, patterns(), svg("clipPath", { id: "tl-plot" }, box("", left, AXIS, width - left, height)),
      lanes.map((lane) => lane.ground),
      this.#grid(axis, left, height),
      svg("g", { class: "tl-plot", "clip-path": "url(#tl-plot)" }, lanes.map((lane) => lane.bars), overs),
      lanes.map((lane) => lane.title),
      path("tl-grid", `M${left} 0V${height}`),
      this.#axisHead(axis, left, width));
    if (turns.some((turn) => turn.to_ms === null && Date.now() - turn.from_ms < OPEN_MS_MAX)) setTimeout(this.#draw, 500);
  }

  #grid(axis, left, height) {
    const parts = [];
    for (const [n, part] of axis.parts.entries()) {
      if (n) parts.push(box("tl-gap", part.x - GAP_PX + 2, AXIS, GAP_PX - 4, height));
    }
    for (const [x] of this.#ticks(axis)) parts.push(path("tl-grid", `M${x} ${AXIS}V${height}`));
    return parts;
  }

  #ticks(axis) {
    const step = niceStep(84 / axis.scale);
    const ticks = [];
    const zero = axis.parts[0][0];
    for (const part of axis.parts) {
      const begin = Math.ceil((part[0] - zero) / step) * step + zero;
      for (let at = begin; at <= part[1] && ticks.length < 400; at += step) ticks.push([axis.toX(at), at - zero]);
    }
    return ticks;
  }

  #axisHead(axis, left, width) {
    const words = [box("tl-head", 0, 0, width, AXIS), path("tl-grid", `M0 ${AXIS}H${width}`)];
    let free = 0;
    for (const [x, at] of this.#ticks(axis)) {
      const time = at ? `+${shortTime(at)}` : "0";
      const gap = axis.parts.find((part) => part.x > x)?.x - GAP_PX;
      if (x < free || x + time.length * 7 > (gap || width)) continue;
      words.push(label("tl-mono", x + 3, 18, time));
      free = x + 56;
    }
    for (const [n, part] of axis.parts.entries()) {
      if (!n) continue;
      const idle = part[0] - axis.parts[n - 1][1];
      const x = part.x - GAP_PX / 2;
      words.push(label("tl-idle", x, 12, "idle", "middle"), label("tl-idle", x, 23, duration(idle).replace(/ min .*/, " min"), "middle"));
    }
    words.push(label("tl-quiet", 16, 18, left > 100 ? wholeTime(axis.parts[0][0]) : "turn"));
    return words;
  }

  // --- a lane ---

  #lane(turn, index, y, axis, left, width) {
    const height = this.#height(turn);
    const end = this.#endOf(turn);
    const ground = box(["tl-lane", index % 2 && "odd", index === this.#active && "is-active"], 0, y, width, height, { turn: index });
    const bars = [];
    const x0 = axis.toX(turn.from_ms);
    const x1 = Math.max(x0 + 3, axis.toX(end));
    const top = y + PAD + STRIP;
    bars.push(box(`tl-turn ${turn.outcome}`, x0, top - 2, x1 - x0, height - PAD * 2 - STRIP + 4, { turn: index }));
    for (const [n, row] of this.#rowsOf(turn).entries()) bars.push(...this.#row(row, n, top + n * ROW, axis, end, x1, index));
    const [glyph, tone] = ENDS[turn.outcome] ?? ["…", "tl-quiet"];
    const ended = `${glyph} ${turn.outcome === "failed" ? failureOf(turn) : ""}`.trim();
    const isRoomy = ended.length < 2 || x1 + 8 + widthOf(ended) < width;
    bars.push(label(`tl-text tl-strong ${tone}`, isRoomy ? x1 + 5 : x0 - 5, top + 12, ended, isRoomy ? "start" : "end"));
    if (turn.outcome && turn.outcome !== "completed") {
      bars.push(box("tl-bad", x1 - 2, top - 4, 3, height - PAD * 2 - STRIP + 8));
    }
    const untold = []; // texts for which the plot has no room
    let free = left;
    for (const [n, message] of turn.messages.entries()) {
      const next = turn.messages[n + 1];
      const { shapes, upTo, isTold } = this.#message(message, n, y + PAD, axis, index, free, next ? axis.toX(next.at_ms) - 8 : width - 4);
      bars.push(...shapes);
      if (!isTold) untold.push(message.text);
      free = upTo;
    }
    return { ground, bars, title: this.#title(turn, index, y, left, untold) };
  }

  #title(turn, index, y, left, untold) {
    const outcome = outcomeOf(turn);
    const room = left - 24;
    const tone = turn.outcome === "completed" ? "tl-quiet" : "tl-quiet tl-bad";
    return svg("g", { data: { turn: index } },
      label("tl-text tl-strong", 16, y + 20, `Turn ${turn.number}`),
      left > 100 && label(tone, left - 12, y + 20, `${outcome} · ${duration(this.#endOf(turn) - turn.from_ms)}`, "end"),
      label("tl-quiet", 16, y + 37, fitted(turn.messages[0]?.text, room)),
      left <= 100 && label(tone, 16, y + 53, outcome),
      untold.map((text, n) => label("tl-quiet", 16, y + 53 + 16 * (n + (left <= 100)), fitted(`◆ ${text}`, room)))
        .slice(0, Math.floor((this.#height(turn) - 41) / 16) - (left <= 100)));
  }

  #row(row, n, y, axis, turnEnd, x1, index) {
    const found = [];
    let free = -Infinity;
    let told = axis.parts[0].x; // where the last ends
    for (const [at, bar] of row.entries()) {
      const from = axis.toX(bar.from_ms);
      const to = Math.max(from + 1.5, axis.toX(bar.to_ms ?? turnEnd));
      if (to < free && to - from < 2) continue; // thousands of bars in a few pixels
      const isCut = ["interrupted", "failed", "cut off", "error", "not run", "rejected"].includes(bar.outcome);
      found.push(box(`tl-${bar.kind}`, from, y + 1, to - from, ROW - 4, { turn: index, row: n, bar: at }));
      if (isCut) found.push(box("tl-bad", to - 3, y + 1, 3, ROW - 4));
      free = to + 1;
      const [name, ...others] = namesOf(bar);
      const took = duration((bar.to_ms ?? turnEnd) - bar.from_ms);
      const isWait = bar.kind in WAITS;
      const next = Math.min(x1, row[at + 1] ? axis.toX(row[at + 1].from_ms) : x1);
      const inside = [`${name} ${took}`, name, ...others].find((words) => widthOf(words) + 10 < to - from);
      const size = widthOf(name) + 8;
      if (inside) found.push(label(isWait ? "tl-over" : "tl-on", from + 5, y + 12.5, inside));
      else if (size < next - to) {
        found.push(label("tl-quiet", to + 4, y + 12.5, name));
        free = told = to + size;
      } else if (n && from - size > told) found.push(label("tl-quiet", from - 4, y + 12.5, name, "end"));
      told = Math.max(told, to);
    }
    return found;
  }

  /** Draw a message, how long it waited, and its text if there is room between two places. */
  #message(message, n, y, axis, index, free, end) {
    const at = axis.toX(message.at_ms);
    const joinedMs = message.joined_ms ?? Date.now();
    const joined = axis.toX(joinedMs);
    const shapes = [];
    const isWaited = joined - at > 1;
    if (isWaited) {
      shapes.push(box(message.steers ? "tl-steer" : "tl-queue", at, y + 4, joined - at, 7, { turn: index, message: n }),
        path("tl-join", `M${joined} ${y + 7}V${y + STRIP + ROW}`));
    }
    shapes.push(path("tl-user", `M${at} ${y + 1}l6 6.5l-6 6.5l-6 -6.5z`, { turn: index, message: n }));
    const waited = isWaited ? `${message.steers ? "joins after" : "waits"} ${duration(joinedMs - message.at_ms)}` : "";
    let upTo = joined;
    const put = (words, isOver) => {
      const size = widthOf(words) + 4;
      const [before, after] = [at - 10 - size, joined + 6];
      const x = [n && after + size < end && after, before > free && before, after + size < end && after, isOver && end - size > at + 10 && end - size].find(Boolean);
      if (!words || !x) return false;
      shapes.push(x < at ? label("tl-quiet", at - 10, y + 11, words, "end") : label(x < joined ? "tl-over" : "tl-quiet", x, y + 11, words));
      upTo = Math.max(upTo, x + size);
      return true;
    };
    // The text of a turn's first message is in its lane's left column.
    const isTold = !n || put([waited, shortened(message.text, 60)].filter(Boolean).join(": "), false);
    if (!n || !isTold) put(waited, true);
    return { shapes, upTo, isTold };
  }

  #cut(turn, index, yOf, axis) {
    if (!turn.cut_by) return [];
    const by = this.#log.turns.findIndex((other) => other.messages.some((each) => each.message_id === turn.cut_by));
    if (by < 0) return [];
    const x = axis.toX(this.#log.turns[by].messages.find((each) => each.message_id === turn.cut_by).at_ms);
    const to = axis.toX(turn.to_ms);
    const bottom = yOf(index) + this.#height(turn) - PAD + 4;
    const begin = yOf(by) + PAD + 1;
    return [
      path("tl-cut", `M${x} ${begin}V${(begin + bottom) / 2}H${to}V${bottom + 4}`),
      path("tl-bad", `M${to} ${bottom - 2}l4.5 8h-9z`),
      label("tl-quiet tl-bad", to + 8, bottom + 8, turn.outcome === "rolled_back" ? "rolls back" : "interrupts"),
    ];
  }

  // --- what a person does ---

  #key(event) {
    const { turns } = this.#log;
    const moves = { ArrowDown: 1, j: 1, ArrowUp: -1, k: -1, Home: -turns.length, End: turns.length };
    if (event.key in moves) {
      const from = this.#active < 0 ? this.#inSight()[0] - (moves[event.key] > 0 ? 1 : 0) : this.#active;
      this.#choose(clamp(from + moves[event.key], 0, turns.length - 1));
    } else if (event.key === "Enter" && this.#active >= 0) this.#open(this.#opened ? null : turns[this.#active]);
    else if (event.key === "Escape" && this.#opened) this.#open(null);
    else return;
    event.preventDefault();
    event.stopPropagation();
  }

  #choose(index) {
    this.#active = index;
    if (this.#opened) this.#opened = this.#log.turns[index];
    const [top, bottom] = [this.#tops[index], this.#tops[index + 1]];
    const { scrollTop, clientHeight } = this.#scroll;
    if (top - AXIS < scrollTop) this.#scroll.scrollTop = top - AXIS;
    else if (bottom > scrollTop + clientHeight) this.#scroll.scrollTop = bottom - clientHeight;
    this.#tell();
    this.#read();
    this.#draw();
  }

  #open(turn) {
    this.#opened = turn;
    this.#back.hidden = !turn;
    this.#draw();
  }

  /** Say in words what the active lane shows. */
  #tell() {
    const turn = this.#log.turns[this.#active];
    if (!turn) {
      this.#said.textContent = `${plural(this.#log.turns.length, "turn")}. The axis spans the turns in sight; Enter opens one.`;
      return;
    }
    const parts = [`Turn ${turn.number}, ${outcomeOf(turn)}, ${duration(this.#endOf(turn) - turn.from_ms)}`];
    if (turn.cut_by) {
      const by = this.#log.turns.flatMap((other) => other.messages).find((each) => each.message_id === turn.cut_by);
      parts.push(`cut off by “${oneLine(by?.text ?? turn.cut_by, 60)}”`);
    }
    if (turn.outcome === "failed" && turn.detail) parts.push(oneLine(turn.detail, 120));
    const sums = new Map();
    for (const bar of this.#rowsOf(turn).flat()) {
      const name = WAITS[bar.kind] ?? (bar.kind === "model" ? "model" : "tools");
      sums.set(name, (sums.get(name) ?? 0) + (bar.to_ms ?? this.#endOf(turn)) - bar.from_ms);
    }
    for (const [name, ms] of sums) parts.push(`${name} ${duration(ms)}`);
    this.#said.textContent = parts.join("; ");
  }

  #hover(event) {
    const { turn: index, row, bar: at, message: n } = event.target.dataset;
    const turn = this.#log.turns[index];
    this.#tip.hidden = !turn || (row === undefined && n === undefined);
    if (this.#tip.hidden) return;
    const lines = [];
    if (n !== undefined) {
      const message = turn.messages[n];
      lines.push(oneLine(message.text, 120), `came at seq ${number(message.seq)}`);
      if (message.joined_ms > message.at_ms) lines.push(`${message.steers ? "joined after" : "waited"} ${duration(message.joined_ms - message.at_ms)}`);
    } else {
      const bar = this.#rowsOf(turn)[row][at];
      lines.push(`${WAITS[bar.kind] ?? bar.kind} ${bar.name}`, `${duration((bar.to_ms ?? this.#endOf(turn)) - bar.from_ms)} ${bar.outcome}`, `seq ${number(bar.seq)}${bar.end_seq ? ` to ${number(bar.end_seq)}` : ""}`);
    }
    this.#tip.textContent = lines.join("\n");
    this.#tip.style.left = `${Math.min(event.clientX + 12, innerWidth - 332)}px`;
    this.#tip.style.top = `${Math.min(event.clientY + 12, innerHeight - 96)}px`;
  }

  #click(event) {
    const target = event.target.closest("[data-turn]");
    if (!target) return;
    const turn = this.#log.turns[target.dataset.turn];
    const { row, bar, message } = target.dataset;
    const found = row !== undefined ? this.#rowsOf(turn)[row][bar] : turn.messages[message];
    if (found) location.hash = placeOf(this.#log.id, "log", found.seq);
    else this.#choose(Number(target.dataset.turn));
  }

  #legend() {
    const mark = (...shapes) => svg("svg", { viewBox: "0 0 24 12", "aria-hidden": "true" }, shapes);
    const bar = (name) => mark(box(name, 0.5, 1.5, 23, 9));
    return h("div.legend", [
      [bar("tl-model"), "model call"], [bar("tl-tool"), "tool call"], [bar("tl-confirmation"), "waits for a person"],
      [bar("tl-pause"), "paused"],
      [mark(path("tl-user", "M8 0l5 6l-5 6l-5 -6z")), "a message comes"],
      [bar("tl-queue"), "waits for its turn"], [bar("tl-steer"), "joins a running turn"],
      [mark(path("tl-cut", "M12 12V5"), path("tl-bad", "M12 0l4.5 7h-9z")), "it cuts a turn off"],
      [mark(box("tl-bad", 11, 0, 3, 12)), "ended before it was complete"],
      ...Object.entries(ENDS).map(([outcome, [glyph, tone]]) => [h("b", { class: tone }, glyph), kindName(outcome)]),
    ].map(([shape, words]) => h("span", shape, words)));
  }
}

function box(name, x, y, width, height, data) {
  return svg("rect", { class: name, x, y, width, height, data });
}

function path(name, d, data) {
  return svg("path", { class: name, d, data });
}

function label(name, x, y, words, anchor) {
  return svg("text", { class: name, x, y, "text-anchor": anchor }, words);
}

/** Return labels for a bar, the longest first. */
function namesOf(bar) {
  if (bar.kind === "model") return ["model"];
  if (!(bar.kind in WAITS)) return [shortened(bar.name, 32)];
  const of = WAITS[bar.kind];
  return bar.name ? [`${of}: ${shortened(bar.name, 40)}`, of] : [of];
}

/** Return the name of the error that a turn failed with, or the beginning of its detail. */
function failureOf(turn) {
  const detail = turn.detail ?? "";
  return /^\S+(?=:)/.exec(detail)?.[0] ?? shortened(detail, 24);
}

/** Arrange bars in rows, the model's first; bars that overlap in time get rows of their own. */
function packed(bars) {
  const rows = [bars.filter((bar) => bar.kind === "model")];
  const others = bars.filter((bar) => bar.kind !== "model").sort((one, other) => one.from_ms - other.from_ms);
  const ends = [Infinity];
  for (const bar of others) {
    let at = ends.findIndex((end) => end <= bar.from_ms);
    if (at < 0) {
      at = rows.push([]) - 1;
      ends.push(0);
    }
    rows[at].push(bar);
    ends[at] = bar.to_ms ?? Infinity;
  }
  return rows;
}

function patterns() {
  const hatch = (name, colour) => svg("pattern", { id: `tl-hatch-${name}`, width: 6, height: 6, patternUnits: "userSpaceOnUse", patternTransform: "rotate(45)" },
    svg("rect", { width: 6, height: 6, fill: "var(--surface)" }), svg("rect", { width: 2.5, height: 6, fill: `var(--${colour})` }));
  return svg("defs", {}, hatch("wait", "wait"), hatch("quiet", "line-strong"), hatch("idle", "line"), hatch("user", "user"));
}

function niceStep(ms) {
  const steps = [1, 2, 5, 10, 20, 50, 100, 200, 500, 1e3, 2e3, 5e3, 1e4, 15e3, 3e4, 6e4, 12e4, 3e5, 6e5, 18e5, 36e5];
  return steps.find((step) => step >= ms) ?? Math.ceil(ms / 36e5) * 36e5;
}

function shortTime(ms) {
  if (ms < 1_000) return `${ms} ms`;
  if (ms < 120_000) return `${Math.round(ms / 100) / 10} s`;
  return duration(ms).replace(/ 0 s$/, "");
}

function shortened(text, length) {
  const line = oneLine(text, 200);
  return line.length > length ? `${line.slice(0, length - 1)}…` : line;
}

/** Return the width of a label in the font that the browser uses. */
function widthOf(words) {
  if (!PEN.font.includes("600")) PEN.font = `600 11px ${getComputedStyle(document.body).fontFamily}`;
  return PEN.measureText(words).width;
}

function fitted(text, room) {
  let length = 80;
  while (length > 1 && widthOf(shortened(text, length)) > room) length -= 1;
  return shortened(text, length);
}

customElements.define("tk-timeline", Timeline);
