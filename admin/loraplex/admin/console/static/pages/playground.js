/** Playground: the base and versions of an adapter side by side, with one seed. Only on the data port. */
import { api, path, urlOf } from "../lib/api.js";
import { canAsk, Elsewhere } from "../lib/elsewhere.js";
import { html, useEffect, useRef, useState } from "../lib/html.js";
import { place } from "../lib/place.js";
import { usePoll } from "../lib/poll.js";
import { caller } from "../lib/store.js";
import { ErrorBox, Field, NumberInput, Page, Section } from "../lib/ui.js";
import { events, piece } from "../lib/stream.js";
import { Classes } from "./classes.js";

const MAX_COLUMNS = 4;
const MODELS_LISTED = 200;
const WHY = "Prompts go to the data port, so the playground is";

/**
 * @typedef {{ prompt: string, system: string, seed: number, temperature: number, maxTokens: number }} Ask
 * @typedef {{ text: string, status: string, error: any, adapter: string, state: string, firstMs: number | null, usage: any,
 *   classes: any }} Answer `classes`: what `Classes` shows, of a version that classifies.
 */

/** @type {Answer} */
const NOTHING = { text: "", status: "", error: null, adapter: "", state: "", firstMs: null, usage: null, classes: null };

/** @param {{ tenant?: string, adapter?: string }} props `adapter`: compared with the base; without it, the base alone. */
export default function Playground({ tenant = "", adapter = "" }) {
  const title = tenant ? `Playground of ${tenant}` : "Playground";
  const base = caller.value?.base.name ?? "";
  const [models, setModels] = useState(adapter ? [base, adapter] : [base]);
  const [answers, setAnswers] = useState(models.map(() => NOTHING));
  const [ask, setAsk] = useState(
    /** @type {Ask} */ ({ prompt: "", system: "", seed: 7, temperature: 0.7, maxTokens: 128 }),
  );
  const [isRunning, setRunning] = useState(false);
  const stop = useRef(/** @type {AbortController | null} */ (null));
  const known = usePoll((signal) => (canAsk() ? api.get("/v1/models", {}, { signal }) : Promise.resolve(null)), []);
  useEffect(() => () => stop.current?.abort(), []);
  if (!canAsk()) return html`<${Elsewhere} title=${title} why=${WHY} at=${tenant && `#/${place.value}`} />`;

  /** @param {number} place @param {Partial<Answer>} changed */
  const change = (place, changed) =>
    setAnswers((before) => before.map((one, at) => (at === place ? { ...one, ...changed } : one)));

  /** @param {Event} event */
  async function onSend(event) {
    event.preventDefault();
    const control = new AbortController();
    stop.current = control;
    setAnswers(models.map(() => ({ ...NOTHING, status: "waiting" })));
    setRunning(true);
    await Promise.all(models.map((model, place) => answer(model, ask, control.signal, (changed) => change(place, changed))));
    setRunning(false);
  }

  /** @param {string[]} next */
  function choose(next) {
    setModels(next);
    setAnswers(next.map((model, place) => (model === models[place] ? answers[place] : NOTHING)));
  }

  return html`<${Page} title=${title}>
    <form class="ask" onSubmit=${onSend}>
      <${Prompt} ask=${ask} onChange=${setAsk} />
      <p class="actions">
        <button class="primary" data-testid="play-send" disabled=${isRunning || !ask.prompt}>Send</button>
        <button type="button" data-testid="play-stop" disabled=${!isRunning} onClick=${() => stop.current?.abort()}>Stop</button>
        <button type="button" data-testid="play-add" disabled=${isRunning || models.length >= MAX_COLUMNS}
          onClick=${() => choose([...models, base])}>Add a column</button>
      </p>
    </form>
    <datalist id="models">
      ${(known.data?.data ?? []).slice(0, MODELS_LISTED).map((/** @type {any} */ one) => html`<option value=${one.id} />`)}
    </datalist>
    <div class="columns">
      ${models.map(
        (model, place) => html`<${Column}
          key=${place}
          model=${model}
          answer=${answers[place] ?? NOTHING}
          isRunning=${isRunning}
          onModel=${(/** @type {string} */ value) => choose(models.map((one, at) => (at === place ? value : one)))}
          onRemove=${models.length > 1 ? () => choose(models.filter((_, at) => at !== place)) : null}
        />`,
      )}
    </div>
    <${Code} model=${models[models.length - 1]} ask=${ask} classifies=${Boolean(answers[models.length - 1]?.classes)} />
  <//>`;
}

