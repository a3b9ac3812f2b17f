/** The choice of the tenant that a page shows. A key's is its own. */
import { html, useEffect, useId, useRef, useState } from "./html.js";
import { usePoll } from "./poll.js";
import { isOperator, tenantIds } from "./store.js";
import { Empty, Field, Loaded } from "./ui.js";

/**
 * An operator types or picks an id; it holds once it is one that exists, or with Enter.
 * @param {{ tenant: string, at: string, onPick: (id: string) => void, onFirst: (id: string) => void }} props `tenant`: the one that
 *   is shown, or ""; `at`: the place; `onFirst`: nobody chose, and the page is of no adapter, which another tenant may not have.
 */
export function TenantPicker({ tenant, at, onPick, onFirst }) {
  const poll = usePoll(tenantIds, []);
  const ids = poll.data ?? [];
  /** What is typed, while `of` is the tenant that is shown. */
  const [typed, setTyped] = useState({ of: tenant, text: tenant });
  const options = useId();
  const input = useRef(/** @type {HTMLInputElement | null} */ (null));
  useEffect(() => {
    const found = input.current;
    if (!found || !ids.length) return;
    if (document.activeElement === found) onText(found.value); // typed before the list was there
    else if (!tenant && !at.includes("/")) onFirst(ids[0]);
  }, [poll.data, at]);

  /** @param {string} text @param {boolean} [isWhole] */
  function onText(text, isWhole = ids.includes(text)) {
    setTyped({ of: tenant, text: isWhole ? tenant : text });
    if (isWhole && text && text !== tenant) onPick(text);
  }

  return html`<div class="place"><${Field} label="Tenant">
      <input ref=${input} data-testid="tenant" placeholder=${tenant} list=${options} value=${typed.of === tenant ? typed.text : tenant}
        readonly=${!isOperator.value} autocomplete="off" spellcheck=${false} onFocus=${poll.reload}
        onInput=${(/** @type {any} */ event) => onText(event.target.value)}
        onChange=${(/** @type {any} */ event) => onText(event.target.value.trim(), true)} />
      <datalist id=${options}>${ids.map((id) => html`<option value=${id} />`)}</datalist>
    <//></div>
    ${!tenant && html`<${Loaded} poll=${poll}>${() => html`<${Empty}>${
      ids.length
        ? "This address names no tenant: choose one."
        : html`There is no tenant yet. <a href="#/all-tenants">Make one.</a>`
    }<//>`}<//>`}`;
}
