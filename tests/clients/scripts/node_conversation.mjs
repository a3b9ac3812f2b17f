// A conversation of the Node openai client with a Loraplex server; see conversation.py for the protocol.

import { createRequire } from "node:module";
import { createInterface } from "node:readline";

const settings = JSON.parse(process.argv[2]);
const { url, key, base, model } = settings;
const OpenAI = createRequire(`${settings.modules}/`)("openai");
const QUESTION = "What do you think of the sea?";
const TOOL = {
  type: "function",
  function: { name: "weather", parameters: { type: "object", properties: { city: { type: "string" } } } },
};

const answersIn = createInterface({ input: process.stdin })[Symbol.asyncIterator]();
const say = (line) => process.stdout.write(`${JSON.stringify(line)}\n`);

async function ask(name) {
  say({ ask: name });
  return JSON.parse((await answersIn.next()).value);
}

async function check(name, work) {
  let value;
  try {
    value = await work();
  } catch (error) {
    value = { raised: `${error.stack}` };
  }
  say({ check: name, value });
}

const STRANGE = { type: "json_schema", json_schema: { name: "a", schema: {}, strictness: 1 } };

async function refused(work) {
  try {
    return { "not refused": JSON.stringify(await work()) };
  } catch (error) {
    return {
      class: error.constructor.name,
      status: error.status ?? null,
      code: error.code ?? null,
      param: error.param ?? null,
    };
  }
}

async function timed(work) {
  const begin = performance.now();
  const answer = await work();
  return { answer, waited: performance.now() - begin >= 900 };
}

const client = (options = {}) => new OpenAI({ baseURL: url, apiKey: key, maxRetries: 0, ...options });
const user = (content) => [{ role: "user", content }];
const body = (more = {}) => ({ model, messages: user(QUESTION), max_tokens: 16, temperature: 0, ...more });
const chat = (more = {}, options = {}) => client(options).chat.completions.create(body(more));

function told(answer) {
  const [choice] = answer.choices;
  return {
    text: choice.message.content,
    finish: choice.finish_reason,
    prompt: answer.usage.prompt_tokens,
    completion: answer.usage.completion_tokens,
  };
}

async function stream(more = {}) {
  const seen = { text: "", finish: null, prompt: null, completion: null, pieces: 0 };
  for await (const chunk of await chat({ stream: true, stream_options: { include_usage: true }, ...more })) {
    const [choice] = chunk.choices;
    seen.text += choice?.delta.content ?? "";
    seen.pieces += choice?.delta.content ? 1 : 0;
    seen.finish = choice?.finish_reason ?? seen.finish;
    seen.prompt = chunk.usage?.prompt_tokens ?? seen.prompt;
    seen.completion = chunk.usage?.completion_tokens ?? seen.completion;
  }
  return seen;
}

// The client's own helper, which checks and joins the chunks.
async function streamHelper() {
  const running = client().chat.completions.stream(body({ stream_options: { include_usage: true } }));
  return told(await running.finalChatCompletion());
}

// The client's own answer goes back in, as it came.
async function turns() {
  const first = [
    { role: "system", content: "Be brief." },
    { role: "user", content: [{ type: "text", text: "What do you " }, { type: "text", text: "think?" }] },
  ];
  const answer = (await chat({ messages: first })).choices[0].message;
  const again = await chat({ messages: [...first, answer, { role: "user", content: "And then?", name: "ann" }] });
  return { first: answer.content, second: told(again).text };
}

async function developer() {
  const messages = [{ role: "developer", content: "Be brief." }, ...user(QUESTION)];
  return told(await chat({ messages })).text;
}

async function logprobs() {
  const asked = { logprobs: true, top_logprobs: 2 };
  const asTold = (entries) => entries.map(({ top_logprobs: top, ...entry }) => ({ ...entry, top }));
  const whole = (await chat(asked)).choices[0].logprobs.content;
  const streamed = [];
  for await (const chunk of await chat({ stream: true, ...asked })) {
    streamed.push(...(chunk.choices[0].logprobs?.content ?? []));
  }
  return { whole: asTold(whole), streamed: asTold(streamed) };
}

async function echo() {
  const request = { model, prompt: "The sea is", max_tokens: 16, temperature: 0, echo: true, logprobs: 1 };
  const [{ text, logprobs }] = (await client().completions.create(request)).choices;
  return { text, logprobs };
}

async function completionStream() {
  let text = "";
  const request = { model, prompt: "The sea is", max_tokens: 16, temperature: 0, stream: true };
  for await (const chunk of await client().completions.create(request)) text += chunk.choices[0].text;
  return text;
}

