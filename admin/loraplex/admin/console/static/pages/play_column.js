/** A column of the playground: its model, the turns of its conversation, and the results of calls that it waits for. */
import { api, path } from "../lib/api.js";
import { openCalls } from "../lib/conversation.js";
import { html } from "../lib/html.js";
import { usePoll } from "../lib/poll.js";
import { caller, mayCall } from "../lib/store.js";
import { dateTime, ErrorBox, Field } from "../lib/ui.js";
import { Classes } from "./classes.js";
import { Tokens } from "./play_tokens.js";

const MODELS_LISTED = 200;
const VERSIONS_LISTED = 500;

/** @typedef {import("../lib/conversation.js").Column} ColumnState */
/** @typedef {import("../lib/conversation.js").Turn} Turn */

/**
 * @param {{ number: number, tenant: string, column: ColumnState, models: import("../lib/poll.js").Poll<any>, isRunning: boolean,
 *   onChange: (changed: Partial<ColumnState>) => void, onRemove: (() => void) | null }} props
 */
export function Column({ number, tenant, column, models, isRunning, onChange, onRemove }) {
  const { model, turns, results } = column;
  const onModel = (/** @type {any} */ event) => onChange({ model: event.target.value });
  const calls = isRunning ? [] : openCalls(column);
  return html`<section class="card column" aria-label="Column ${number}">
    <p class="head">
      <${Models} number=${number} tenant=${tenant} model=${model} models=${models} disabled=${isRunning} onModel=${onModel} />
      ${onRemove && html`<button type="button" disabled=${isRunning} aria-label="Remove column ${number}" onClick=${onRemove}>×</button>`}
    </p>
    <input data-testid="play-model" aria-label="Model of column ${number}, as it is asked for" value=${model} disabled=${isRunning}
      spellcheck=${false} autocomplete="off" onInput=${onModel} />
    ${turns.length === 0 && html`<p class="empty">Nothing was asked yet.</p>`}
    ${turns.map((turn, at) => html`<${TurnOf} key=${at} turn=${turn} />`)}
    ${calls.map(
      (call, at) => html`<${Field} key=${at} label="Result of ${call.name}" hint="It is sent with the next turn, which may have no words of yours.">
        <textarea data-testid="play-result" rows="2" value=${results[at] ?? ""}
          onInput=${(/** @type {any} */ event) => onChange({ results: calls.map((_, other) => (other === at ? event.target.value : (results[other] ?? ""))) })}
        ></textarea>
      <//>`,
    )}
  </section>`;
}

/**
 * The models of the key and the versions of the one that is chosen, as a list.
 * @param {{ number: number, tenant: string, model: string, models: import("../lib/poll.js").Poll<any>, disabled: boolean,
 *   onModel: (event: any) => void }} props
 */
function Models({ number, tenant, model, models, disabled, onModel }) {
  /** @type {string[]} */
  const names = (models.data?.data ?? []).slice(0, MODELS_LISTED).map((/** @type {any} */ one) => one.id);
  const name = model.split("@")[0];
  const isAdapter = name !== caller.value?.base.name && names.includes(name);
  const reads = isAdapter && mayCall("adapters:read") ? name : "";
  const versions = usePoll((signal) => (reads ? readVersions(tenant, reads, signal) : Promise.resolve([])), [reads]);
  const rows = versions.data ?? [];
  const isListed = names.includes(model) || rows.some((row) => row.id === model);
  const none = versions.error ? versions.error.message : "Versions are shown to keys with adapters:read";
  return html`<select data-testid="play-list" aria-label="Model of column ${number}, from a list" value=${isListed ? model : ""}
    disabled=${disabled} onChange=${onModel}>
    ${!isListed && html`<option value="" disabled>${models.error ? models.error.message : "As typed below"}</option>`}
    <optgroup label="Models">
      ${names.map((one) => html`<option key=${one} value=${one}>${one}</option>`)}
    </optgroup>
    ${isAdapter &&
    html`<optgroup label="Versions of ${name}">
      ${rows.map((row) => html`<option key=${row.id} value=${row.id}>${row.id} · ${dateTime(row.at)}</option>`)}
      ${(versions.error || !reads) && html`<option disabled>${none}</option>`}
    </optgroup>`}
  </select>`;
}

/**
 * The versions that can be asked, the newest first.
 * @param {string} tenant @param {string} name @param {AbortSignal} signal
 * @returns {Promise<{ id: string, at: string }[]>}
 */
async function readVersions(tenant, name, signal) {
  const all = await api.list(path`tenants/${tenant}/adapters/${name}/versions`, {}, { signal, most: VERSIONS_LISTED });
  const ready = all.filter((one) => one.state === "ready").reverse();
  return ready.map((one) => ({ id: `${name}@${one.version}`, at: one.created_at }));
}

/** @param {{ turn: Turn }} props */
function TurnOf({ turn }) {
  const { text, results, answer: shown } = turn;
  const isOver = shown.tokens.length > 0;
  return html`<div class="turn" data-testid="play-turn">
    ${results.map((result) => html`<div class="said" data-testid="play-told"><p class="note">Result of ${result.name}</p>${result.text}</div>`)}
    ${text && html`<div class="said" data-testid="play-said">${text}</div>`}
    <div class=${isOver ? "hidden" : "answer"} data-testid="play-answer" aria-live="polite" aria-busy=${shown.status === "streaming"}>
      ${shown.classes ? html`<${Classes} ...${shown.classes} />` : shown.text}</div>
    ${isOver && html`<${Tokens} tokens=${shown.tokens} />`}
    ${shown.calls.map(
      (call) => html`<div data-testid="play-call"><p>Calls <code>${call.name}</code> with</p><pre tabindex="0">${call.arguments}</pre></div>`,
    )}
    ${shown.error && html`<${ErrorBox} error=${shown.error} />`}
    <p class="note" data-testid="play-status">${facts(turn).join(" · ")}</p>
  </div>`;
}

/** @param {Turn} turn */
function facts({ body, answer: shown }) {
  return [
    shown.status,
    shown.adapter,
    shown.state,
    shown.firstMs === null ? "" : `first token after ${Math.round(shown.firstMs)} ms`,
    shown.usage ? `${shown.usage.prompt_tokens} + ${shown.usage.completion_tokens} tokens` : "",
    body.response_format && shown.text && ["stop", "length"].includes(shown.status) ? parses(shown.text) : "",
  ].filter(Boolean);
}

/** @param {string} text */
function parses(text) {
  try {
    JSON.parse(text);
    return "whole JSON";
  } catch {
    return "no whole JSON";
  }
}
