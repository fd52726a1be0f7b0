import { HttpAgent } from '@ag-ui/client';
import { Observable } from 'rxjs';

export class ResumableHttpAgent extends HttpAgent {
  cursor; // of the newest event; give it back with `messages` before `connectAgent()`

  run(input) {
    return this.#follow(input, () => this.fetch(this.url, this.requestInit(input)));
  }

  connect(input) {
    return this.#follow(input, () => this.#goOn(input));
  }

  #goOn({ threadId }) {
    const headers = { ...this.headers, ...(this.cursor && { 'Last-Event-ID': this.cursor }) };
    const { signal } = this.abortController;
    return this.fetch(`${this.url}/${encodeURIComponent(threadId)}/connect`, { headers, signal });
  }

  #follow(input, begin) {
    return new Observable(subscriber => void this.#read(input, begin, subscriber));
  }

  async #read(input, ask, subscriber) {
    let opened = 0; // the events without an id that the pipeline has: all, once one with an id came
    for (let wait = 50; !subscriber.closed; wait = Math.min(2 * wait, 5000)) {
      try {
        const response = await ask();
        const { ok, status } = response;
        if (status === 204 || status === 404) return subscriber.complete(); // an empty thread
        if (!ok && status < 500 && status !== 429)
          return subscriber.error(new Error(`HTTP ${status}: ${await response.text()}`));
        let [isNew, nth] = [false, 0]; // without an id, an event opens again what is open here
        for await (const { id, event } of framesOf(response)) {
          if (!id && event.type === 'RUN_ERROR') break; // of the server, not of the run
          isNew ||= id !== undefined || ++nth > opened;
          if (isNew) subscriber.next({ ...event, rawEvent: { cursor: id } });
          if (id) [ask, opened, wait, this.cursor] = [() => this.#goOn(input), Infinity, 50, id];
          else if (isNew) opened += 1;
          if (/^RUN_(FINISHED|ERROR)$/.test(event.type)) return subscriber.complete();
        }
      } catch {} // the connection was cut
      if (this.abortController.signal.aborted) return subscriber.complete();
      await new Promise(resolve => setTimeout(resolve, wait));
    }
  }
}

async function* framesOf(response) {
  let text = '';
  for await (const part of response.body.pipeThrough(new TextDecoderStream())) {
    const blocks = (text += part).split('\n\n');
    text = blocks.pop();
    for (const block of blocks) {
      const [, id] = /^id: (.*)$/m.exec(block) ?? [];
      const [, data] = /^data: (.*)$/m.exec(block) ?? [];
      if (data) yield { id, event: JSON.parse(data) };
    }
  }
}
