// The stock client of the AI SDK, driven by a test: a command is one line of JSON on standard input,
// its outcome one line on standard output. The transport checks each chunk by the SDK's own schema.
import { createInterface } from 'node:readline';
import { AbstractChat, DefaultChatTransport } from 'ai';

class State {
  status = 'ready';
  error = undefined;
  messages = [];
  pushMessage = message => {
    this.messages = [...this.messages, message];
  };
  popMessage = () => {
    this.messages = this.messages.slice(0, -1);
  };
  replaceMessage = (index, message) => {
    this.messages = this.messages.map((old, n) => (n === index ? message : old));
  };
  snapshot = value => structuredClone(value);
}

class Chat extends AbstractChat {}

const chats = {};
const running = {};

// Cuts a response off after so many pieces of its body, as a lost connection does.
function cutting(chat) {
  return async (...request) => {
    const response = await fetch(...request);
    chat.statuses.push(response.status);
    if (chat.cutAfter === undefined || !response.body) return response;
    let left = chat.cutAfter;
    chat.cutAfter = undefined;
    const reader = response.body.getReader();
    let rest = '';
    const body = new ReadableStream({
      async pull(controller) {
        while (true) {
          const end = rest.indexOf('\n\n');
          if (end !== -1) {
            if (left-- === 0) {
              await reader.cancel();
              controller.error(new TypeError('network error'));
              return;
            }
            controller.enqueue(new TextEncoder().encode(rest.slice(0, end + 2)));
            rest = rest.slice(end + 2);
            return;
          }
          const { done, value } = await reader.read();
          if (done) {
            controller.close();
            return;
          }
          rest += new TextDecoder().decode(value);
        }
      },
    });
    return new Response(body, response);
  };
}

function open({ chat, id, api, body, messages }) {
  const state = new State();
  state.messages = messages ?? [];
  const opened = { state, data: [], statuses: [], cutAfter: undefined };
  opened.chat = new Chat({
    id,
    state,
    transport: new DefaultChatTransport({ api, body, fetch: cutting(opened) }),
    onData: part => opened.data.push(part),
  });
  chats[chat] = opened;
}

function shown({ state, data, statuses }) {
  const { messages, status, error } = state;
  return { messages, status, error: error?.message, data, statuses };
}

const operations = {
  open,
  cut: ({ chat, after }) => {
    chats[chat].cutAfter = after;
  },
  send: ({ chat, text, id, messageId, files = [] }) => {
    const message =
      messageId === undefined
        ? { role: 'user', parts: [...files, { type: 'text', text }], id }
        : { text, messageId };
    running[chat] = chats[chat].chat.sendMessage(message);
  },
  answered: ({ chat }) => {
    running[chat] = chats[chat].chat.sendMessage();
  },
  approve: ({ chat, id, approved, reason }) =>
    chats[chat].chat.addToolApprovalResponse({ id, approved, reason }),
  regenerate: ({ chat, messageId }) => {
    running[chat] = chats[chat].chat.regenerate({ messageId });
  },
  resume: ({ chat }) => {
    running[chat] = chats[chat].chat.resumeStream();
  },
  stop: ({ chat }) => chats[chat].chat.stop(),
  done: ({ chat }) => running[chat],
  show: () => undefined,
};

for await (const line of createInterface({ input: process.stdin })) {
  const command = JSON.parse(line);
  await operations[command.op](command);
  console.log(JSON.stringify(shown(chats[command.chat])));
}
