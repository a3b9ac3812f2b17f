/** The choice of the tenant that a page shows. A key's is its own. */
import { html, useEffect, useId, useState } from "./html.js";
import { isOperator, tenant, tenantIds } from "./store.js";
import { Field } from "./ui.js";

/** An operator types or picks an id; it holds once it is one that exists, or with Enter. */
export function TenantPicker() {
  const [ids, setIds] = useState(/** @type {string[]} */ ([]));
  const [typed, setTyped] = useState(tenant.value);
  const list = useId();
  useEffect(() => {
    const stop = new AbortController();
    tenantIds(stop.signal).then(
      (found) => {
        setIds(found);
        if (!tenant.value && found.length) {
          tenant.value = found[0];
          setTyped(found[0]);
        }
      },
      () => {}, // the page below says what is wrong
    );
    return () => stop.abort();
  }, []);

  /** @param {string} value */
  function onType(value) {
    setTyped(value);
    if (ids.includes(value)) tenant.value = value;
  }

  return html`<${Field} label="Tenant">
    <input data-testid="tenant" list=${list} value=${typed} readonly=${!isOperator.value} autocomplete="off"
      spellcheck=${false} onInput=${(/** @type {any} */ event) => onType(event.target.value)}
      onChange=${(/** @type {any} */ event) => (tenant.value = event.target.value.trim())} />
    <datalist id=${list}>${ids.map((id) => html`<option value=${id} />`)}</datalist>
  <//>`;
}
