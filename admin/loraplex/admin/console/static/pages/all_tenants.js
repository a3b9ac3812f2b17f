/** All tenants with their weights and limits; a new one is made here. For operators. */
import { api, path } from "../lib/api.js";
import { html, useState } from "../lib/html.js";
import { show } from "../lib/place.js";
import { usePoll } from "../lib/poll.js";
import * as ui from "../lib/ui.js";
import { LimitLines } from "./limit_fields.js";
import { TenantForm } from "./tenant_editor.js";

const ROWS = 100;
const EVERY_MS = 15_000;

export default function AllTenants() {
  const [cursor, setCursor] = useState(/** @type {string | null} */ (null));
  const [isOpen, setOpen] = useState(false);
  const poll = usePoll((signal) => api.get("tenants", { limit: ROWS, cursor }, { signal }), [cursor], EVERY_MS);
  const create = !isOpen && html`<button type="button" class="primary" data-testid="tenant-new" onClick=${() => setOpen(true)}>New tenant</button>`;
  return html`<${ui.Page} title="Tenants" actions=${create}>
    ${isOpen && html`<${ui.Section} title="New tenant">
      <${TenantForm} onClose=${() => setOpen(false)} onSaved=${(/** @type {string} */ id) => show(path`tenants/${id}`)} />
    <//>`}
    <${ui.Loaded} poll=${poll}>${(/** @type {any} */ page) => html`
      <${ui.Table} caption="Tenants" testid="tenant-row" keyOf=${(/** @type {any} */ row) => row.id} rows=${page.data} columns=${COLUMNS}
        empty="There is no tenant yet." />
      <${ui.Pager} what="tenants" first=${cursor === null} next=${page.next_cursor}
        onFirst=${() => setCursor(null)} onNext=${() => setCursor(page.next_cursor)} />`}<//>
  <//>`;
}

const COLUMNS = [
  { title: "Tenant", cell: (/** @type {any} */ row) => html`<a href=${"#/" + path`tenants/${row.id}`}>${row.id}</a>` },
  { title: "State", cell: (/** @type {any} */ row) => html`<${ui.Badge} kind=${row.suspended_at ? "bad" : "good"}>${
    row.suspended_at ? "suspended" : "active"}<//>` },
  { title: "Name", cell: (/** @type {any} */ row) => html`<span>${row.display_name ?? "–"}</span>` },
  { title: "Weight", number: true, cell: (/** @type {any} */ row) => ui.figure(row.weight) },
  { title: "Limits", cell: (/** @type {any} */ row) => html`<${LimitLines} of=${row} />` },
  { title: "Since", cell: (/** @type {any} */ row) => html`<${ui.Time} at=${row.created_at} />` },
];
