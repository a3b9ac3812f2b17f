/** A tenant's or a key's limits: as lines, as fields, and what of them was changed. */
import { html } from "../lib/html.js";
import { limitLines, limitName } from "../lib/limits.js";
import * as ui from "../lib/ui.js";

const PERIODS = ["hour", "day", "month", "forever"];

/** @param {Record<string, any>} values @returns {Record<string, string>} What their fields have: nothing for no limit. */
export const textsOf = (values) => Object.fromEntries(Object.entries(values).map(([name, value]) => [name, String(value ?? "")]));

/**
 * What differs, for PATCH: a limit that others changed meanwhile stays, if its field was not touched.
 * @param {string[]} names The limits. @param {Record<string, string>} before @param {Record<string, string>} after
 * @returns {{ limits?: Record<string, any> }}
 */
export function limitChanges(names, before, after) {
  /** @type {Record<string, any>} */
  const changed = {};
  for (const name of names) {
    const text = after[name];
    if (text !== before[name]) changed[name] = text === "" ? null : name === "budget_period" ? text : Number(text);
  }
  // A budget has a period, and a period its budget. That of a budget that only becomes another is not sent untouched.
  if (changed.token_budget === null) changed.budget_period = null;
  else if ("token_budget" in changed && before.token_budget === "") changed.budget_period = after.budget_period || "month";
  else if (after.token_budget === "") delete changed.budget_period;
  return Object.keys(changed).length ? { limits: changed } : {};
}

/**
 * @param {{ of: string, names: string[], texts: Record<string, string>, onText: (name: string, text: string) => void }} props
 *   `of`: the form that they are in.
 */
export function LimitFields({ of, names, texts, onText }) {
  /** @param {string} name */
  function control(name) {
    const told = { "data-testid": `${of}-${name}`, onInput: (/** @type {any} */ event) => onText(name, event.target.value) };
    if (name !== "budget_period") return html`<input type="number" min="1" step="1" placeholder="none" value=${texts[name]} ...${told} />`;
    return html`<select value=${texts[name] || "month"} ...${told}>${PERIODS.map((one) => html`<option value=${one}>${one}</option>`)}</select>`;
  }
  return names.map((name) => html`<${ui.Field} key=${name} label=${limitName(name) + (name.includes("bytes_") ? ", bytes" : "")}>
    ${control(name)}
  <//>`);
}

/** What is set. @param {{ of: any }} props A tenant or a key. */
export function LimitLines({ of }) {
  const lines = limitLines(of);
  return html`<div>${lines.length ? lines.map((line) => html`<div>${line}</div>`) : html`<span class="note">none</span>`}</div>`;
}
