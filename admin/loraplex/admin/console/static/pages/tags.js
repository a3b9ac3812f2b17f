/** Tags of an adapter: shown, as links to all adapters that have them, and changed. */
import { api, path } from "../lib/api.js";
import { html, useState } from "../lib/html.js";
import { isOperator, mayCall } from "../lib/store.js";
import * as ui from "../lib/ui.js";

/** The most that an adapter has, and the longest. */
const MOST_CHARS = 8 * 33;

/** @param {string} tenant @param {string} name @param {string[]} add @param {string[]} remove */
export const editTags = (tenant, name, add, remove) => api.send("PATCH", path`tenants/${tenant}/adapters/${name}`, { add, remove });

/** A tag; for operators a link to all adapters that have it. @param {{ tag: string }} props */
export function TagLink({ tag }) {
  if (!isOperator.value) return html`<${ui.Badge} kind="off">${tag}<//>`;
  return html`<a class="badge off" data-testid="tag" href=${`#/all-adapters?${new URLSearchParams({ tag })}`}>${tag}</a>`;
}

/** @param {{ tenant: string, name: string, tags: string[], onSaved: () => void }} props */
export function Tags({ tenant, name, tags, onSaved }) {
  const [typed, setTyped] = useState(/** @type {{ text: string, before: string[] } | null} */ (null));
  const { busy, error, run, forget } = ui.useWork();

  /** @param {Event} event */
  function onSubmit(event) {
    event.preventDefault();
    const wanted = typed?.text.split(/[\s,]+/).filter(Boolean) ?? [];
    const before = typed?.before ?? [];
    run(async () => {
      // Only what was changed here: a tag that another operator gives meanwhile stays.
      await editTags(tenant, name, wanted.filter((tag) => !before.includes(tag)), before.filter((tag) => !wanted.includes(tag)));
      setTyped(null);
      onSaved();
    });
  }

  const shown = html`Tags: ${tags.length ? tags.map((tag) => html`<${TagLink} tag=${tag} /> `) : html`<span class="note">none</span> `}`;
  if (typed === null) {
    return html`<p data-testid="tags">${shown}
      ${mayCall("adapters:write") && html`<button type="button" data-testid="tags-change" onClick=${() => setTyped({ text: tags.join(" "), before: tags })}>Change tags</button>`}</p>`;
  }
  return html`<form class="form" onSubmit=${onSubmit}>
      <${ui.Field} label="Tags, with spaces between" hint="At most 8, each at most 32 of a-z, 0-9, '.', '_' and '-'.">
        <input data-testid="tags-input" value=${typed.text} maxlength=${MOST_CHARS} spellcheck=${false} autocomplete="off"
          onInput=${(/** @type {any} */ event) => setTyped({ ...typed, text: event.target.value })} />
      <//>
      <button type="submit" class="primary" data-testid="tags-save" disabled=${busy}>Save tags</button>
      <button type="button" onClick=${() => (setTyped(null), forget())}>Cancel</button>
    </form>
    ${error && html`<${ui.ErrorBox} error=${error} />`}`;
}
