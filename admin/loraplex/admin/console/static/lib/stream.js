/** Reads a streamed answer of the data port: server-sent events, each with a JSON document, until `[DONE]`. */

/**
 * @typedef {{ token: string, logprob: number, top_logprobs: { token: string, logprob: number }[] }} Token
 * @typedef {{ index: number, id?: string, function?: { name?: string, arguments?: string } }} CallPiece
 * @typedef {{ text: string, calls: CallPiece[], tokens: Token[], usage: any, finish: string | null, error: any }} Piece
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
 * What one document of a chat adds.
 * @param {any} document
 * @returns {Piece}
 */
export function piece(document) {
  const choice = document.choices?.[0];
  return {
    text: choice?.delta?.content || "",
    calls: choice?.delta?.tool_calls || [],
    tokens: choice?.logprobs?.content || [],
    usage: document.usage || null,
    finish: choice?.finish_reason || null,
    error: document.error || null,
  };
}
