// A chat by the stock client of the AI SDK; `site.py` says how to run it.
import { useChat } from '@ai-sdk/react';
import { DefaultChatTransport, lastAssistantMessageIsCompleteWithApprovalResponses } from 'ai';
import { useState } from 'react';
import { createRoot } from 'react-dom/client';

const id = (location.hash ||= crypto.randomUUID()).slice(1); // a reload finds it again
const transport = new DefaultChatTransport({ api: '/chat/v1/ai-sdk/chat' });
const headers = { 'Content-Type': 'application/json' };

function Chat({ before }) {
  const chat = useChat({
    id,
    transport,
    messages: before,
    resume: true, // go on with the answer that is being written
    sendAutomaticallyWhen: lastAssistantMessageIsCompleteWithApprovalResponses,
  });
  const [text, setText] = useState('');
  const isBusy = chat.status === 'submitted' || chat.status === 'streaming';

  function send(event) {
    event.preventDefault();
    chat.sendMessage({ text });
    setText('');
  }

  // The client's own `stop()` merely leaves the turn; this ends it, and the stream with it.
  const stop = () =>
    fetch(`/chat/v1/ai-sdk/chat/${id}/stop`, { method: 'POST', headers, body: '{}' });

  return (
    <main>
      {chat.messages.map(({ id, role, parts }) => (
        <article key={id} className={role}>
          {parts.map((part, n) => (
            <Part key={n} part={part} answer={chat.addToolApprovalResponse} />
          ))}
        </article>
      ))}
      {chat.error && <p role="alert">{chat.error.message}</p>}
      <form onSubmit={send}>
        <input aria-label="Message" value={text} onChange={event => setText(event.target.value)} />
        <button disabled={!text}>Send</button>
        <button type="button" disabled={!isBusy} onClick={stop}>
          Stop
        </button>
        <button type="button" disabled={isBusy} onClick={() => chat.regenerate({ messageId: chat.messages.at(-1)?.id })}>
          Regenerate
        </button>
      </form>
    </main>
  );
}

function Part({ part, answer }) {
  if (part.type === 'text') return <p>{part.text}</p>;
  if (part.type !== 'dynamic-tool') return null;
  const { toolName, input, state, output, approval } = part;
  return (
    <p>
      {toolName} {JSON.stringify(input)} {output}
      {state === 'approval-requested' && (
        <>
          <button onClick={() => answer({ id: approval.id, approved: true })}>Approve</button>
          <button onClick={() => answer({ id: approval.id, approved: false })}>Reject</button>
        </>
      )}
    </p>
  );
}

const reply = await fetch(`/chat/v1/conversations/${id}/messages?shape=ai-sdk`);
const before = reply.ok ? (await reply.json()).messages : []; // 404: it has yet to begin
createRoot(document.getElementById('root')).render(<Chat before={before} />);
