// A chat by the stock client of the AI SDK; `serve.py` says how to run it.
import { useChat } from '@ai-sdk/react';
import { DefaultChatTransport, lastAssistantMessageIsCompleteWithApprovalResponses } from 'ai';
import { useState } from 'react';
import { createRoot } from 'react-dom/client';

if (!location.hash) history.replaceState(null, '', `#${crypto.randomUUID()}`);
const id = location.hash.slice(1); // a reload finds it again
addEventListener('hashchange', () => location.reload());
const headers = { 'Content-Type': 'application/json' };

// Opens the stream of the answer that is being written, if one is, and then reads what was said: in
// the other order, an answer that ends in between would be in neither.
class Transport extends DefaultChatTransport {
  async reconnectToStream(options) {
    this.show(undefined);
    const stream = await super.reconnectToStream(options);
    const reply = await fetch(`/chat/v1/conversations/${id}/messages?shape=ai-sdk`);
    if (!reply.ok && reply.status !== 404) throw new Error(await reply.text());
    this.show(reply.ok ? (await reply.json()).messages : []); // 404: it has yet to begin
    return stream;
  }
}
const transport = new Transport({ api: '/chat/v1/ai-sdk/chat' });

function Chat() {
  const chat = useChat({
    id,
    transport,
    resume: true, // go on with the answer that is being written
    sendAutomaticallyWhen: lastAssistantMessageIsCompleteWithApprovalResponses,
  });
  const [text, setText] = useState('');
  const [isRead, setIsRead] = useState(false); // until then, what is sent would be overwritten
  transport.show = messages => {
    if (messages) chat.setMessages(messages);
    setIsRead(messages !== undefined);
  };
  const isBusy = chat.status === 'submitted' || chat.status === 'streaming';
  const last = chat.messages.at(-1);
  const isUnsent = chat.error && last?.role === 'user'; // or only the reply was lost

  function send(event) {
    event.preventDefault();
    chat.sendMessage({ text, messageId: isUnsent ? last.id : undefined });
    setText('');
  }

  // A message is sent again under its id, so the log has it once.
  const goOn = () => (isUnsent ? chat.sendMessage() : chat.resumeStream());

  // The client's own `stop()` merely leaves the turn; this ends it, and the stream with it. It names
  // the turn, so that a late press does not end the next one.
  const stop = () =>
    fetch(`/chat/v1/ai-sdk/chat/${id}/stop`, {
      method: 'POST',
      headers,
      body: JSON.stringify({ messageId: last.id }),
    });

  return (
    <main>
      {chat.messages.map(({ id, role, parts }) => (
        <article key={id} className={role}>
          {parts.map((part, n) => (
            <Part key={n} part={part} answer={chat.addToolApprovalResponse} />
          ))}
        </article>
      ))}
      {chat.error && (
        <p role="alert">
          {chat.error.message} <button onClick={goOn}>Go on</button>
        </p>
      )}
      <form onSubmit={send}>
        <input aria-label="Message" value={text} onChange={event => setText(event.target.value)} />
        <button disabled={!text || !isRead || isBusy || (chat.error && !isUnsent)}>Send</button>
        <button type="button" disabled={chat.status !== 'streaming'} onClick={stop}>
          Stop
        </button>
        <button type="button" disabled={isBusy} onClick={() => chat.regenerate({ messageId: last?.id })}>
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

createRoot(document.getElementById('root')).render(<Chat />);
