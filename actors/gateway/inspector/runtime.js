// The actors, live: what waits for them, what they have handled, which messages reached none.

import { ask, pause, placeOf, toPath } from "./api.js";
import { empty, h, show } from "./dom.js";
import { duration, number, plural } from "./format.js";
import { Rows } from "./rows.js";

const EVERY_MS = 1_000;

export class Runtime extends HTMLElement {
  #self;
  #actors = []; // [actor, depth in the tree, path], parents before children
  #leftOut = 0; // how many more there are, the idle ones before others
  #before = new Map(); // path → handled, at the look before
  #lookedAt = 0;
  #rates = new Map();
  #rows = new Rows({ height: 28, label: "Actors", render: (index) => this.#render(index) });
  #side = h("aside", { "aria-label": "Numbers", tabindex: 0 });
  #sum = h("span.rest");
  #end;
  #chosen;
  #rejections = h("section", { "aria-label": "Rejections" });

  constructor(self) {
    super();
    this.#self = self;
    this.#rows.addEventListener("choose", ({ detail }) => this.#choose(detail.index, detail.isOpened));
  }

  connectedCallback() {
    const titles = ["actor", "state", "waiting", "oldest", "handled", "a second", "restarts"];
    this.append(
      h("section.tree", { "aria-label": "Actors" },
        h("div.pane-head", h("h1", "Actors"), this.#sum),
        h("div.tree-row.tree-titles", { "aria-hidden": "true" }, titles.map((title) => h("span", title))),
        this.#rows),
      this.#side,
    );
    this.#end = new AbortController();
    this.#look(this.#end.signal);
  }

  disconnectedCallback() {
    this.#end.abort();
  }

  async #look(signal) {
    while (!signal.aborted) {
      try {
        if (!document.hidden) {
          const [tree, letters] = await Promise.all([ask("runtime/tree", { signal }), ask("dead-letters", { signal })]);
          this.#take(tree);
          this.#show(tree, letters);
        }
      } catch (problem) {
        if (signal.aborted) return;
        if (problem.status === 403 || problem.status === 401) {
          show(this, empty("This token may not see the actors", h("p", "It needs the scope inspector.")));
          return;
        }
      }
      await pause(EVERY_MS, signal);
    }
  }

  #take(tree) {
    const now = performance.now();
    const passed = (now - this.#lookedAt) / 1_000;
    const handled = new Map();
    this.#actors = [];
    this.#leftOut = tree.left_out;
    const walk = (actors, depth, above) => {
      for (const actor of actors) {
        const path = `${above} ${actor.name}`;
        this.#actors.push([actor, depth, path]);
        handled.set(path, actor.handled);
        const before = this.#before.get(path);
        this.#rates.set(path, Math.max(0, actor.handled - (before ?? actor.handled)) / passed);
        this.#leftOut += actor.left_out;
        walk(actor.children, depth + 1, path);
      }
    };
    walk(tree.actors, 0, "");
    this.#before = handled;
    this.#lookedAt = now;
  }

  #show(tree, letters) {
    const waiting = this.#actors.reduce((sum, [actor]) => sum + actor.mailbox_depth, 0);
    const all = this.#leftOut ? ` of ${number(this.#actors.length + this.#leftOut)}, the busy ones first` : "";
    this.#sum.textContent = `${plural(this.#actors.length, "actor")}${all}, ${plural(waiting, "message")} waiting`;
    this.#rows.count = this.#actors.length;
    this.#rows.active = this.#actors.findIndex(([, , path]) => path === this.#chosen);
    this.#rows.refresh();
    const reasons = Object.entries(letters.by_reason);
    show(this.#side,
      this.#self?.is_read_only && h("p.quiet", "This server only reads a journal: the actors of its conversations are in the process that writes it."),
      h("section", h("h2", "Dead letters"), letters.count
        ? h("table", h("tbody", reasons.map(([reason, count]) => h("tr", h("td", reason), h("td", number(count))))))
        : h("p.quiet", "None: every message reached its actor.")),
      tree.handling_times.length > 0 && h("section", h("h2", "How long handlers take"), h("table",
        h("thead", h("tr", ["actor", "handled", "half", "99 %"].map((title) => h("th", { scope: "col" }, title)))),
        h("tbody", tree.handling_times.map((each) => h("tr", h("td", each.kind), h("td", number(each.count)),
          h("td", duration(each.p50_s * 1_000)), h("td", duration(each.p99_s * 1_000))))))),
      this.#rejections);
  }

  async #choose(index, isOpened) {
    const [actor, , path] = this.#actors[index];
    const id = conversationOf(actor);
    this.#chosen = path;
    if (id === null) {
      show(this.#rejections);
      return;
    }
    const link = h("a", { href: placeOf(id) }, id);
    show(this.#rejections, h("h2", "Rejections of ", link), h("p.quiet", "…"));
    try {
      const { rejections } = await ask(`conversations/${toPath(id)}/rejections`);
      if (this.#chosen !== path) return;
      show(this.#rejections, h("h2", "Rejections of ", link), rejections.length
        ? h("ul", rejections.slice(-20).map((one) => h("li", `${one.violation}: ${one.reason}`)))
        : h("p.quiet", "None."));
    } catch (problem) {
      show(this.#rejections, h("h2", id), h("p.outcome.bad", problem.message));
    }
    if (isOpened) link.focus();
  }

  #render(index) {
    const [actor, depth, path] = this.#actors[index];
    return {
      content: h("div.tree-row", { class: [actor.mailbox_depth > 0 && "is-busy"] },
        h("span.ellipsis", `${"\u2003".repeat(depth)}${actor.name} `, h("span.quiet", actor.kind)),
        h("span.ellipsis", actor.effects.length ? `${actor.state} · ${actor.effects.join(", ")}` : actor.state),
        h("span.depth", number(actor.mailbox_depth)),
        h("span", actor.mailbox_depth ? duration(actor.oldest_s * 1_000) : "–"),
        h("span", number(actor.handled)),
        h("span", (this.#rates.get(path) ?? 0).toFixed(1)),
        h("span", number(actor.restarts))),
    };
  }
}

function conversationOf(actor) {
  return actor.kind === "ConversationActor" && actor.name.includes("/") ? actor.name.slice(actor.name.indexOf("/") + 1) : null;
}

customElements.define("tk-runtime", Runtime);
