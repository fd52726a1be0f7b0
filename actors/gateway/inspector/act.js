// Actions: send, edit, interrupt, pause, answer, fork, undo, export, verify; and their outcomes.

import { fetched, placeOf, together } from "./api.js";
import { textView } from "./detail.js";
import { h, show } from "./dom.js";
import { asJson, kindName, number, oneLine, plural } from "./format.js";

const POLICIES = [
  ["", "the server's default"], ["queue", "queue: wait for its turn"], ["interrupt", "interrupt the running turn"],
  ["steer", "steer: join the running turn"], ["rollback", "roll back the running turn"], ["reject", "reject the message"],
];
const DID = {
  queue: "; it waits for the turn that runs", steer: "; it joins the turn that runs",
  interrupt: "; the turn that ran is interrupted", rollback: "; the turn that ran is rolled back",
};
let ids = 0;

export class Act extends HTMLElement {
  #log;
  #options;
  #state = null;
  #running = h("section.card", { "aria-label": "The turn that runs" });
  #waiting = h("section.card", { "aria-label": "Calls that wait", hidden: true });
  #editing = null;
  #send;
  #fork;
  #refused = h("div");

  constructor(log, options) {
    super();
    this.#log = log;
    this.#options = options;
    log.addEventListener("facts", () => this.isConnected && this.#read());
  }

  connectedCallback() {
    if (!this.firstChild) {
      this.tabIndex = 0;
      this.role = "region";
      this.ariaLabel = "Act";
      if (this.#options.isReadOnly) {
        this.append(card("This server only reads", h("p.quiet", "It reads the journal of another process. To send or to fork, open the inspector of that process.")));
      } else {
        this.append(this.#waiting, (this.#send = this.#sendCard()), this.#running, (this.#fork = this.#forkCard()));
      }
      this.append(this.#filesCard(), this.#refusedCard());
    }
    this.#read();
  }

  #read = together(0, () => Promise.all([this.#readState(), this.#readRefused()]));

  /** `edit`: the message to edit and resend, `from` its seq. `at`: the seq to fork at. */
  async go(options) {
    if (options.has("at") && this.#fork) {
      this.#fork.querySelector("[name=at]").value = options.get("at");
      this.#fork.querySelector("[name=id]").focus();
    }
    if (options.has("edit") && this.#send) {
      const { event } = await this.#log.whole(Number(options.get("from")));
      this.#edit(options.get("edit"), event.content);
    }
  }

  async #readState() {
    if (this.#options.isReadOnly) return;
    try {
      this.#state = await this.#log.ask("/state");
    } catch (problem) {
      if (problem.status === 0) return; // no answer: keep what is shown
      this.#state = null;
    }
    this.#showRunning();
    this.#showWaiting();
  }

  /** Return an element, and a function that runs a request and shows its outcome there. */
  #teller() {
    const line = h("p.outcome", { role: "status" });
    const run = async (act) => {
      line.className = "outcome";
      line.textContent = "…";
      try {
        line.textContent = await act();
        line.classList.add("good");
        return true;
      } catch (problem) {
        const fix = problem.facts?.errors?.map((each) => `${each.pointer ?? each.parameter ?? each.header ?? ""} ${each.detail}`).join("; ");
        line.textContent = [problem.facts?.title, problem.message, problem.facts?.seq && `seq ${problem.facts.seq}`, fix].filter(Boolean).join(": ");
        line.classList.add("bad");
        return false;
      }
    };
    return [line, run];
  }

  #post(part, body, headers) {
    return this.#log.ask(part, { method: "POST", body, headers });
  }

  #field(label, control) {
    control.id ||= `act${(ids += 1)}`;
    return h("div.field", h("label", { for: control.id }, label), control);
  }

  // --- messages ---

