/** The request of the playground's last column for a terminal and for Python. */
import { urlOf } from "../lib/api.js";
import { bodyOf, next } from "../lib/conversation.js";
import { html } from "../lib/html.js";
import { Section } from "../lib/ui.js";

/**
 * The request that Send would send, or with nothing typed the last one.
 * @param {{ column: import("../lib/conversation.js").Column, ask: import("../lib/conversation.js").Ask, kinds: Map<string, boolean> }} props
 *   `kinds`: whether a model classifies, by its name, once it was asked.
 */
export function Code({ column, ask, kinds }) {
  const last = column.turns.at(-1);
  const told = next(column, ask.prompt) ?? (last ? null : { before: [], text: "…", results: [] });
  const chat = told ? bodyOf(column.model, ask, told) : last?.body;
  const classifies = kinds.get(chat.model) ?? false;
  const body = classifies ? { model: chat.model, input: told ? told.text : last?.text } : chat;
  const root = urlOf("/v1").href;
  const curl = [
    `curl ${root}/${classifies ? "classify" : "chat/completions"} \\`,
    "  -H 'Authorization: Bearer '\"$LORAPLEX_API_KEY\" \\",
    "  -H 'Content-Type: application/json' \\",
    `  -d '${JSON.stringify(body).replaceAll("'", "'\\''")}'`,
  ].join("\n");
  const which = told ? "The next request" : "The last request";
  const unknown = kinds.has(chat.model) ? "" : " A version that classifies is asked at /v1/classify instead, which is shown here after its first turn.";
  return html`<${Section} title="The same request elsewhere"
    note="${which} of the last column, to ${chat.model}. LORAPLEX_API_KEY holds your key.${unknown}">
    <h3>curl</h3>
    <pre data-testid="play-curl" tabindex="0">${curl}</pre>
    ${!classifies && html`<h3>openai for Python</h3>
      <pre data-testid="play-openai" tabindex="0">${pythonOf(root, body)}</pre>`}
  <//>`;
}

/** @param {string} root @param {Record<string, any>} body */
function pythonOf(root, { messages, ...rest }) {
  return [
    "import os",
    "",
    "from openai import OpenAI",
    "",
    `client = OpenAI(base_url=${literal(root)}, api_key=os.environ["LORAPLEX_API_KEY"])`,
    "answer = client.chat.completions.create(",
    ...Object.entries(rest).map(([name, value]) => `    ${name}=${literal(value)},`),
    `    messages=${literal(messages)},`,
    ")",
    `print(answer.choices[0].message${rest.tools ? "" : ".content"})`,
  ].join("\n");
}

/** A value of JSON as Python writes it. @param {any} value @returns {string} */
function literal(value) {
  if (value === null) return "None";
  if (typeof value === "boolean") return value ? "True" : "False";
  if (Array.isArray(value)) return `[${value.map(literal).join(", ")}]`;
  if (typeof value === "object") return `{${Object.entries(value).map(([name, one]) => `${JSON.stringify(name)}: ${literal(one)}`).join(", ")}}`;
  return JSON.stringify(value);
}
