// Server-sent events over fetch(), which carries the key in a header.

export class AnswerError extends Error {
  constructor(status, message, detail) {
    super(message);
    this.status = status;
    this.code = detail.code ?? "";
    this.param = detail.param ?? "";
    this.retryAfter = detail.retryAfter;
  }
}

/** Asks, and fails with the server's own sentence. */
export async function ask(path, key, options = {}) {
  const headers = { ...options.headers, ...(key ? { authorization: `Bearer ${key}` } : {}) };
  const answer = await fetch(path, { ...options, headers, cache: "no-store" });
  if (answer.ok) return answer;
  let detail = {};
  try {
    detail = (await answer.json()).error ?? {};
  } catch {
    // It is no error of ours: a proxy's, perhaps.
  }
  const retryAfter = Number(answer.headers.get("retry-after")) || 0;
  throw new AnswerError(answer.status, detail.message ?? `The server answered ${answer.status}`, { ...detail, retryAfter });
}

/** The events of an answer: {event, data}. */
export async function* events(answer) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const parts = (rest + value).split("\n\n");
      rest = parts.pop();
      for (const part of parts) {
        const found = { event: "message", data: "" };
        for (const line of part.split("\n")) {
          if (line.startsWith("event: ")) found.event = line.slice(7);
          else if (line.startsWith("data: ")) found.data += line.slice(6);
        }
        if (found.data) yield found;
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}
