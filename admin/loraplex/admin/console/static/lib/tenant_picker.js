/** The choice of the tenant that a page shows. A key's is its own. */
import { html, useEffect, useId, useState } from "./html.js";
import { usePoll } from "./poll.js";
import { isOperator, tenantIds } from "./store.js";
import { Empty, Field, Loaded } from "./ui.js";

/**
 * An operator types or picks an id; it holds once it is one that exists, or with Enter.
 * @param {{ tenant: string, isAsked: boolean, onPick: (id: string, isFirst?: boolean) => void }} props `tenant`: the one that is
 *   shown, or ""; `isAsked`: the page is of one tenant and cannot take the first.
 */
export function TenantPicker({ tenant, isAsked, onPick }) {
  const poll = usePoll(tenantIds, []);
  const ids = poll.data ?? [];
  const [typed, setTyped] = useState(tenant);
  const options = useId();
  useEffect(() => {
    if (tenant) setTyped(tenant);
  }, [tenant]);
  useEffect(() => {
    if (typed !== tenant && ids.includes(typed)) onPick(typed); // typed before the list was there
    else if (!tenant && !typed && !isAsked && ids.length) onPick(ids[0], true);
  }, [poll.data]);

  /** @param {any} event */
  function onInput({ target: { value } }) {
    setTyped(value);
    if (ids.includes(value)) onPick(value);
  }

  /** @param {any} event */
  function onChange({ target }) {
    const id = target.value.trim();
    if (id && id !== tenant) onPick(id);
    else setTyped(tenant);
  }

  return html`<div class="place"><${Field} label="Tenant">
      <input data-testid="tenant" placeholder=${tenant} list=${options} value=${typed} readonly=${!isOperator.value} autocomplete="off"
        spellcheck=${false} onFocus=${poll.reload} onInput=${onInput} onChange=${onChange} />
      <datalist id=${options}>${ids.map((id) => html`<option value=${id} />`)}</datalist>
    <//></div>
    ${!tenant && html`<${Loaded} poll=${poll}>${() => html`<${Empty}>${
      ids.length
        ? "This address names no tenant: choose one."
        : html`There is no tenant yet. <code>loraplex tenant create NAME</code> makes one.`
    }<//>`}<//>`}`;
}
