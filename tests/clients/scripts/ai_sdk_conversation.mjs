// Tools and objects by the AI SDK over each of its three providers, and by the Node openai and anthropic clients; see
// conversation.py for the protocol.

import { createRequire } from "node:module";
import { createInterface } from "node:readline";

const settings = JSON.parse(process.argv[2]);
const { url, key, model } = settings;
const require = createRequire(`${settings.modules}/`);
const { generateText, streamText, Output, tool, stepCountIs, embed } = require("ai");
const { createOpenAICompatible } = require("@ai-sdk/openai-compatible");
const { createOpenAI } = require("@ai-sdk/openai");
const { createAnthropic } = require("@ai-sdk/anthropic");
const OpenAI = require("openai");
const { zodResponseFormat } = require("openai/helpers/zod");
const Anthropic = require("@anthropic-ai/sdk");
const { z } = require("zod");

globalThis.AI_SDK_LOG_WARNINGS = false;
const QUESTION = "What is the weather in Bonn?";
const Weather = z.object({ city: z.string(), degrees: z.number().int() });
const City = z.object({ city: z.string() });

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
    value = { raised: `${error.stack} ${error.responseBody ?? ""}` };
  }
  say({ check: name, value });
}

const models = {
  compatible: createOpenAICompatible({
    name: "loraplex", baseURL: url, apiKey: key, includeUsage: true, supportsStructuredOutputs: true,
  })(model),
  chat: createOpenAI({ baseURL: url, apiKey: key }).chat(model),
  responses: createOpenAI({ baseURL: url, apiKey: key }).responses(model),
  messages: createAnthropic({ baseURL: url, apiKey: key })(model),
};
const providerOptions = { openai: { store: false } };
const weather = tool({
  description: "What the weather is like in a city.",
  inputSchema: City,
  execute: async ({ city }) => `12 degrees in ${city}`,
});
const asked = (name) => ({
  model: models[name], prompt: QUESTION, maxRetries: 0, maxOutputTokens: 256, providerOptions,
});

for (const name of Object.keys(models)) {
  await check(`${name}_tool`, async () => {
    await ask("weather_turn");
    const answer = await generateText({ ...asked(name), tools: { weather }, stopWhen: stepCountIs(2) });
    const calls = answer.steps.flatMap((step) => step.toolCalls.map((call) => [call.toolName, call.input]));
    return { text: answer.text, calls };
  });
  await check(`${name}_tool_streamed`, async () => {
    await ask("weather_turn");
    const stream = streamText({
      ...asked(name), tools: { weather }, stopWhen: stepCountIs(2), onError: () => {},
    });
    const calls = [];
    let text = "";
    for await (const part of stream.fullStream) {
      if (part.type === "error") throw part.error;
      if (part.type === "tool-call") calls.push([part.toolName, part.input]);
      if (part.type === "text-delta") text += part.text;
    }
    return { text, calls };
  });
  if (name !== "messages") {
    await check(`${name}_object`, async () => {
      await ask("weather_json");
      return (await generateText({ ...asked(name), output: Output.object({ schema: Weather }) })).output;
    });
  }
}

const openai = new OpenAI({ baseURL: url, apiKey: key, maxRetries: 0 });
const messages = [{ role: "user", content: QUESTION }];

await check("openai_parse", async () => {
  await ask("weather_json");
  const response_format = zodResponseFormat(Weather, "weather");
  return (await openai.chat.completions.parse({ model, messages, response_format })).choices[0].message.parsed;
});
await check("openai_run_tools", async () => {
  await ask("weather_turn");
  const runner = openai.chat.completions.runTools({
    model,
    messages,
    tools: [{
      type: "function",
      function: {
        name: "weather", parse: JSON.parse, function: ({ city }) => `12 degrees in ${city}`,
        parameters: { type: "object", properties: { city: { type: "string" } } },
      },
    }],
  });
  return await runner.finalContent();
});
await check("openai_responses", async () => {
  await ask("say");
  const stream = await openai.responses.create({ model, input: QUESTION, store: false, stream: true });
  let text = "";
  let last;
  for await (const event of stream) {
    if (event.type === "response.output_text.delta") text += event.delta;
    last = event;
  }
  return { text, whole: last.response.output[0].content[0].text };
});

const claude = new Anthropic({ baseURL: url.replace(/\/v1$/, ""), apiKey: key, maxRetries: 0 });
await check("anthropic_stream", async () => {
  await ask("weather_call");
  const tools = [{ name: "weather", input_schema: { type: "object", properties: { city: { type: "string" } } } }];
  const answer = await claude.messages.stream({ model, messages, tools, max_tokens: 256 }).finalMessage();
  return { stop: answer.stop_reason, calls: answer.content.map((block) => [block.name, block.input]) };
});
process.exit(0);
