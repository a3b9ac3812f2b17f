/** The form of a tenant: a new one, or the name, weight and limits of one. For operators. */
import { api, path } from "../lib/api.js";
import { html, useState } from "../lib/html.js";
import { place, query, setQuery } from "../lib/place.js";
import * as ui from "../lib/ui.js";
import { LimitFields, limitChanges, textsOf } from "./limit_fields.js";

/** Limits are set once it is there. */
const NEW = { id: "", display_name: null, weight: 1, limits: {} };

/** The address of a tenant's page with this form open. @param {string} id */
export const limitsHref = (id) => "#/" + path`tenants/${id}` + "?change=limits";

/**
 * A button, and behind it the form.
 * @param {{ tenant: any, onSaved: () => void }} props `tenant`: as GET /tenants/{tenant} answers.
 */
export function TenantEditor({ tenant, onSaved }) {
  const here = place.value;
  const close = () => setQuery(here, "change", "");
  if (!query.value.change) return html`<button type="button" data-testid="tenant-change" onClick=${() => setQuery(here, "change", "limits")}>Change</button>`;
  return html`<${TenantForm} tenant=${tenant} onClose=${close} onSaved=${() => (close(), onSaved())} />`;
}

/** @param {any} tenant @param {Record<string, string>} before @param {Record<string, string>} after @returns {Record<string, any>} */
function changesOf(tenant, before, after) {
  return {
    ...(after.id !== before.id && { id: after.id }),
    ...(after.display_name !== before.display_name && { display_name: after.display_name.trim() || null }),
    ...(after.weight !== before.weight && { weight: Number(after.weight) }),
    ...limitChanges(Object.keys(tenant.limits), before, after),
  };
}

/** @param {{ tenant?: any, onClose: () => void, onSaved: (id: string) => void }} props Without a tenant it makes one. */
export function TenantForm({ tenant = NEW, onClose, onSaved }) {
  const { id, display_name, weight, limits } = tenant;
  const [before] = useState(textsOf({ id, display_name, weight, ...limits })); // the page reads the tenant again and again
  const [after, setAfter] = useState(before);
  const { busy, error, run } = ui.useWork();

  /** @param {Event} event */
  function onSubmit(event) {
    event.preventDefault();
    run(async () => {
      const body = changesOf(tenant, before, after);
      if (!id) await api.send("POST", "tenants", body);
      else if (Object.keys(body).length) await api.send("PATCH", path`tenants/${id}`, body);
      onSaved(after.id);
    });
  }

  /** @param {string} name @param {string} text */
  const onText = (name, text) => setAfter({ ...after, [name]: text });
  /** @param {string} name */
  const told = (name) => ({
    "data-testid": `set-${name}`,
    value: after[name],
    onInput: (/** @type {any} */ event) => onText(name, event.target.value),
  });
  return html`<form onSubmit=${onSubmit}>
    <p class="note">${id ? "An empty field is no limit. What changes holds for the next requests." : "Its limits and keys are set on its page."}</p>
    <div class="form filters">
      ${!id && html`<${ui.Field} label="Id: a-z, 0-9 and '-'">
        <input required maxlength="63" pattern="[a-z0-9][a-z0-9\\-]*" spellcheck=${false} autocomplete="off" ...${told("id")} />
      <//>`}
      <${ui.Field} label="Name"><input maxlength="200" autocomplete="off" ...${told("display_name")} /><//>
      <${ui.Field} label="Weight"><input type="number" min="0" step="any" required ...${told("weight")} /><//>
      <${LimitFields} of="set" names=${Object.keys(limits)} texts=${after} onText=${onText} />
    </div>
    ${error && html`<${ui.ErrorBox} error=${error} />`}
    <div class="actions">
      <button type="submit" class="primary" data-testid="tenant-save" disabled=${busy}>${id ? "Save" : "Create"}</button>
      <button type="button" onClick=${onClose}>Cancel</button>
    </div>
  </form>`;
}
