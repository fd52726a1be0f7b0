import { HttpAgent } from '@ag-ui/client';
import { Observable } from 'rxjs';

const SILENCE_MS = 45_000; // the server sends at least a comment every 15 s

export class ResumableHttpAgent extends HttpAgent {
  cursor; // of the newest event; give it back with `messages` before `connectAgent()`

  run(input) {
    return this.#follow(input, undefined, () => [this.url, this.requestInit(input)]);
  }

  connect(input) {
    return this.#follow(input, this.cursor);
  }

  connectAgent(...given) {
    this.abortController = new AbortController(); // as `runAgent` does: the last may be aborted
    return super.connectAgent(...given);
  }

  #goOn({ threadId }, cursor) {
    const headers = { ...this.headers, ...(cursor && { 'Last-Event-ID': cursor }) };
    return [`${this.url}/${encodeURIComponent(threadId)}/connect`, { headers }];
  }

  #follow(input, cursor, begin) {
    const { signal } = this.abortController; // of this run: the next one gets another
    return new Observable(subscriber => {
      const left = new AbortController();
      const either = AbortSignal.any([signal, left.signal]);
      this.#read(input, cursor, begin, subscriber, either).catch(error => subscriber.error(error));
      return () => left.abort();
    });
  }

  async #read(input, cursor, begin, subscriber, signal) {
    let opened = 0; // the events without an id that the pipeline has: all, once one with an id came
    for (let wait = 50; !signal.aborted; wait = Math.min(2 * wait, 5000)) {
      let timer;
      const [url, init] = begin?.() ?? this.#goOn(input, cursor);
      const silent = new AbortController(); // of this connection
      const either = AbortSignal.any([signal, silent.signal]);
      const heard = () => {
        clearTimeout(timer);
        timer = setTimeout(() => silent.abort(), SILENCE_MS);
      };
      try {
        heard();
        const response = await this.fetch(url, { ...init, signal: either });
        const { ok, status } = response;
        if (status === 204 || status === 404) return subscriber.complete(); // an empty thread
        if (!ok && status < 500 && status !== 429)
          return subscriber.error(new Error(`HTTP ${status}: ${await response.text()}`));
        let [isNew, nth] = [false, 0]; // without an id, an event opens again what is open here
        for await (const { id, event } of framesOf(response, heard)) {
          if (signal.aborted) break; // nothing takes the event, so the cursor stays
          if (!id && event.type === 'RUN_ERROR') break; // of the server, not of the run
          isNew ||= id !== undefined || ++nth > opened;
          if (isNew) subscriber.next({ ...event, rawEvent: { cursor: id } });
          if (id) [begin, opened, wait, cursor, this.cursor] = [undefined, Infinity, 50, id, id];
          else if (isNew) opened += 1;
          if (/^RUN_(FINISHED|ERROR)$/.test(event.type)) return subscriber.complete();
        }
      } catch (error) {
        if (error instanceof SyntaxError) throw error; // it would come again
        new Request(url, init); // raises if this is no URL, or a header cannot be sent
        // Otherwise the connection was cut, or was silent for too long.
      } finally {
        clearTimeout(timer);
      }
      if (!signal.aborted)
        await new Promise(resolve => {
          setTimeout(resolve, wait);
          signal.addEventListener('abort', resolve);
        });
    }
    subscriber.complete();
  }
}

async function* framesOf(response, heard) {
  let [rest, id, data] = ['', undefined, ''];
  for await (const part of response.body.pipeThrough(new TextDecoderStream())) {
    heard();
    const lines = part.split('\n'); // not with the rest: an event may come in thousands of parts
    lines[0] = rest + lines[0];
    rest = lines.pop();
    for (const line of lines) {
      if (line.startsWith('id: ')) id = line.slice(4);
      if (line.startsWith('data: ')) data = line.slice(6);
      if (line) continue;
      if (data) yield { id, event: JSON.parse(data) };
      [id, data] = [undefined, ''];
    }
  }
}
