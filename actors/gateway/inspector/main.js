// The inspector: its address, its parts, its keys.
//
//   #/                                      the list
//   #/c/<id>/log|travel|timeline|act        a conversation; ?seq= names a place in it
//   #/runtime                               the actors

import { ask, fromPath, parametersOf, placeOf, server, setToken, takeTokenFromAddress } from "./api.js";
import { h, show } from "./dom.js";
import { Conversation } from "./conversation.js";
import { ConversationList } from "./list.js";
import { Runtime } from "./runtime.js";

const KEYS = [
  ["/", "search conversations"],
  ["g l", "the list"],
  ["g r", "the runtime"],
  ["1 2 3 4", "log, time travel, timeline, act"],
  ["j k ↑ ↓", "next and previous row"],
  ["Enter", "open the row"],
  ["[ ]", "in time travel: one event back or forward"],
  ["{ }", "in time travel: one turn back or forward"],
  ["t", "travel to the event that is selected"],
  ["Esc", "close what is open"],
  ["?", "these keys"],
];

class Inspector extends HTMLElement {
  #list = new ConversationList();
  #main = h("main", { id: "main", tabindex: -1 });
  #notices = h("div.away", { role: "status" });
  #chips = h("div.rest");
  #links = { list: h("a", { href: "#/" }, "Conversations"), runtime: h("a", { href: "#/runtime" }, "Runtime") };
  #page = null;
  #self = null;

  connectedCallback() {
    this.append(
      h("header.top",
        h("a.brand", { href: "#/", "aria-label": "turnkeeper inspector" }, h("img", { src: "icon.svg", alt: "" }), h("span", "turnkeeper inspector")),
        h("nav", { "aria-label": "Pages" }, this.#links.list, this.#links.runtime),
        this.#chips,
      ),
      this.#notices,
      this.#main,
    );
    this.#main.append(this.#list);
    takeTokenFromAddress();
    server.addEventListener("unauthorized", ({ detail }) => this.#askToken(detail));
    server.addEventListener("reachable", () => this.#showNotices());
    addEventListener("hashchange", () => {
      if (takeTokenFromAddress()) this.#begin();
      else this.#route();
    });
    addEventListener("keydown", (event) => this.#key(event));
    this.#list.addEventListener("open", (event) => {
      const { id, seq } = event.detail;
      location.hash = placeOf(id, "log", seq);
    });
    this.#begin();
  }

  async #begin() {
    try {
      this.#self = await ask("self");
    } catch (problem) {
      this.#self = null;
      if (problem.status === 401) return;
    }
    this.querySelector("dialog:has(#token)")?.close();
    show(this.#chips,
      this.#self?.is_read_only && h("span.chip.bare", "read-only"),
      this.#self?.principal && h("span.chip.bare", this.#self.principal),
      h("button.plain", { "aria-label": "Keys", onclick: () => this.#showKeys() }, h("kbd", "?")));
    this.#list.begin(await parametersOf("/v1/search"), await parametersOf("/v1/changes"), Boolean(this.#self?.is_read_only));
    this.#put(null);
    this.#route();
  }

  #route() {
    const [path, query] = location.hash.replace(/^#\/?/, "").split("?");
    const [page, id, tab] = path.split("/");
    const options = new URLSearchParams(query);
    const name = page === "c" && id ? "conversation" : page === "runtime" ? "runtime" : "list";
    this.#main.dataset.page = name;
    for (const [each, link] of Object.entries(this.#links)) {
      const isHere = each === name || (each === "list" && name === "conversation");
      link.ariaCurrent = isHere ? "page" : null;
    }
    if (name === "conversation") {
      const conversation = fromPath(id);
      if (!(this.#page instanceof Conversation) || this.#page.conversationId !== conversation) {
        this.#put(new Conversation(conversation, { isReadOnly: Boolean(this.#self?.is_read_only) }));
      }
      this.#page.go(tab || "log", options);
      this.#list.select(conversation);
      document.title = `${conversation} · turnkeeper inspector`;
    } else {
      if (name === "runtime") {
        if (!(this.#page instanceof Runtime)) this.#put(new Runtime(this.#self));
      } else {
        this.#put(null);
        this.#list.select(null);
      }
      document.title = "turnkeeper inspector";
    }
  }

  #put(page) {
    this.#page?.remove();
    this.#page = page;
    if (page) this.#main.append(page);
  }

  #showNotices() {
    show(this.#notices, !server.isReachable && h("p.notice.bad",
      "The server does not answer. This page keeps what it shows, and goes on when the server is back."));
  }

  #askToken(hadToken) {
    show(this.#chips, h("button", { onclick: () => this.#askToken() }, "Enter a token"));
    const input = h("input", { id: "token", type: "password", autocomplete: "off", required: true });
    this.#showDialog(hadToken ? "This token is not accepted" : "This server asks for a token", () => {
      setToken(input.value.trim());
      this.#begin();
    },
    h("p.quiet", "The token stays in this page's memory and is sent in a header. A reload forgets it."),
    h("div.field", h("label", { for: "token" }, "Token"), input),
    h("div.buttons", h("button.main", "Open")));
  }

  #showKeys() {
    this.#showDialog("Keys", null,
      h("dl.keys", KEYS.map(([keys, does]) => [
        h("dt", keys.split(" ").map((key) => h("kbd", key))), h("dd", does),
      ])),
      h("div.buttons", h("button", { autofocus: true }, "Close")));
  }

  /** Open a dialog, unless one is open; a button in it closes it. */
  #showDialog(title, onsubmit, ...children) {
    if (document.querySelector("dialog[open]")) return;
    const dialog = h("dialog", { "aria-labelledby": "dialog-title", onclose: () => dialog.remove() },
      h("form", { method: "dialog", onsubmit }, h("h1", { id: "dialog-title" }, title), children));
    this.append(dialog);
    dialog.showModal();
  }

  #pending = "";

  #key(event) {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.target.closest?.("input:not([type=range]), textarea, select, dialog")) {
      if (event.key === "Escape" && !event.target.closest("dialog")) event.target.blur();
      return;
    }
    const keys = this.#pending + event.key;
    this.#pending = "";
    if (event.key === "?") this.#showKeys();
    else if (event.key === "g") this.#pending = "g";
    else if (keys === "gl") location.hash = "#/";
    else if (keys === "gr") location.hash = "#/runtime";
    else if (event.key === "/") {
      if (this.#page && !this.#list.checkVisibility()) {
        location.hash = "#/";
        setTimeout(() => this.#list.focusSearch());
      } else this.#list.focusSearch(); // the next key is the field's
    } else if (!this.#page?.key?.(event)) return;
    event.preventDefault();
  }
}

customElements.define("tk-inspector", Inspector);