  #sendCard() {
    const [line, run] = this.#teller();
    const text = h("textarea", { name: "content", required: true, onkeydown: (event) => {
      if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) event.target.form.requestSubmit();
    } });
    const policy = h("select", { name: "policy" }, POLICIES.map(([value, name]) => h("option", { value }, name)));
    const note = h("p.small.quiet", { hidden: true });
    const submit = h("button.main", "Send");
    const form = h("form", {
      onsubmit: async (event) => {
        event.preventDefault();
        // Each message has one key, so pressing again after a lost reply does not send it twice.
        form.dataset.key ||= crypto.randomUUID();
        const isDone = await run(async () => {
          const body = { content: text.value };
          if (policy.value) body.on_overlap = policy.value;
          if (this.#editing) body.replaces = this.#editing;
          const sent = await this.#post("/messages?create=false", body, { "Idempotency-Key": form.dataset.key });
          const did = DID[sent.overlapped] ?? "";
          return `Durable at seq ${number(sent.seq)}${did}${sent.waits_for ? `; waits for ${sent.waits_for}` : ""}.`;
        });
        if (isDone) {
          text.value = "";
          this.#edit(null, "");
        }
      },
    }, this.#field("Message", text), this.#field("If a turn runs", policy), note,
    h("div.buttons", submit, h("button", { type: "button", name: "cancel", hidden: true, onclick: () => this.#edit(null, "") }, "Cancel the edit"),
      h("span.small.quiet", "Ctrl Enter")), line);
    text.addEventListener("input", () => delete form.dataset.key);
    return card("Send a message", form);
  }

  #edit(messageId, content) {
    this.#editing = messageId;
    const form = this.#send.querySelector("form");
    delete form.dataset.key;
    const [note, cancel] = [form.querySelector("p.small"), form.querySelector("[name=cancel]")];
    note.hidden = cancel.hidden = !messageId;
    note.textContent = messageId ? `In place of message ${messageId}: its turn and all later ones leave the view.` : "";
    this.#send.querySelector("h2").textContent = messageId ? "Edit and resend" : "Send a message";
    if (messageId) {
      const text = form.querySelector("textarea");
      text.value = content;
      text.focus();
    }
  }

  // --- the turn that runs ---

  #showRunning() {
    const running = this.#state?.running;
    const turn = running && this.#log.turn(running.turn_id);
    const [line, run] = this.#teller();
    const isPaused = this.#state?.waits_for === "resume";
    const button = (name, disabled, act) => h("button", { disabled, onclick: () => run(act) }, name);
    const change = async (part, words, body) =>
      ((await this.#post(part, body)).changed ? words : "Nothing changed: it was so already.");
    // The card is rebuilt for each event, but the outcome must stay.
    const kept = this.#running.querySelector(".outcome");
    show(this.#running,
      h("h2", turn ? `Turn ${turn.number} runs` : "No turn runs"),
      turn && h("p.quiet.ellipsis", oneLine(turn.messages[0]?.text)),
      h("div.buttons",
        button("Interrupt", !running, () => change("/interrupt", "Interrupted.", { turn_id: running.turn_id })),
        button("Pause", isPaused, () => change("/pause", "Paused.")),
        button("Resume", !isPaused, () => change("/resume", "Goes on.")),
        button("Undo the last turn", Boolean(running), async () => {
          const { messages } = await this.#post("/undo", { turn_id: this.#log.newestTurn?.turn_id });
          return `Took ${plural(messages.length, "message")} back.`;
        })),
      this.#state?.queued.length > 0 && h("ul", this.#state.queued.slice(0, 20).map((message) => h("li.ellipsis",
        h("span.chip.bare", "queued"), ` ${oneLine(message.content)}`))),
      line);
    if (kept?.textContent && kept.textContent !== "…") {
      line.textContent = kept.textContent;
      line.className = kept.className;
    }
  }

  async #showWaiting() {
    const awaiting = this.#state?.awaiting ?? [];
    this.#waiting.hidden = !awaiting.length;
    const wanted = awaiting.join(" ");
    if (this.#waiting.dataset.calls === wanted) return;
    this.#waiting.dataset.calls = wanted;
    if (!awaiting.length) return show(this.#waiting);
    const [line, run] = this.#teller();
    let calls;
    try {
      calls = await this.#readCalls(awaiting);
    } catch (problem) {
      if (this.#waiting.dataset.calls !== wanted) return;
      delete this.#waiting.dataset.calls; // to read them again
      return show(this.#waiting, h("p.outcome.bad", "The calls cannot be read: ", problem.message));
    }
    if (this.#waiting.dataset.calls !== wanted) return; // others wait by now, and are shown
    const answers = new Map();
    const rows = calls.map((call) => {
      const name = `call-${(ids += 1)}`;
      const reason = h("input", { placeholder: "reason", "aria-label": `Reason to reject ${call.tool_name}`, oninput: () => set(false) });
      const choice = (value, words) => h("label", h("input", { type: "radio", name, onchange: () => set(value) }), ` ${words}`);
      const yes = choice(true, "allow");
      const no = choice(false, "reject");
      const set = (value) => {
        answers.set(call.tool_call_id, value || reason.value || false);
        no.firstChild.checked = !value;
        submit.disabled = answers.size < awaiting.length;
      };
      return h("li.card", textView(`${call.tool_name}(${asJson(call.arguments)})`), h("div.inline", yes, no, reason));
    });
    const submit = h("button.main", { disabled: true, onclick: () => run(async () => {
      await this.#post("/answer", { answers: Object.fromEntries(answers) });
      return "Answered.";
    }) }, "Send the answers");
    show(this.#waiting, h("h2", `${plural(awaiting.length, "call")} ${awaiting.length === 1 ? "waits" : "wait"} for an answer`),
      h("ul", rows), h("div.buttons", submit), line);
  }

  /** A person who allows a call has to see all of it: one that was cut is read again. */
  async #readCalls(awaiting) {
    const view = await this.#log.ask("/view", { query: { brief: 2_000 } });
    const whole = async (offset) => (await this.#log.ask("/view", { query: { at: view.seq, offset, limit: 1 } })).events[0];
    const shown = view.events.map((event, n) => event.kind === "action" && awaiting.includes(event.tool_call_id) && (event.cut ? whole(n) : event));
    return Promise.all(shown.filter(Boolean));
  }

  // --- forks, files, refusals ---

  #forkCard() {
    const [line, run] = this.#teller();
    const id = h("input", { name: "id", required: true, maxlength: 256, value: `${this.#log.id}-fork` });
    const at = h("input", { name: "at", type: "number", min: 0, value: this.#log.head });
    const form = h("form", {
      onsubmit: (event) => {
        event.preventDefault();
        run(async () => {
          const made = await this.#post("/fork", { id: id.value, at: Number(at.value) });
          location.hash = placeOf(made.id);
          return `Made ${made.id}.`;
        });
      },
    }, this.#field("Its id", id), this.#field("At seq", at), h("div.buttons", h("button", "Fork here")), line);
    return card("Fork",
      h("p.small.quiet", "Starts another conversation with a copy of this log up to a seq. This conversation does not change."), form);
  }

  #filesCard() {
    const [line, run] = this.#teller();
    return card("Export and verify",
      h("p.small.quiet", "An export has each event byte for byte. Verify folds the whole log and compares the result with the state."),
      h("div.buttons",
        h("button", { onclick: () => run(async () => {
          const blob = await (await fetched(`${this.#log.path}/export`)).blob();
          const address = URL.createObjectURL(blob);
          h("a", { href: address, download: `${this.#log.id.replace(/[^\w.-]/g, "_")}.jsonl` }).click();
          setTimeout(() => URL.revokeObjectURL(address), 10_000);
          return `${number(blob.size)} bytes.`;
        }) }, "Export"),
        h("button", { onclick: () => run(async () => {
          const found = await this.#post("/verify");
          if (!found.is_sound) throw new Error(`Not sound: after ${number(found.events)} events, the state differs from the log.`);
          return `Sound: ${plural(found.events, "event")}.`;
        }) }, "Verify")),
      line);
  }

  #refusedCard() {
    return card("Refused events",
      h("p.small.quiet", "Events that admission kept out of the log, with the reason."), this.#refused);
  }

  async #readRefused() {
    try {
      const { rejections } = await this.#log.ask("/rejections");
      show(this.#refused, rejections.length ? h("ul", rejections.slice(-50).map((one) => h("li",
        h("b", kindName(one.violation)), ` ${one.reason}`)))
        : h("p.quiet", "None."));
    } catch (problem) {
      show(this.#refused, h("p.outcome.bad", problem.message));
    }
  }
}

function card(title, ...children) {
  return h("section.card", { "aria-label": title }, h("h2", title), children);
}

customElements.define("tk-act", Act);
