/** Batches: a tenant's own with its key, on the data port; those of one tenant or of all with the admin token. */
import { api, path } from "../lib/api.js";
import { download } from "../lib/download.js";
import { canAsk, Elsewhere } from "../lib/elsewhere.js";
import { html, useId, useRef, useState } from "../lib/html.js";
import { place } from "../lib/place.js";
import { usePoll } from "../lib/poll.js";
import { caller, isOperator } from "../lib/store.js";
import * as ui from "../lib/ui.js";

const ROWS = 20;
const EVERY_MS = 5000;
const STATES = /** @type {Record<string, string>} */ ({ in_progress: "busy", cancelling: "busy", completed: "good", cancelled: "off", expired: "bad", failed: "bad" });
const WHY = "Batches are made on the data port, so their page is";

/**
 * @typedef {{ id: string, tenant: string, endpoint: string, status: string, counts: { total: number, completed: number, failed: number },
 *   created: string, expires: string, errors: string[], answers?: string | null, failures?: string | null }} Batch
 * `answers` and `failures` are files of the tenant's, which the admin token does not read.
 */

/** @param {{ tenant?: string }} props Without one: of all tenants. */
export default function Batches({ tenant = "" }) {
  const title = tenant ? `Batches of ${tenant}` : "Batches";
  const [cursor, setCursor] = useState(/** @type {string | null} */ (null));
  const [error, setError] = useState(/** @type {any} */ (null));
  const isHere = isOperator.value || canAsk();
  const poll = usePoll((signal) => (isHere ? read(tenant, cursor, signal) : Promise.resolve(null)), [tenant, cursor], EVERY_MS);
  if (!isHere) return html`<${Elsewhere} title=${title} why=${WHY} at=${`#/${place.value}`} />`;

  /** @param {() => Promise<any>} act */
  async function run(act) {
    setError(null);
    try {
      await act();
    } catch (refused) {
      setError(refused);
    }
    poll.reload();
  }

  const all = tenant && isOperator.value && html`<a class="button" href="#/all-batches" data-testid="all-batches">All tenants</a>`;
  return html`<${ui.Page} title=${title} actions=${all}>
    ${error && html`<${ui.ErrorBox} error=${error} />`}
    <${ui.Loaded} poll=${poll}>${(/** @type {any} */ page) => html`
      <${ui.Table} caption="Batches, the newest first" rows=${page.rows} keyOf=${(/** @type {Batch} */ row) => row.id} testid="file-row"
        columns=${columns(tenant, run)} empty="There is no batch. 'loraplex batch submit FILE' makes one." />
      <${ui.Pager} what="batches" first=${cursor === null} next=${page.next}
        onFirst=${() => setCursor(null)} onNext=${() => setCursor(page.next)} />`}<//>
  <//>`;
}

/** @param {string} tenant @param {string | null} cursor @param {AbortSignal} signal */
async function read(tenant, cursor, signal) {
  if (isOperator.value) {
    const page = await api.get("batches", { tenant, cursor, limit: ROWS }, { signal });
    const rows = page.data.map((/** @type {any} */ row) => ({ ...row, created: row.created_at, expires: row.expires_at }));
    return { rows, next: page.next_cursor };
  }
  const page = await api.get("/v1/batches", { after: cursor, limit: ROWS }, { signal });
  return { rows: page.data.map(ofTenant), next: page.has_more ? page.last_id : null };
}

/** From OpenAI's shape. @param {any} row @returns {Batch} */
const ofTenant = ({ id, endpoint, status, ...row }) => ({
  id,
  tenant: caller.value?.tenant ?? "",
  endpoint,
  status,
  counts: row.request_counts,
  created: new Date(1000 * row.created_at).toISOString(),
  expires: new Date(1000 * row.expires_at).toISOString(),
  errors: (row.errors?.data ?? []).map((/** @type {any} */ one) => one.message),
  answers: row.output_file_id,
  failures: row.error_file_id,
});

