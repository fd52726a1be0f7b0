// One event in full: its facts, its JSON, and links to actions.

import { placeOf } from "./api.js";
import { h, show } from "./dom.js";
import { asJson, kindName, number, wholeTime, words } from "./format.js";

const SHOWN = 20_000;

export class Detail extends HTMLElement {
  #log;
  #seq;
  #options;

  constructor(log, seq, options) {
    super();
    this.#log = log;
    this.#seq = seq;
    this.#options = options;
  }

  async connectedCallback() {
    this.role = "region";
    this.ariaLabel = `Event ${this.#seq}`;
    const body = h("div.detail-body", { tabindex: 0 }, h("p.quiet", "Reading…"));
    this.append(
      h("div.detail-head",
        h("h2", `seq ${number(this.#seq)} `, h("span.quiet", kindName(this.#log.kindOf(this.#seq) ?? ""))),
        h("button.plain", { "aria-label": "Close", onclick: () => this.dispatchEvent(new Event("close")) }, "✕")),
      body,
    );
    try {
      this.#show(body, await this.#log.whole(this.#seq));
    } catch (problem) {
      show(body, h("p.outcome.bad", problem.message));
    }
  }

  #show(body, row) {
    if (row.damaged) {
      show(body, h("p.outcome.bad", `This record cannot be read: ${row.damaged}.`),
        h("p.quiet", "turnkeeper verify says more, and turnkeeper repair may mend the file."));
      return;
    }
    const { event } = row;
    const turn = this.#log.turn(event.turn_id);
    const left = this.#log.left.get(this.#seq);
    const act = placeOf(this.#log.id, "act");
    const facts = [
      ["time", wholeTime(event.timestamp)],
      ["turn", turn ? `${turn.number}, ${turn.outcome || "runs"}` : null],
      ["in short", words(event)],
      ["left the view", left ? `${left.how} at seq ${number(left.at)}` : null],
      ["id", h("code", event.id)],
    ];
    show(body,
      h("dl.facts", facts.filter(([, value]) => value).map(([name, value]) => [h("dt", name), h("dd", value)])),
      h("div.buttons",
        h("a", { href: placeOf(this.#log.id, "travel", this.#seq) }, "Travel here"),
        !this.#options.isReadOnly && h("a", { href: `${act}?at=${this.#seq}` }, "Fork here"),
        !this.#options.isReadOnly && event.kind === "user_message" && event.message_id
          && h("a", { href: `${act}?edit=${encodeURIComponent(event.message_id)}&from=${this.#seq}` }, "Edit and resend"),
      ),
      jsonView(event),
    );
  }
}

export const jsonView = (value) => textView(asJson(value, 2));

/** Return a text in an element; a long one shows its beginning, and more on demand. */
export function textView(text) {
  const pre = h("pre.json", text.slice(0, SHOWN));
  if (text.length <= SHOWN) return pre;
  let shown = SHOWN;
  const more = h("button", {
    onclick: () => {
      pre.append(text.slice(shown, shown + SHOWN));
      shown += SHOWN;
      say();
    },
  });
  const say = () => {
    more.hidden = shown >= text.length;
    more.textContent = `Show more (${number(Math.min(shown, text.length))} of ${number(text.length)} characters)`;
  };
  say();
  return h("div", pre, more);
}

customElements.define("tk-detail", Detail);
