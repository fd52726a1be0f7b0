// The live list of conversations: by search, by the beginning of their ids, by status.

import { ROOT, ask, follow, pause, server, together } from "./api.js";
import { empty, h, show } from "./dom.js";
import { ago, number, oneLine, plural, wholeTime } from "./format.js";
import { Rows } from "./rows.js";

const PAGE = 500;
const POLL_MS = 2_000;
const STATUSES = [
  ["", "any status"],
  ["waiting_for_confirmation", "waits for a confirmation"],
  ...["running", "paused", "error", "stuck", "finished", "idle"].map((status) => [status, status]),
];

export class ConversationList extends HTMLElement {
  #found = []; // rows, in their order
  #cursor = null;
  #isWhole = false;
  #isReading = false;
  #selected = null;
  #searches = false;
  #isLive = false;
  #isReadOnly = false;
  #problem = null;
  #reads = new AbortController();
  #rows = new Rows({ height: 56, label: "Conversations", render: (index) => this.#render(index) });
  #input = h("input", { type: "search", id: "search", autocomplete: "off", spellcheck: "false", oninput: () => this.#read(true, 180) });
  #status = h("select", { "aria-label": "Status", onchange: () => this.#read(true) },
    STATUSES.map(([value, words]) => h("option", { value }, words)));
  #count = h("span");
  #soon = together(200, () => this.#look());
  #later = together(POLL_MS, () => this.#soon());

  connectedCallback() {
    if (this.firstChild) return;
    this.role = "region";
    this.ariaLabel = "Conversations";
    this.append(
      h("h1.hidden-text", "Conversations"),
      h("div.list-search", this.#input, this.#status),
      h("div.list-facts", { role: "status" }, this.#count),
      this.#rows,
    );
    this.#rows.addEventListener("choose", (event) => {
      if (event.detail.isOpened) this.dispatchEvent(new CustomEvent("open", { detail: this.#found[event.detail.index] }));
    });
    this.#rows.addEventListener("range", (event) => {
      if (!this.#problem && event.detail[1] > this.#found.length - PAGE / 2) this.#read(false);
    });
  }

  /** Begin. The arguments are the parameters of the search and changes routes; null: no such route. */
  begin(search, changes, isReadOnly) {
    this.#isReadOnly = isReadOnly;
    this.#nameSearch(search !== null);
    this.#read(true);
    if (this.#isLive) return;
    this.#isLive = true;
    if (changes) this.#follow();
    else this.#poll();
  }

  #nameSearch(searches) {
    this.#searches = searches;
    this.#input.placeholder = searches ? "Words or ids…" : "Ids…";
    this.#input.ariaLabel = searches ? "Words, or ids that begin with" : "Ids that begin with";
  }

  select(id) {
    this.#selected = id;
    this.#rows.active = id === null ? -1 : this.#found.findIndex((row) => row.id === id);
  }

  focusSearch() {
    this.#input.focus();
    this.#input.select();
  }

  get #query() {
    const text = this.#input.value.trim();
    const status = this.#status.value;
    // What is found by the beginning of its id comes in the order of ids.
    return { prefix: text, status, order: text ? "id" : "activity" };
  }

  /** Read the rows anew, or the next ones; not before nothing was typed for these milliseconds. */
  async #read(isNew, quietMs = 0) {
    if (isNew) {
      this.#reads.abort();
      this.#reads = new AbortController();
      this.#cursor = null;
      this.#isWhole = false;
    } else if (this.#isReading || this.#isWhole) {
      return;
    }
    const { signal } = this.#reads;
    this.#isReading = true;
    if (quietMs) await pause(quietMs, signal);
    if (signal.aborted) return;
    const query = this.#query;
    try {
      const page = await ask("conversations", {
        query: { ...query, limit: PAGE, cursor: this.#cursor }, signal,
      });
      if (isNew) {
        this.#found = [];
        this.#rows.scrollTop = 0;
      }
      const known = new Set(this.#found.map((row) => row.isHit || row.id));
      this.#found.push(...page.conversations.filter((row) => !known.has(row.id)));
      this.#cursor = page.cursor;
      this.#isWhole = page.cursor === null;
      this.#problem = null;
      if (isNew && this.#searches && query.prefix) this.#found.push(...await this.#hits(query, signal));
    } catch (problem) {
      if (problem.name === "AbortError") return;
      this.#problem = problem;
      if (problem.status !== 401) this.#later(); // a token begins anew
    } finally {
      if (!signal.aborted) this.#isReading = false;
    }
    this.#show();
    // A page may stop early, with more rows behind it.
    if (!this.#isWhole && !this.#problem && this.#found.length < PAGE) this.#read(false);
  }

  /** Return the messages with these words, as rows of the list. */
  async #hits({ prefix: words, status }, signal) {
    const hits = [];
    try {
      for (let cursor; cursor !== null && hits.length < 100;) {
        const page = await ask("search", { query: { words, status, limit: 100, cursor }, signal });
        hits.push(...page.hits);
        cursor = page.cursor;
      }
    } catch (problem) {
      if (problem.name === "AbortError") throw problem;
      if (problem.kind === "search-is-off") this.#nameSearch(false);
    }
    return hits.map((hit) => ({
      id: hit.conversation_id, seq: hit.seq, head: hit.seq, title: "", labels: {}, waiting_calls: [], status: "",
      last_by: hit.by, last_message: hit.snippet, active_at: hit.said_at, isHit: true,
    }));
  }

  async #poll() {
    for (;;) {
      await pause(POLL_MS);
      if (!document.hidden && this.isConnected) this.#soon();
    }
  }

  async #follow() {
    server.addEventListener("reachable", this.#soon);
    try {
      for await (const { event, data } of follow("changes", { signal: new AbortController().signal })) {
        if (event === "row") this.#dropIfUnfit(data);
        if (event !== "end") this.#soon();
      }
    } catch {
      this.#poll(); // not for this token
    }
  }

  async #look() {
    if (this.#isReading) return this.#soon();
    if (this.#problem) return this.#read(!this.#cursor);
    if (this.#input.value) return;
    // A new search ends this look: its rows are of the other.
    const { signal } = this.#reads;
    try {
      this.#merge(await ask("conversations", { query: { ...this.#query, limit: 100 }, signal }));
    } catch {
      // The notice at the top tells it.
    }
  }

  #dropIfUnfit({ id, status }) {
    if (["", status].includes(this.#status.value) || !this.#found.some((row) => row.id === id)) return;
    this.#found = this.#found.filter((row) => row.id !== id);
    this.#show();
  }

  /** Put the newest rows on top, each in its new state; the other rows stay as they are. */
  #merge({ conversations: newest, cursor }) {
    const fresh = new Map(newest.map((row) => [row.id, row]));
    const isSame = newest.every((row, index) =>
      ["id", "head", "status", "title"].every((fact) => this.#found[index]?.[fact] === row[fact]));
    // A missing row is known to be gone only if the newest rows are all rows.
    const rest = cursor === null ? this.#found.filter((row) => fresh.has(row.id)) : this.#found;
    if (isSame && rest.length === this.#found.length) return;
    // A person who reads further down keeps their place.
    this.#found = this.#rows.scrollTop > 56
      ? rest.map((row) => fresh.get(row.id) ?? row) : [...newest, ...rest.filter((row) => !fresh.has(row.id))];
    this.#show();
    this.select(this.#selected);
  }

  #show() {
    const count = this.#found.length;
    const messages = this.#found.filter((row) => row.isHit).length;
    const others = count - messages;
    const waiting = this.#found.filter((row) => row.waits_for).length;
    show(this.#count, this.#problem ? String(this.#problem.message) : [
      this.#isWhole ? (others || !messages) && plural(others, "conversation") : `${number(others)}+ conversations`,
      messages && plural(messages, "message"),
      waiting && `${number(waiting)} wait${waiting === 1 ? "s" : ""} for a person`,
    ].filter(Boolean).join(" · "));
    this.querySelector(".empty")?.remove();
    this.#rows.hidden = count === 0;
    if (!count) this.append(this.#empty());
    this.#rows.count = count;
    this.#rows.refresh();
    if (this.#selected !== null) this.select(this.#selected);
  }

  #empty() {
    if (this.#problem) return empty("The list cannot be read", h("p", this.#problem.message));
    if (this.#input.value || this.#status.value) {
      return empty("Nothing fits", h("p", "No conversation fits the search and the status."));
    }
    if (this.#isReadOnly) {
      return empty("No conversation yet", h("p", "One appears here once another process has written it."));
    }
    return empty("No conversation yet", h("p", "Send a message, and it appears here."),
      h("pre", `curl -s ${ROOT}conversations/alice/messages \\\n  -H 'Content-Type: application/json' \\\n  -d '{"content": "hello"}'`));
  }

  #render(index) {
    const row = this.#found[index];
    const labels = Object.entries(row.labels).map(([name, value]) => (value ? `${name}: ${value}` : name));
    const flags = [];
    if (row.waits_for) flags.push(h("span.chip.wait", row.waits_for === "resume" ? "paused" : "confirm"));
    else if (row.status && !["idle", "finished"].includes(row.status)) flags.push(h("span", { class: `chip ${row.status}` }, row.status));
    if (row.queued) flags.push(h("span.chip.bare", `${row.queued} queued`));
    if (row.forked_from) flags.push(h("span.chip.bare", "fork"));
    return {
      data: { id: row.id },
      content: h("div.list-row",
        h("span.name.ellipsis", h("bdi", row.title || row.id), row.title && h("span.id", row.id)),
        h("span.time", { title: wholeTime(row.active_at) }, ago(row.active_at)),
        h("span.last.ellipsis", row.waiting_calls.length
          ? `waits: ${row.waiting_calls.join(", ")}` : `${row.last_by === "user" ? "› " : ""}${oneLine(row.last_message)}`),
        h("span.labels.wide.ellipsis", labels.join(", ")),
        h("span.flags", flags),
        h("span.head.wide.mono", `seq ${number(row.head)}`),
      ),
    };
  }
}

customElements.define("tk-list", ConversationList);