/** @param {string} tenant @param {(act: () => Promise<any>) => Promise<void>} run */
function columns(tenant, run) {
  const ofAll = { title: "Tenant", cell: (/** @type {Batch} */ row) => html`<a href=${"#/" + path`tenants/${row.tenant}/batches`}>${row.tenant}</a>` };
  return [
    { title: "Batch", cell: (/** @type {Batch} */ row) => html`<code>${row.id}</code>` },
    ...(tenant ? [] : [ofAll]),
    { title: "Route", cell: (/** @type {Batch} */ row) => row.endpoint },
    { title: "State", cell: (/** @type {Batch} */ row) => html`<${State} row=${row} />` },
    { title: "Lines", cell: (/** @type {Batch} */ row) => html`<${Lines} row=${row} />` },
    { title: "Created", cell: (/** @type {Batch} */ row) => html`<${ui.Time} at=${row.created} />` },
    { title: "Expires", cell: (/** @type {Batch} */ row) => html`<${ui.Time} at=${row.expires} />` },
    { title: "Do", cell: (/** @type {Batch} */ row) => html`<${Actions} row=${row} run=${run} />` },
  ];
}

/** @param {{ row: Batch }} props */
const State = ({ row }) => html`<${ui.Badge} kind=${STATES[row.status] ?? "off"}>${row.status.replace("_", " ")}<//>
  ${row.errors.map((why) => html`<div class="bad">${why}</div>`)}`;

/** @param {{ row: Batch }} props */
function Lines({ row: { id, counts } }) {
  const done = counts.completed + counts.failed;
  return html`<div class="progress">
    <progress max=${counts.total || 1} value=${done} aria-label=${`Lines of ${id}`}></progress>
    <div>${ui.num(done)} of ${ui.num(counts.total)}${counts.failed > 0 && html`, <span class="bad">${ui.num(counts.failed)} failed</span>`}</div>
  </div>`;
}

/** @param {{ row: Batch, run: (act: () => Promise<any>) => Promise<void> }} props */
function Actions({ row, run }) {
  /** @param {string} id @param {string} what */
  const save = (id, what) =>
    run(async () => {
      const { bytes } = await api.get(path`/v1/files/${id}`);
      await download(path`/v1/files/${id}/content`, `${row.id}-${what}.jsonl`, bytes);
    });
  /** @param {string | null | undefined} id @param {string} what */
  const file = (id, what) =>
    id && html`<button type="button" data-testid=${`batch-${what}`} aria-label=${`Download ${what} of ${row.id}`} onClick=${() => save(id, what)}>
      Download ${what}
    </button>`;
  return html`<span class="actions">
    ${file(row.answers, "answers")} ${file(row.failures, "failures")}
    ${row.status === "in_progress" && html`<${Cancel} row=${row} run=${run} />`}
  </span>`;
}

/** A click that a second one confirms. @param {{ row: Batch, run: (act: () => Promise<any>) => Promise<void> }} props */
function Cancel({ row, run }) {
  const asked = useRef(/** @type {HTMLDialogElement | null} */ (null));
  const id = useId();
  const close = () => asked.current?.close();
  const where = path`batches/${row.id}/cancel`;
  function onConfirm() {
    close();
    run(() => api.send("POST", isOperator.value ? where : `/v1/${where}`));
  }
  return html`<button type="button" class="danger" data-testid="batch-cancel" aria-label=${`Cancel ${row.id}`}
      onClick=${() => asked.current?.showModal()}>Cancel</button>
    <dialog ref=${asked} aria-labelledby=${id}>
      <p id=${id}>Cancel the batch <code>${row.id}</code> of ${row.tenant}? Lines that are answered are kept, and no other is begun.</p>
      <p class="actions">
        <button type="button" data-testid="batch-keep" onClick=${close}>Keep it running</button>
        <button type="button" class="danger" data-testid="batch-cancel-confirm" onClick=${onConfirm}>Cancel the batch</button>
      </p>
    </dialog>`;
}
