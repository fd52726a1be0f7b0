// The stock client of AG-UI, and one that resumes, driven by a test: a command is one line of JSON
// on standard input, its outcome one line on standard output.
import { createInterface } from 'node:readline';
import { HttpAgent, buildResumeArray } from '@ag-ui/client';
import { ResumableHttpAgent } from './resumable.mjs';

const chats = {};
const warnings = [];
console.warn = (...words) => warnings.push(words.join(' '));
console.error = () => undefined;
// The stock client cancels the reader of a connection that was cut, and drops the error.
process.on('unhandledRejection', () => undefined);

const { setTimeout, clearTimeout } = globalThis;
let standing; // while the clock stands: what waits for a time to come
globalThis.setTimeout = (call, ms, ...given) => {
  if (!standing) return setTimeout(call, ms, ...given);
  const timer = setTimeout(() => undefined, 2 ** 30);
  standing.push({ timer, ms, call: () => call(...given) });
  return timer;
};
globalThis.clearTimeout = timer => {
  standing = standing?.filter(each => each.timer !== timer);
  clearTimeout(timer);
};

// Cuts a response off after so many events or bytes of its body, as a lost connection does; or
// nothing more comes, and nobody says so; or what comes next is no event.
function cutting(chat) {
  return async (...request) => {
    chat.requests += 1;
    const response = await fetch(...request);
    chat.statuses.push(response.status);
    const cut = chat.cuts.shift();
    if (cut === undefined || !response.body) return response;
    const reader = response.body.getReader();
    const decoder = new TextDecoder();
    let rest = '';
    let [events, bytes] = [cut.events ?? Infinity, cut.bytes ?? Infinity];
    const body = new ReadableStream({
      async pull(controller) {
        while (true) {
          const end = rest.indexOf('\n\n') + 2;
          const length = Math.min(end === 1 ? 0 : end, bytes);
          if (events === 0 || bytes === 0) {
            if (cut.falls_silent) await reader.closed; // open until the client closes it
            await reader.cancel();
            if (!cut.broken) return controller.error(new TypeError('network error'));
            controller.enqueue(new TextEncoder().encode('data: {"type":\n\n'));
            return controller.close();
          }
          if (length) {
            controller.enqueue(new TextEncoder().encode(rest.slice(0, length)));
            rest = rest.slice(length);
            bytes -= length;
            events -= 1;
            return;
          }
          const { done, value } = await reader.read();
          if (done) {
            controller.close();
            return;
          }
          rest += decoder.decode(value, { stream: true });
        }
      },
    });
    return new Response(body, response);
  };
}

function open({ chat, url, threadId, resumes, messages, cursor, headers }) {
  const Agent = resumes ? ResumableHttpAgent : HttpAgent;
  const opened = { requests: 0, statuses: [], events: [], cuts: [], saved: { messages: [] } };
  const given = { url, threadId, headers, initialMessages: messages };
  const agent = new Agent({ ...given, fetch: cutting(opened) });
  agent.cursor = cursor;
  let newest = cursor;
  const save = messages => {
    opened.saved = { messages: structuredClone(messages), cursor: newest };
  };
  agent.subscribe({
    onEvent: ({ event, messages }) => {
      save(messages); // they are as of the event before
      newest = event.rawEvent?.cursor ?? newest;
      opened.events.push(event);
    },
    onRunFinalized: ({ messages }) => save(messages),
  });
  chats[chat] = { opened, agent };
}

function start(chat, running) {
  chat.error = undefined;
  chat.running = running.then(
    ({ newMessages }) => (chat.new = newMessages),
    error => (chat.error = error.message),
  );
}

function shown({ opened, agent, error }) {
  const { requests, statuses, events, saved } = opened;
  const types = events.map(event => event.type);
  const outcome = events.findLast(event => event.type === 'RUN_FINISHED')?.outcome?.type;
  const custom = events.filter(event => event.type === 'CUSTOM');
  const failed = events.findLast(event => event.type === 'RUN_ERROR')?.code;
  const { messages, pendingInterrupts, isRunning } = agent;
  const rest = { requests, statuses, types, outcome, custom, failed, saved, error, warnings, isRunning };
  return { messages, pendingInterrupts, ...rest };
}

const operations = {
  open,
  cut: ({ chat, ...cut }) => void chats[chat].opened.cuts.push(cut),
  send: ({ chat, text, id, runId, props, isNoJson }) => {
    const { agent } = chats[chat];
    agent.addMessage({ id, role: 'user', content: text });
    const forwardedProps = isNoJson ? { order: 7n } : props;
    start(chats[chat], agent.runAgent({ runId, forwardedProps }));
  },
  again: ({ chat, ...input }) => start(chats[chat], chats[chat].agent.runAgent(input)),
  answer: ({ chat, runId, answers }) => {
    const { agent } = chats[chat];
    const resume = buildResumeArray(agent.pendingInterrupts, answers);
    start(chats[chat], agent.runAgent({ runId, resume }));
  },
  connect: ({ chat }) => start(chats[chat], chats[chat].agent.connectAgent()),
  url: ({ chat, url }) => void (chats[chat].agent.url = url),
  leave: ({ chat }) => chats[chat].agent.abortRun(),
  // In one step, as the code of a page does it.
  instead: ({ chat, ...message }) => {
    operations.leave({ chat });
    operations.send({ chat, ...message });
  },
  detach: ({ chat }) => chats[chat].agent.detachActiveRun(),
  stand: () => void (standing = []),
  run_on: ({ ms = 5000 }) => {
    const due = standing.filter(each => each.ms <= ms);
    standing = undefined;
    due.forEach(({ call }) => call());
  },
  done: ({ chat }) => chats[chat].running,
  show: () => new Promise(resolve => setTimeout(resolve, 5)),
};

for await (const line of createInterface({ input: process.stdin })) {
  const command = JSON.parse(line);
  await operations[command.op](command);
  console.log(JSON.stringify(shown(chats[command.chat])));
}
