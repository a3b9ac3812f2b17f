/** Conversations of the playground: what a column asks next, as the request that is sent, and what it is answered. */
import { api, ApiError, path } from "./api.js";
import { events, piece } from "./stream.js";

/** Likeliest tokens that come with each token. */
const TOP = 5;
/** Levels of typed JSON; a schema has 64 at most. */
const MAX_LEVELS = 100;

/**
 * @typedef {{ prompt: string, system: string, seed: number, temperature: number, maxTokens: number, schema: string, tools: string,
 *   toolChoice: string, oneCall: boolean, logprobs: boolean }} Ask `schema`, `tools`: JSON as it is typed.
 * @typedef {{ id: string, name: string, arguments: string }} Call
 * @typedef {{ text: string, calls: Call[], tokens: import("./stream.js").Token[], status: string, error: any, adapter: string,
 *   state: string, firstMs: number | null, usage: any, classifies: boolean | null, classes: any }} Answer `classifies`: null until the
 *   server has said it; `classes`: what `Classes` shows, of a version that classifies.
 * @typedef {{ id: string, name: string, text: string }} Result What a call gave.
 * @typedef {{ text: string, results: Result[], body: any, answer: Answer }} Turn `body`: the request, without what streams it.
 * @typedef {{ id: number, model: string, turns: Turn[], results: string[] }} Column `id`: its own while the page is shown; `results`: as they
 *   are typed, by the place of the call.
 * @typedef {{ before: Turn[], text: string, results: Result[] }} Told What is said next, and to which turns.
 */

/** @type {Ask} */
export const DEFAULTS = {
  prompt: "",
  system: "",
  seed: 7,
  temperature: 0.7,
  maxTokens: 128,
  schema: "",
  tools: "",
  toolChoice: "auto",
  oneCall: false,
  logprobs: false,
};

/** @type {Answer} */
export const NOTHING = {
  text: "",
  calls: [],
  tokens: [],
  status: "waiting",
  error: null,
  adapter: "",
  state: "",
  firstMs: null,
  usage: null,
  classifies: null,
  classes: null,
};

/** Whether it can be written again without end of the stack. @param {any} value @param {number} levels @returns {boolean} */
const isShallow = (value, levels) =>
  typeof value !== "object" || value === null || (levels > 0 && Object.values(value).every((one) => isShallow(one, levels - 1)));

/**
 * Typed JSON; empty text is none. `problem`: why it cannot be sent.
 * @param {string} text
 * @returns {{ value?: any, problem: string }}
 */
export function typedJson(text) {
  if (!text.trim()) return { problem: "" };
  try {
    const value = JSON.parse(text);
    return isShallow(value, MAX_LEVELS) ? { value, problem: "" } : { problem: `This is nested deeper than ${MAX_LEVELS} levels.` };
  } catch (error) {
    return { problem: `This cannot be read as JSON: ${error instanceof Error ? error.message : error}` };
  }
}

/** Whether the model wrote something, and did not fail after it: else the turn is no part of the conversation. @param {Turn} turn */
export const isWritten = ({ answer }) => answer.status !== "failed" && Boolean(answer.text || answer.calls.length);

/** The turns that another one follows: one that failed gives way. @param {Column} column */
function standing({ turns }) {
  const last = turns.at(-1);
  return last && !isWritten(last) && !last.answer.classes ? turns.slice(0, -1) : turns;
}

/** The calls whose results can be typed. @param {Column} column */
export const openCalls = (column) => standing(column).at(-1)?.answer.calls ?? [];

/** Whether a result of a call is typed. @param {Column} column */
export const hasResults = (column) => openCalls(column).some((_, place) => column.results[place]);

/**
 * What the column is told next; null: nothing.
 * @param {Column} column @param {string} prompt
 * @returns {Told | null}
 */
export function next(column, prompt) {
  if (!prompt && !hasResults(column)) return null;
  const results = hasResults(column)
    ? openCalls(column).map(({ id, name }, place) => ({ id, name, text: column.results[place] ?? "" }))
    : [];
  return { before: standing(column), text: prompt, results };
}

/** What the column was told last, to be asked again. @param {Column} column @returns {Told | null} */
export function again({ turns }) {
  const last = turns.at(-1);
  return last ? { before: turns.slice(0, -1), text: last.text, results: last.results } : null;
}

/** @param {{ text: string, results: Result[] }} told */
const said = ({ text, results }) => [
  ...results.map((result) => ({ role: "tool", tool_call_id: result.id, content: result.text })),
  ...(text ? [{ role: "user", content: text }] : []),
];