async function completion() {
  const answer = await client().completions.create({ model, prompt: "The sea is", max_tokens: 16, temperature: 0 });
  return answer.choices[0].text;
}

async function models() {
  const ids = [];
  for await (const card of client().models.list()) ids.push(card.id);
  return ids.sort();
}

async function headers() {
  const { response, request_id } = await client({ defaultHeaders: { "x-request-id": "mine-1" } })
    .chat.completions.create(body())
    .withResponse();
  return { id: request_id, adapter: response.headers.get("x-loraplex-adapter") };
}

async function sampling() {
  await chat({
    temperature: 0.5,
    top_p: 0.9,
    presence_penalty: 0.25,
    frequency_penalty: -0.5,
    seed: 7,
    logit_bias: { 65: -100 },
    top_k: 5,
    min_p: 0.1,
  });
  return ask("last");
}

async function hangUp() {
  await ask("hold");
  const running = await chat({ stream: true });
  let text = "";
  for await (const chunk of running) {
    text += chunk.choices[0].delta.content ?? "";
    if (text.length >= 2) break;
  }
  running.controller.abort();
  return { text, freed: await ask("gone") };
}

async function abortWhole() {
  await ask("hold");
  const controller = new AbortController();
  const running = refused(() => client().chat.completions.create(body(), { signal: controller.signal }));
  await ask("started");
  controller.abort();
  return { ...(await running), freed: await ask("gone") };
}

async function breaks() {
  await ask("break");
  let seen = "";
  const found = await refused(async () => {
    for await (const chunk of await chat({ stream: true })) seen += chunk.choices[0]?.delta.content ?? "";
  });
  return { ...found, seen };
}

async function retried(fault) {
  await ask(fault);
  return timed(async () => told(await chat({}, { maxRetries: 1 })).text);
}

async function quota() {
  await ask("quota");
  return { ...(await refused(() => chat({}, { maxRetries: 3 }))), refusals_left: await ask("refusals") };
}

async function runTools() {
  const tool = { type: "function", function: { ...TOOL.function, function: () => "12", parse: JSON.parse } };
  return client().chat.completions.runTools(body({ tools: [tool] })).finalContent();
}

await check("models", models);
await check("card", async () => (await client().models.retrieve(model)).id);
await check("chat", async () => told(await chat()));
await check("headers", headers);
await check("stream", stream);
await check("stream_helper", streamHelper);
await check("base", async () => told(await chat({ model: base })).text);
await check("turns", turns);
await check("developer", developer);
await check("completion", completion);
await check("completion_stream", completionStream);
await check("n", async () =>
  (await chat({ n: 2, temperature: 1, seed: 7 })).choices.map((choice) => choice.message.content),
);
await check("logprobs", logprobs);
await check("echo", echo);
await check("wrong_key", () => refused(() => chat({}, { apiKey: "lpx_wrong" })));
await check("unknown_model", () => refused(() => chat({ model: "nothing" })));
await check("tools", () => refused(() => chat({ tools: [TOOL] })));
await check("run_tools", () => refused(runTools));
await check("structured", () => refused(() => chat({ response_format: STRANGE })));
await check("too_long", () => refused(() => chat({ messages: user("x ".repeat(60_000)) })));
await check("far_too_long", () => refused(() => chat({ messages: user("x ".repeat(600_000)) })));
await check("answer_too_long", () => refused(() => chat({ max_tokens: 100_000 })));
await check("embeddings", async () => {
  const answer = await client().embeddings.create({ model: base, input: QUESTION });
  return Math.hypot(...answer.data[0].embedding).toFixed(4);
});
await check("responses", async () => (await client().responses.create({ model: base, input: QUESTION })).output_text);
await check("turns_prompt", async () => (await turns(), (await ask("last")).prompt));
await check("developer_prompt", async () => (await developer(), (await ask("last")).prompt));
await check("sampling", sampling);
await check("length", async () => told(await chat({ max_tokens: 3 })));
await check("max_completion_tokens", async () =>
  told(await chat({ max_tokens: undefined, max_completion_tokens: 3 })),
);
await check("stop", async () => told(await chat({ stop: ["wö"] })));
await check("stop_stream", () => stream({ stop: "wö" }));
await check("rate_limit", async () => (await ask("rate_limit"), refused(() => chat())));
for (const fault of ["rate_limit", "drain", "overload", "restart"]) {
  await check(`${fault}_retried`, () => retried(fault));
}
await check("quota", quota);
await check("hang_up", hangUp);
await check("abort", abortWhole);
await check("breaks", breaks);
answersIn.return?.();
process.stdin.destroy();