/**
 * One answer into `change`, whatever becomes of it: streamed, or the classes of a version that writes no text.
 * @param {string} model
 * @param {Ask} ask
 * @param {AbortSignal} signal
 * @param {(changed: Partial<Answer>) => void} change
 */
async function answer(model, ask, signal, change) {
  try {
    const { head } = await api.get(path`/v1/models/${model}`, {}, { signal });
    await (head ? classify(model, head, ask, signal, change) : stream(model, ask, signal, change));
  } catch (error) {
    change(signal.aborted ? { status: "stopped" } : { status: "failed", error });
  }
}

/**
 * Throws ApiError.
 * @param {string} model @param {import("./classes.js").Head} head @param {Ask} ask @param {AbortSignal} signal
 * @param {(changed: Partial<Answer>) => void} change
 */
async function classify(model, head, ask, signal, change) {
  const got = await api.request("POST", "/v1/classify", { json: { model, input: ask.prompt }, signal });
  const { data, usage } = await got.json();
  const text = { model, prompt: ask.prompt, return_token_strs: true };
  const names = data[0].tokens ? (await api.send("POST", "/tokenize", text, { signal })).body.token_strs : [];
  change({ ...servedBy(got), status: "classified", usage, classes: { head, item: data[0], tokens: names } });
}

/** @param {Response} got */
const servedBy = (got) => ({
  adapter: got.headers.get("x-loraplex-adapter") ?? "base",
  state: got.headers.get("x-loraplex-adapter-state") ?? "",
});

/**
 * Throws ApiError.
 * @param {string} model @param {Ask} ask @param {AbortSignal} signal @param {(changed: Partial<Answer>) => void} change
 */
async function stream(model, ask, signal, change) {
  const began = performance.now();
  let text = "";
  const json = { ...bodyOf(model, ask), stream: true, stream_options: { include_usage: true } };
  const got = await api.request("POST", "/v1/chat/completions", { json, signal });
  change({ ...servedBy(got), status: "streaming" });
  for await (const document of events(/** @type {ReadableStream<Uint8Array>} */ (got.body))) {
    const found = piece(document);
    if (found.error) throw found.error;
    if (found.text && !text) change({ firstMs: performance.now() - began });
    text += found.text;
    if (found.text) change({ text });
    if (found.usage) change({ usage: found.usage });
    if (found.finish) change({ status: found.finish });
  }
}

/** The body of the request, without what streams it. @param {string} model @param {Ask} ask */
function bodyOf(model, ask) {
  const system = ask.system ? [{ role: "system", content: ask.system }] : [];
  return {
    model,
    messages: [...system, { role: "user", content: ask.prompt }],
    seed: ask.seed,
    temperature: ask.temperature,
    max_tokens: ask.maxTokens,
  };
}