/** @param {Answer} answer */
function written({ text, calls }) {
  if (!calls.length) return { role: "assistant", content: text };
  const functions = calls.map(({ id, name, arguments: given }) => ({ id, type: "function", function: { name, arguments: given } }));
  return { role: "assistant", content: text || null, tool_calls: functions };
}

/** The body of the request, without what streams it. @param {string} model @param {Ask} ask @param {Told} told */
export function bodyOf(model, ask, told) {
  const schema = typedJson(ask.schema).value;
  const tools = typedJson(ask.tools).value;
  return {
    model,
    messages: [
      ...(ask.system ? [{ role: "system", content: ask.system }] : []),
      ...told.before.filter(isWritten).flatMap((turn) => [...said(turn), written(turn.answer)]),
      ...said(told),
    ],
    seed: ask.seed,
    temperature: ask.temperature,
    max_tokens: ask.maxTokens,
    ...(schema !== undefined && { response_format: { type: "json_schema", json_schema: { name: "answer", schema } } }),
    ...(tools !== undefined && { tools }),
    ...(tools !== undefined && ask.toolChoice !== "auto" && { tool_choice: ask.toolChoice }),
    ...(tools !== undefined && ask.oneCall && { parallel_tool_calls: false }),
    ...(ask.logprobs && { logprobs: true, top_logprobs: TOP }),
  };
}

/**
 * The answer to a turn into `change`, whatever becomes of it: streamed, or the classes of a version that writes no text.
 * @param {{ text: string, body: any }} turn
 * @param {AbortSignal} signal
 * @param {(changed: Partial<Answer>) => void} change
 */
export async function answer({ text, body }, signal, change) {
  try {
    const { head } = await api.get(path`/v1/models/${body.model}`, {}, { signal });
    change({ classifies: Boolean(head) });
    await (head ? classify(body.model, head, text, signal, change) : stream(body, signal, change));
  } catch (error) {
    change(signal.aborted ? { status: "stopped" } : { status: "failed", error });
  }
}

/**
 * Throws ApiError.
 * @param {string} model @param {any} head @param {string} text @param {AbortSignal} signal
 * @param {(changed: Partial<Answer>) => void} change
 */
async function classify(model, head, text, signal, change) {
  const got = await api.request("POST", "/v1/classify", { json: { model, input: text }, signal });
  const { data, usage } = await got.json();
  const asked = { model, prompt: text, return_token_strs: true };
  const tokens = data[0].tokens ? (await api.send("POST", "/tokenize", asked, { signal })).body.token_strs : [];
  change({ ...servedBy(got), status: "classified", usage, classes: { head, item: data[0], tokens } });
}

/** @param {Response} got */
const servedBy = (got) => ({
  adapter: got.headers.get("x-loraplex-adapter") ?? "base",
  state: got.headers.get("x-loraplex-adapter-state") ?? "",
});

/**
 * Throws ApiError.
 * @param {any} body @param {AbortSignal} signal @param {(changed: Partial<Answer>) => void} change
 */
async function stream(body, signal, change) {
  const began = performance.now();
  let text = "";
  let isFinished = false;
  /** @type {Call[]} */
  let calls = [];
  /** @type {import("./stream.js").Token[]} */
  const tokens = [];
  const json = { ...body, stream: true, stream_options: { include_usage: true } };
  const got = await api.request("POST", "/v1/chat/completions", { json, signal });
  change({ ...servedBy(got), status: "streaming" });
  for await (const document of events(/** @type {ReadableStream<Uint8Array>} */ (got.body))) {
    const found = piece(document);
    if (found.error) throw found.error;
    const isFirst = !text && !calls.length;
    text += found.text;
    for (const one of found.calls) calls = withPiece(calls, one);
    tokens.push(...found.tokens);
    if (isFirst && (text || calls.length)) change({ firstMs: performance.now() - began });
    if (found.text || found.calls.length) change({ text, calls });
    if (found.usage) change({ usage: found.usage });
    if (!found.finish) continue;
    isFinished = true;
    change({ status: found.finish, tokens });
  }
  if (!isFinished) throw new ApiError(0, "cut_off", "The connection closed before the answer was whole. Ask again.");
}

/** @param {Call[]} calls @param {import("./stream.js").CallPiece} piece */
function withPiece(calls, { index, id = "", function: { name = "", arguments: given = "" } = {} }) {
  const before = calls[index] ?? { id: "", name: "", arguments: "" };
  const changed = { id: before.id || id, name: before.name || name, arguments: before.arguments + given };
  return [...calls.slice(0, index), changed, ...calls.slice(index + 1)];
}
