/** The choice of the tenant that a page shows. A key's is its own. */
import { html, signal, useEffect, useId, useRef, useState } from "./html.js";
import { usePoll } from "./poll.js";
import { isOperator, tenant, tenantIds } from "./store.js";
import { Empty, Field, Loaded } from "./ui.js";

/** The list that the picker reads. @type {{ value: import("./poll.js").Poll<string[]> }} */
const list = signal({ data: null, error: null, loading: true, reload: () => {} });

/** An operator types or picks an id; it holds once it is one that exists, or with Enter. */
export function TenantPicker() {
  const poll = usePoll(tenantIds, []);
  const ids = poll.data ?? [];
  const [typed, setTyped] = useState(tenant.value);
  const options = useId();
  const input = useRef(/** @type {HTMLElement | null} */ (null));
  useEffect(() => {
    list.value = poll;
    if (ids.includes(typed)) tenant.value = typed; // before the list was there
    if (!tenant.value && !typed && ids.length) {
      tenant.value = ids[0];
      // Not into the middle of typing.
      if (document.activeElement !== input.current) setTyped(ids[0]);
    }
  }, [poll.data, poll.error, poll.loading]);

  /** @param {string} value */
  function onType(value) {
    setTyped(value);
    if (ids.includes(value)) tenant.value = value;
  }

  return html`<${Field} label="Tenant">
    <input ref=${input} data-testid="tenant" placeholder=${tenant.value} list=${options} value=${typed} readonly=${!isOperator.value} autocomplete="off"
      spellcheck=${false} onInput=${(/** @type {any} */ event) => onType(event.target.value)}
      onChange=${(/** @type {any} */ event) => (tenant.value = event.target.value.trim())} />
    <datalist id=${options}>${ids.map((id) => html`<option value=${id} />`)}</datalist>
  <//>`;
}

/** What a page shows while no tenant is chosen: why there is none. */
export function NoTenant() {
  return html`<${Loaded} poll=${list.value}>${() => html`<${Empty}>There is no tenant yet.
    <code>loraplex tenant create NAME</code> makes one.<//>`}<//>`;
}
