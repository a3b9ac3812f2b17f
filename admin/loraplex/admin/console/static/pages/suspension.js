/** Suspending a tenant and resuming it. For operators. */
import { api, path } from "../lib/api.js";
import { html, useId, useRef, useState } from "../lib/html.js";
import * as ui from "../lib/ui.js";

/** @typedef {{ tenant: any, onSaved: () => void }} Props `tenant`: as GET /tenants/{tenant} answers. */

/** @param {Props} props */
function useChange({ tenant: { id }, onSaved }) {
  const [error, setError] = useState(/** @type {any} */ (null));
  /** @param {boolean} suspended */
  async function change(suspended) {
    setError(null);
    await api.send("PATCH", path`tenants/${id}`, { suspended }).catch(setError);
    onSaved();
  }
  return { change, refusal: error && html`<${ui.ErrorBox} error=${error} />` };
}

/** Of one that is suspended. @param {Props} props */
export function Suspended(props) {
  const { change, refusal } = useChange(props);
  return html`<div class="error" data-testid="suspended">
      <p><strong>Suspended</strong> since <${ui.Time} at=${props.tenant.suspended_at} />. Its keys get 403 <code>tenant_suspended</code>.</p>
      <button type="button" data-testid="tenant-resume" onClick=${() => change(false)}>Resume</button>
    </div>
    ${refusal}`;
}

/** The question of one that is not. @param {Props} props */
export function Suspend(props) {
  const title = useId();
  const dialog = useRef(/** @type {HTMLDialogElement | null} */ (null));
  const { change, refusal } = useChange(props);
  return html`<${ui.Section} title="Suspend this tenant" note="Its keys are refused until you resume it. Nothing is erased.">
    ${refusal}
    <button type="button" data-testid="tenant-suspend" onClick=${() => dialog.current?.showModal()}>Suspend…</button>
    <dialog ref=${dialog} aria-labelledby=${title}>
      <h2 id=${title}>Suspend the tenant ${props.tenant.id}?</h2>
      <p>Requests and uploads with its keys get 403 <code>tenant_suspended</code> until you resume it. Those that run end as usual.
        Lines of its batches wait, and go on when you resume it; those of a batch whose time ends by then do not run any more.</p>
      <div class="actions">
        <button type="button" class="danger" data-testid="tenant-suspend-yes" onClick=${() => (dialog.current?.close(), change(true))}>Suspend</button>
        <button type="button" onClick=${() => dialog.current?.close()}>Keep it running</button>
      </div>
    </dialog>
  <//>`;
}
