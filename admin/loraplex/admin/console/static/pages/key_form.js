/** The form of a key: a new one, or what changes of one. */
import { html, useEffect, useRef, useState } from "../lib/html.js";
import { KEY_LIMITS } from "../lib/limits.js";
import * as ui from "../lib/ui.js";
import { LimitFields, limitChanges, textsOf } from "./limit_fields.js";

const SCOPES = ["inference", "adapters:read", "adapters:write", "adapters:train", "usage:read"];
const MINUTE_MS = 60_000;

/** As `<input type="datetime-local">` has it, in the viewer's zone. @param {string | null} at RFC 3339. */
function localTime(at) {
  if (!at) return "";
  const time = new Date(at);
  return new Date(time.getTime() - time.getTimezoneOffset() * MINUTE_MS).toISOString().slice(0, 16);
}

/** @param {any} row Of a key; null: a new one. @returns {Record<string, string>} */
const fieldsOf = (row) => textsOf({
  ...Object.fromEntries(KEY_LIMITS.map((name) => [name, row?.limits[name]])),
  name: row?.name,
  models: row?.models?.join(", "),
  expires_at: localTime(row?.expires_at),
});

/** @param {string} text @returns {string[]} */
const modelsIn = (text) => text.split(/[\s,]+/).filter(Boolean);

/** A list with what the form added to its own one, and without what it took away. @param {string[]} now @param {string[]} before @param {string[]} after */
function merged(now, before, after) {
  const kept = now.filter((one) => after.includes(one) || !before.includes(one));
  return [...kept, ...after.filter((one) => !before.includes(one) && !kept.includes(one))];
}

/**
 * What was touched, on top of what the key has by now: all else keeps what it has, and what others took from it stays away.
 * @param {any} now The key; null: a new one. @param {Record<string, string>} before @param {Record<string, string>} after
 */
function changesOf(now, before, after) {
  const [had, has] = [modelsIn(before.models), modelsIn(after.models)];
  const models = has.length ? merged(now?.models ?? [], had, has) : null;
  return {
    ...(after.name !== before.name && { name: after.name.trim() || null }),
    ...(String(has) !== String(had) && { models }),
    ...(after.expires_at !== before.expires_at && { expires_at: after.expires_at ? new Date(after.expires_at).toISOString() : null }),
    ...limitChanges(KEY_LIMITS, before, after),
  };
}

/**
 * @param {{ row: any, onSend: (bodyOf: (now: any) => any) => Promise<boolean>, onClose?: () => void }} props `row`: the key that changes;
 *   null makes one. `onSend` gets the body for a key as it is by then, and tells whether the server took it: then the form of a new key is
 *   empty again.
 */
export function KeyForm({ row, onSend, onClose }) {
  const [before] = useState(fieldsOf(row)); // the page reads the keys again and again
  const [after, setAfter] = useState(before);
  const [had] = useState(/** @type {string[]} */ (row?.scopes ?? ["inference"]));
  const [scopes, setScopes] = useState(had);
  const [busy, setBusy] = useState(false);
  const first = useRef(/** @type {HTMLInputElement | null} */ (null));
  useEffect(() => {
    if (row) first.current?.focus();
  }, []);

  /** @param {Event} event */
  async function onSubmit(event) {
    event.preventDefault();
    setBusy(true);
    const isSame = row && SCOPES.every((one) => scopes.includes(one) === had.includes(one));
    const isTaken = await onSend((now) => ({
      ...changesOf(now, before, after),
      ...(!isSame && { scopes: now ? merged(now.scopes, had, scopes) : scopes }),
    }));
    setBusy(false);
    if (isTaken && !row) setAfter(before);
  }

  /** @param {string} name @param {string} text */
  const onText = (name, text) => setAfter({ ...after, [name]: text });
  /** @param {string} name */
  const told = (name) => ({
    "data-testid": `key-${name}`,
    value: after[name],
    autocomplete: "off",
    onInput: (/** @type {any} */ event) => onText(name, event.target.value),
  });
  /** @param {string} scope */
  const toggle = (scope) => setScopes(SCOPES.filter((one) => scopes.includes(one) !== (one === scope)));

  return html`<form onSubmit=${onSubmit}>
    ${row && html`<h3>Change the key ${row.name ?? row.id}</h3>`}
    <div class="form">
      <${ui.Field} label="Name"><input ref=${first} maxlength="200" ...${told("name")} /><//>
      <fieldset><legend>Scopes</legend>
        ${SCOPES.map((scope) => html`<label><input type="checkbox" checked=${scopes.includes(scope)}
          data-testid=${`scope-${scope}`} onChange=${() => toggle(scope)} /> ${scope}</label>`)}
      </fieldset>
      <button type="submit" class="primary" data-testid=${row ? "key-save" : "key-create"} disabled=${busy || !scopes.length}>
        ${row ? "Save" : "Create a key"}</button>
      ${row && html`<button type="button" onClick=${onClose}>Cancel</button>`}
    </div>
    <details open=${Boolean(row)}><summary data-testid="key-more">Models, end and limits</summary>
      <div class="form filters">
        <${ui.Field} label="Models, by commas"><input placeholder="all" spellcheck=${false} ...${told("models")} /><//>
        <${ui.Field} label="Ends"><input type="datetime-local" ...${told("expires_at")} /><//>
        <${LimitFields} of="key" names=${KEY_LIMITS} texts=${after} onText=${onText} />
      </div>
    </details>
  </form>`;
}
