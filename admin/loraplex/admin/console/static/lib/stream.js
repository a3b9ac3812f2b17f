/** Reads a streamed answer of the data port: server-sent events, each with a JSON document, until `[DONE]`. */

/**
 * @typedef {{text: string, usage: any, finish: string | null, error: any}} Piece
 */

/**
 * The JSON documents of an event stream.
 * @param {ReadableStream<Uint8Array>} body
 * @returns {AsyncGenerator<any>}
 */
export async function* events(body) {
  const reader = body.getReader();
  const decoder = new TextDecoder();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const lines = (rest + decoder.decode(value, { stream: true })).split(/\r?\n/);
      rest = lines.pop() || "";
      for (const line of lines) {
        if (!line.startsWith("data:")) continue;
        const data = line.slice(5).trim();
        if (data === "[DONE]") return;
        yield JSON.parse(data);
      }
    }
  } finally {
    await reader.cancel().catch(() => undefined);
  }
}

/**
 * What one document of a chat or a completion adds.
 * @param {any} document
 * @returns {Piece}
 */
export function piece(document) {
  const choice = (document.choices || [])[0];
  const text = choice ? (choice.delta ? choice.delta.content : choice.text) : "";
  return {
    text: text || "",
    usage: document.usage || null,
    finish: (choice && choice.finish_reason) || null,
    error: document.error || null,
  };
}