/** @param {{ ask: Ask, onChange: (ask: Ask) => void }} props */
function Prompt({ ask, onChange }) {
  /** @param {keyof Ask} field */
  const set = (field) => (/** @type {any} */ event) => onChange({ ...ask, [field]: event.target.value });
  /** @param {keyof Ask} field */
  const setNumber = (field) => (/** @type {number} */ value) => onChange({ ...ask, [field]: value });
  return html`<${Field} label="Prompt">
      <textarea data-testid="play-prompt" rows="3" value=${ask.prompt} onInput=${set("prompt")}></textarea>
    <//>
    <div class="form">
      <${Field} label="System prompt"><input value=${ask.system} onInput=${set("system")} /><//>
      <${Field} label="Seed"><${NumberInput} value=${ask.seed} onNumber=${setNumber("seed")} /><//>
      <${Field} label="Temperature">
        <${NumberInput} min=${0} max=${2} step=${0.1} value=${ask.temperature} onNumber=${setNumber("temperature")} />
      <//>
      <${Field} label="Most tokens"><${NumberInput} min=${1} value=${ask.maxTokens} onNumber=${setNumber("maxTokens")} /><//>
    </div>`;
}

/**
 * @param {{ model: string, answer: Answer, isRunning: boolean, onModel: (model: string) => void,
 *   onRemove: (() => void) | null }} props
 */
function Column({ model, answer: shown, isRunning, onModel, onRemove }) {
  return html`<section class="card column">
    <p class="head">
      <input data-testid="play-model" list="models" aria-label="Model" value=${model} disabled=${isRunning} spellcheck=${false}
        autocomplete="off" onInput=${(/** @type {any} */ event) => onModel(event.target.value)} />
      ${onRemove
        ? html`<button type="button" disabled=${isRunning} aria-label="Remove ${model}" onClick=${onRemove}>×</button>`
        : null}
    </p>
    <div class="answer" data-testid="play-answer" aria-live="polite" aria-busy=${shown.status === "streaming"}>
      ${shown.classes ? html`<${Classes} ...${shown.classes} />` : shown.text}</div>
    ${shown.error ? html`<${ErrorBox} error=${shown.error} />` : null}
    <p class="note" data-testid="play-status">${facts(shown).join(" · ")}</p>
  </section>`;
}

/** @param {Answer} shown */
function facts(shown) {
  return [
    shown.status,
    shown.adapter,
    shown.state,
    shown.firstMs === null ? "" : `first token after ${Math.round(shown.firstMs)} ms`,
    shown.usage ? `${shown.usage.prompt_tokens} + ${shown.usage.completion_tokens} tokens` : "",
  ].filter(Boolean);
}

/** The same request for a terminal and for Python. @param {{ model: string, ask: Ask, classifies: boolean }} props */
function Code({ model, ask, classifies }) {
  const prompt = ask.prompt || "…";
  const body = classifies ? { model, input: prompt } : bodyOf(model, { ...ask, prompt });
  const root = urlOf("/v1").href;
  const curl = [
    `curl ${root}/${classifies ? "classify" : "chat/completions"} \\`,
    "  -H 'Authorization: Bearer '\"$LORAPLEX_API_KEY\" \\",
    "  -H 'Content-Type: application/json' \\",
    `  -d '${JSON.stringify(body).replaceAll("'", "'\\''")}'`,
  ].join("\n");
  return html`<${Section} title="The same request elsewhere" note="The request of the last column, to ${model}. LORAPLEX_API_KEY holds your key.">
    <h3>curl</h3>
    <pre data-testid="play-curl" tabindex="0">${curl}</pre>
    ${"messages" in body && html`<h3>openai for Python</h3>
      <pre data-testid="play-openai" tabindex="0">${pythonOf(root, body)}</pre>`}
  <//>`;
}

/** @param {string} root @param {Record<string, any>} body */
function pythonOf(root, { messages, ...rest }) {
  const fields = Object.entries(rest).map(([name, value]) => `    ${name}=${JSON.stringify(value)},`);
  return [
    "import os",
    "",
    "from openai import OpenAI",
    "",
    `client = OpenAI(base_url=${JSON.stringify(root)}, api_key=os.environ["LORAPLEX_API_KEY"])`,
    "answer = client.chat.completions.create(",
    ...fields,
    `    messages=${JSON.stringify(messages)},`,
    ")",
    "print(answer.choices[0].message.content)",
  ].join("\n");
}
