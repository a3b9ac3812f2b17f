/** The end of a tenant: what a deletion erases and keeps, and the question. For operators. */
import { api, path } from "../lib/api.js";
import { html, useId, useRef, useState } from "../lib/html.js";
import { show } from "../lib/place.js";
import { tenant } from "../lib/store.js";
import * as ui from "../lib/ui.js";

/** @param {{ id: string }} props The tenant's. */
export function Removal({ id }) {
  const title = useId();
  const dialog = useRef(/** @type {HTMLDialogElement | null} */ (null));
  const [found, setFound] = useState(/** @type {any} */ (null));
  const [typed, setTyped] = useState("");
  const { busy, error, run } = ui.useWork();

  const ask = () => run(async () => {
    setFound(await api.get(path`tenants/${id}/erasure`));
    setTyped("");
    dialog.current?.showModal();
  });
  /** @param {Event} event */
  async function onSubmit(event) {
    event.preventDefault();
    const isGone = await run(async () => {
      await api.send("DELETE", path`tenants/${id}`);
      tenant.value = "";
      show("all-tenants");
    });
    if (!isGone) dialog.current?.close();
  }

  return html`<${ui.Section} title="Delete this tenant" note="What that erases is counted before you are asked.">
    ${error && html`<${ui.ErrorBox} error=${error} />`}
    <button type="button" class="danger" data-testid="tenant-delete" disabled=${busy} onClick=${ask}>Delete…</button>
    <dialog ref=${dialog} aria-labelledby=${title}>
      <form onSubmit=${onSubmit}>
        <h2 id=${title}>Delete the tenant ${id}?</h2>
        ${found && html`<${Counts} ...${found} />`}
        <p>Its id is not given again. This cannot be undone.</p>
        <${ui.Field} label=${`Type ${id} to confirm`}>
          <input data-testid="tenant-delete-typed" value=${typed} spellcheck=${false} autocomplete="off"
            onInput=${(/** @type {any} */ event) => setTyped(event.target.value)} />
        <//>
        <div class="actions">
          <button type="submit" class="danger" data-testid="tenant-delete-yes" disabled=${busy || typed !== id}>Delete</button>
          <button type="button" data-testid="tenant-delete-no" onClick=${() => dialog.current?.close()}>Keep it</button>
        </div>
      </form>
    </dialog>
  <//>`;
}

/** @param {{ erased: any, kept: any }} props As GET /tenants/{tenant}/erasure answers. */
function Counts({ erased, kept }) {
  return html`<p>Erased:</p>
    <ul data-testid="erased">
      <li>${counted(erased.keys, "key")}: requests with them are refused at once, those that run end as usual</li>
      <li>${counted(erased.adapters, "adapter")} with ${counted(erased.versions, "version")}, ${ui.bytes(erased.artifact_bytes)} on disk</li>
      <li>the rules of ${ui.num(erased.series)} series</li>
      <li>${counted(erased.files, "file")} of batches, ${ui.bytes(erased.file_bytes)}, inputs and results</li>
      <li>${plural(erased.batches, "batch", "batches")}: those that are not complete end without results</li>
      <li>${counted(erased.audit_texts, "text")} in the audit log</li>
    </ul>
    <p>Kept:</p>
    <ul data-testid="kept">
      <li>${kept.usage_since ? html`its usage since <${ui.Time} at=${kept.usage_since} />, to be billed` : "no usage: there is none"}</li>
      <li>${counted(kept.audit_rows, "row")} of the audit log, without texts</li>
      ${kept.shared_artifacts > 0 && html`<li>files of ${counted(kept.shared_artifacts, "adapter")} that other tenants have too</li>`}
    </ul>`;
}

/** @param {number} count @param {string} one */
const counted = (count, one) => plural(count, one, `${one}s`);

/** @param {number} count @param {string} one @param {string} many */
const plural = (count, one, many) => `${ui.num(count)} ${count === 1 ? one : many}`;
