/** A tenant's name, weight and limits, to be changed by operators. */
import { api, path } from "../lib/api.js";
import { html, useState } from "../lib/html.js";
import { limitName } from "../lib/limits.js";
import * as ui from "../lib/ui.js";

const PERIODS = ["hour", "day", "month", "forever"];

/**
 * A button, and behind it the form.
 * @param {{ tenant: any, onSaved: () => void }} props `tenant`: as GET /tenants/{tenant} answers.
 */
export function TenantEditor({ tenant, onSaved }) {
  const [isOpen, setOpen] = useState(false);
  if (!isOpen) return html`<button type="button" data-testid="tenant-change" onClick=${() => setOpen(true)}>Change</button>`;
  return html`<${Form} tenant=${tenant} onClose=${() => setOpen(false)} onSaved=${() => (setOpen(false), onSaved())} />`;
}

/** @param {any} tenant @returns {Record<string, string>} What its fields have: nothing for no limit. */
const textsOf = ({ display_name, weight, limits }) =>
  Object.fromEntries(Object.entries({ display_name, weight, ...limits }).map(([name, value]) => [name, String(value ?? "")]));

/**
 * What differs, for PATCH: a limit that others changed meanwhile stays, if its field was not touched.
 * @param {Record<string, string>} before @param {Record<string, string>} after
 */
export function changesOf(before, after) {
  const { display_name, weight, ...limits } = Object.fromEntries(Object.entries(after).filter(([name, text]) => text !== before[name]));
  /** @type {Record<string, any>} */
  const body = {};
  if (display_name !== undefined) body.display_name = display_name.trim() || null;
  if (weight !== undefined) body.weight = Number(weight);
  /** @type {Record<string, any>} */
  const changed = Object.fromEntries(Object.entries(limits).map(([name, text]) => [name, text === "" ? null : name === "budget_period" ? text : Number(text)]));
  // A budget has a period, and a period its budget. That of a budget that only becomes another is not sent untouched.
  if (changed.token_budget === null) changed.budget_period = null;
  else if ("token_budget" in changed && before.token_budget === "") changed.budget_period = after.budget_period || "month";
  else if (after.token_budget === "") delete changed.budget_period;
  if (Object.keys(changed).length) body.limits = changed;
  return body;
}

/** @param {{ tenant: any, onClose: () => void, onSaved: () => void }} props */
function Form({ tenant, onClose, onSaved }) {
  const [before] = useState(textsOf(tenant)); // the page reads the tenant again and again
  const [after, setAfter] = useState(before);
  const [error, setError] = useState(/** @type {any} */ (null));
  const [busy, setBusy] = useState(false);

  /** @param {Event} event */
  async function onSubmit(event) {
    event.preventDefault();
    setBusy(true);
    setError(null);
    try {
      const body = changesOf(before, after);
      if (Object.keys(body).length) await api.send("PATCH", path`tenants/${tenant.id}`, body);
      onSaved();
    } catch (refused) {
      setError(refused);
      setBusy(false);
    }
  }

  /** @param {string} name */
  const told = (name) => ({
    "data-testid": `set-${name}`,
    value: after[name],
    onInput: (/** @type {any} */ event) => setAfter({ ...after, [name]: event.target.value }),
  });
  /** @param {string} name */
  const control = (name) => name === "budget_period"
    ? html`<select ...${told(name)} value=${after[name] || "month"}>${PERIODS.map((one) => html`<option value=${one}>${one}</option>`)}</select>`
    : html`<input type="number" min="1" step="1" placeholder="none" ...${told(name)} />`;
  return html`<form onSubmit=${onSubmit}>
    <p class="note">An empty field is no limit. What changes holds for the next requests.</p>
    <div class="form filters">
      <${ui.Field} label="Name"><input maxlength="200" autocomplete="off" ...${told("display_name")} /><//>
      <${ui.Field} label="Weight"><input type="number" min="0" step="any" required ...${told("weight")} /><//>
      ${Object.keys(tenant.limits).map((name) => html`<${ui.Field} key=${name} label=${limitName(name) + (name.includes("bytes_") ? ", bytes" : "")}>
        ${control(name)}
      <//>`)}
    </div>
    ${error && html`<${ui.ErrorBox} error=${error} />`}
    <div class="actions">
      <button type="submit" class="primary" data-testid="tenant-save" disabled=${busy}>Save</button>
      <button type="button" onClick=${onClose}>Cancel</button>
    </div>
  </form>`;
}
