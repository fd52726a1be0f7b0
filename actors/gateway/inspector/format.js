// Numbers, times and events in a few words.

const NUMBER = new Intl.NumberFormat("en");
const CLOCK = new Intl.DateTimeFormat("en-GB", {
  hour: "2-digit", minute: "2-digit", second: "2-digit", fractionalSecondDigits: 3,
});
const DAY = new Intl.DateTimeFormat("en-GB", { day: "numeric", month: "short", year: "numeric" });
const WHOLE = new Intl.DateTimeFormat("en-GB", { dateStyle: "medium", timeStyle: "medium" });

export const number = (value) => NUMBER.format(value);
export const clock = (at) => CLOCK.format(new Date(at));
export const wholeTime = (at) => WHOLE.format(new Date(at));

export function plural(count, noun) {
  return `${number(count)} ${noun}${count === 1 ? "" : "s"}`;
}

export function duration(ms) {
  if (ms < 1_000) return `${ms < 10 ? ms.toFixed(1) : Math.round(ms)} ms`;
  if (ms < 60_000) return `${(ms / 1_000).toFixed(ms < 10_000 ? 2 : 1)} s`;
  const minutes = Math.floor(ms / 60_000);
  if (minutes < 60) return `${minutes} min ${Math.floor((ms % 60_000) / 1_000)} s`;
  const hours = Math.floor(minutes / 60);
  if (hours < 48) return `${hours} h ${minutes % 60} min`;
  return `${Math.floor(hours / 24)} days`;
}

export function ago(at) {
  const seconds = (Date.now() - new Date(at)) / 1_000;
  if (seconds < 60) return "just now";
  if (seconds < 3_600) return `${Math.floor(seconds / 60)} min ago`;
  if (seconds < 86_400) return `${Math.floor(seconds / 3_600)} h ago`;
  if (seconds < 7 * 86_400) return `${Math.floor(seconds / 86_400)} d ago`;
  return DAY.format(new Date(at));
}

/** Return a text as one line; a longer one ends with an ellipsis. */
export function oneLine(text, length = 240) {
  const whole = String(text ?? "");
  const line = whole.slice(0, length).replace(/[\ud800-\udbff]$/, "").replace(/\s+/g, " ").trim();
  return whole.length > length ? `${line}…` : line;
}

// As they are, these would show the text around them in another order.
const ORDERING = /[\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]/g;

/** Return a value as JSON, with an escape for each character that only orders the text around it. */
export function asJson(value, indent) {
  return JSON.stringify(value, null, indent)
    .replace(ORDERING, (letter) => `\\u${letter.charCodeAt(0).toString(16).padStart(4, "0")}`);
}

export function plainText(content) {
  if (typeof content === "string") return content;
  if (!Array.isArray(content)) return content === null || content === undefined ? "" : asJson(content, 1);
  return content.map((part) => part.text ?? part.thinking ?? asJson(part, 1)).join("\n");
}

const call = (event) => `${event.tool_name}(${oneLine(asJson(event.arguments ?? {}), 160)})`;

const said = (event) => oneLine(event.content);

const WORDS = {
  __proto__: null, // an unknown kind may have any name, "constructor" too
  system_prompt: said,
  user_message: said,
  agent_message: (event) => oneLine(event.content) + (event.interrupted ? " (cut off)" : ""),
  action: call,
  observation: said,
  agent_error: said,
  user_reject: (event) => oneLine(event.content) || "rejected",
  condensation_summary: said,
  condensation: (event) =>
    `forgets ${plural(event.cut?.forgotten_event_ids ?? event.forgotten_event_ids.length, "event")}` +
    (event.summary ? `: ${oneLine(event.summary)}` : ""),
  retraction: (event) =>
    `takes ${plural(event.cut?.retracted_event_ids ?? event.retracted_event_ids.length, "event")} back`,
  message_queued: (event) => `${event.steers ? "steers" : "waits"}: ${oneLine(event.content)}`,
  message_withdrawn: (event) => (event.replaced_by ? `replaced by ${event.replaced_by}` : event.message_id),
  turn_ended: (event) => event.outcome.replace("_", " ") + (event.detail ? `: ${oneLine(event.detail)}` : ""),
  step_finished: (event) => stepWords(event, "answered"),
  step_unfinished: (event) => stepWords(event, event.outcome),
  confirmation_requested: (event) => plural(event.tool_call_ids.length, "call"),
  confirmation_given: (event) =>
    event.confirmed ? (event.rejected.length ? `all but ${event.rejected.length} may run` : "may run") : "rejected",
  forked_from: (event) => `${event.conversation_id ?? "another's conversation"} at ${event.seq}`,
  conversation_changed: ({ title, owner, labels }) =>
    [title, owner && `of ${owner}`, ...Object.keys(labels ?? {})].filter(Boolean).join(", "),
  conversation_error: (event) => `${event.error} ${oneLine(event.detail)}`,
  status_changed: (event) => event.status,
  task_list_updated: (event) => `${event.tasks.filter((task) => task.done).length} of ${event.tasks.length} done`,
};

function stepWords(event, outcome) {
  const { input_tokens: input, output_tokens: output, latency_s: latency } = event.usage ?? {};
  const parts = [event.usage?.model ?? event.request?.model, outcome];
  if (input || output) parts.push(`${number(input)} in, ${number(output)} out`);
  if (latency) parts.push(duration(latency * 1_000));
  return parts.filter(Boolean).join(" · ");
}

export function words(event) {
  try {
    return WORDS[event.kind]?.(event) ?? "";
  } catch {
    return ""; // of a newer version, with other fields
  }
}

export const kindName = (kind) => kind.replaceAll("_", " ");

export const outcomeOf = (turn) => kindName(turn.outcome) || "runs";

/** Return who wrote an event, or that it failed: its colour says so. */
export function toneOf(kind, event) {
  if (event?.is_error) return "bad";
  if (kind === "user_message" || kind === "message_queued") return "user";
  if (kind === "agent_message" || kind.startsWith("step_")) return "model";
  if (kind === "action" || kind === "observation") return "tool";
  if (["agent_error", "user_reject", "conversation_error", "damaged"].includes(kind)) return "bad";
  if (["confirmation_requested", "confirmation_given", "paused", "resumed"].includes(kind)) return "wait";
  return "plain";
}
