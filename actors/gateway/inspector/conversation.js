// A conversation: its facts, and its views as tabs.

import { empty, h, reading, show } from "./dom.js";
import { kindName, number, plural } from "./format.js";
import { Log } from "./log.js";
import { LogView } from "./logview.js";
import { Travel } from "./travel.js";
import { Timeline } from "./timeline.js";
import { Act } from "./act.js";
import { placeOf } from "./api.js";

const TABS = [
  ["log", "Log", LogView],
  ["travel", "Time travel", Travel],
  ["timeline", "Timeline", Timeline],
  ["act", "Act", Act],
];

export class Conversation extends HTMLElement {
  #log;
  #options;
  #head = h("header.conversation-head");
  #notices = h("div", { role: "status" });
  #tabs = h("nav.tabs", { "aria-label": "Views of the conversation" });
  #tab = h("div.tab");
  #views = new Map();
  #wanted = ["log", new URLSearchParams()];
  #isOpen = false;

  constructor(id, options) {
    super();
    this.conversationId = id;
    this.#options = options;
    this.#log = new Log(id);
  }

  connectedCallback() {
    this.append(this.#head, this.#notices, this.#tabs, this.#tab);
    this.#log.addEventListener("facts", () => this.#showHead());
    this.#log.addEventListener("outline", () => this.#showHead());
    this.#open();
  }

  disconnectedCallback() {
    this.#log.close();
  }

  async #open() {
    show(this.#head, h("h1", this.conversationId));
    show(this.#tab, reading());
    try {
      await this.#log.open();
    } catch (problem) {
      if (problem.name === "AbortError") return;
      if (problem.status === 0) {
        setTimeout(() => this.isConnected && this.#open(), 1_000);
        return;
      }
      show(this.#tab, empty("The conversation cannot be opened", h("p", problem.message)));
      return;
    }
    this.#isOpen = true;
    this.go(...this.#wanted);
  }

  /** Show a tab; `seq` among the options names a place in the log. */
  go(tab, options) {
    this.#wanted = [tab, options];
    show(this.#tabs, TABS.map(([name, words]) => h("a", {
      href: placeOf(this.conversationId, name), "aria-current": name === tab ? "page" : null,
    }, words)));
    if (!this.#isOpen) return;
    let view = this.#views.get(tab);
    if (!view) {
      const View = TABS.find(([name]) => name === tab)?.[2] ?? LogView;
      view = new View(this.#log, this.#options);
      view.addEventListener("inspect", (event) => this.#inspect(event.detail));
      this.#views.set(tab, view);
    }
    if (view.parentNode !== this.#tab) {
      this.#closeDetail();
      show(this.#tab, view);
    }
    view.go?.(options);
  }

  #showHead() {
    const facts = this.#log.facts ?? {};
    const problem = facts.problem;
    const parent = this.#log.forkedFrom;
    show(this.#head,
      h("h1", facts.title || this.conversationId),
      h("div.about",
        facts.title && h("span.mono", this.conversationId),
        facts.status && h("span", { class: `chip ${facts.status}` }, kindName(facts.status)),
        h("span.mono", `seq ${number(this.#log.head)}`),
        h("span", plural(this.#log.turns.length, "turn")),
        facts.queued > 0 && h("span", `${facts.queued} queued`),
        facts.owner && h("span", `of ${facts.owner}`),
        Object.entries(facts.labels ?? {}).map(([name, value]) => h("span.chip.bare", value ? `${name}: ${value}` : name)),
        parent?.id && h("span", "fork of ", h("a", { href: placeOf(parent.id, "log", parent.seq) }, `${parent.id} at ${parent.seq}`)),
      ));
    const damaged = [...this.#log.damaged.keys()];
    const why = this.#log.endedBy;
    show(this.#notices,
      damaged.length > 0 && h("p.notice.bad",
        `The log is damaged at seq ${damaged.slice(0, 5).map(number).join(", ")}${damaged.length > 5 ? "…" : ""}. All other events are shown; states from there on cannot be computed.`),
      problem && !damaged.length && h("p.notice.bad", problem.message),
      why && why !== "corrupt-log" && h("p.notice",
        why === "gone" || why === "conversation-deleted" ? "This conversation was deleted. The page shows what it had read before." : `This page is no longer live: ${why}.`));
  }

  #inspect(detail) {
    this.#closeDetail();
    if (!detail) return;
    this.#tab.classList.add("has-detail");
    this.#tab.append(detail);
    detail.addEventListener("close", () => this.#closeDetail());
  }

  #closeDetail() {
    this.#tab.classList.remove("has-detail");
    this.#tab.querySelector("tk-detail")?.remove();
  }

  key(event) {
    const at = "1234".indexOf(event.key);
    if (at >= 0) {
      location.hash = placeOf(this.conversationId, TABS[at][0]);
      return true;
    }
    if (event.key === "Escape" && this.#tab.classList.contains("has-detail")) {
      this.#closeDetail();
      this.#tab.querySelector("tk-rows")?.focus();
      return true;
    }
    return this.#views.get(this.#wanted[0])?.key?.(event) ?? false;
  }
}

customElements.define("tk-conversation", Conversation);
