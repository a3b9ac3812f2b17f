/** A tenant's keys: create, change, rotate, revoke. For operators. */
import { api, path } from "../lib/api.js";
import { html, useEffect, useRef, useState } from "../lib/html.js";
import { query } from "../lib/place.js";
import { usePoll } from "../lib/poll.js";
import { LEAVING } from "../lib/store.js";
import * as ui from "../lib/ui.js";
import { KeyForm } from "./key_form.js";
import { LimitLines } from "./limit_fields.js";

const ROWS = 50;
const EVERY_MS = 15_000;
/** How long a click on Revoke can be taken back. */
const UNDO_MS = 3000;
const STATES = /** @type {Record<string, string>} */ ({ valid: "good", expired: "off", revoked: "off" });

/** The address of a tenant's keys. @param {string} id The tenant's. */
export const keysHref = (id) => "#/" + path`tenants/${id}` + "?show=keys";

/** @param {{ id: string }} props The tenant's. */
export function Keys({ id }) {
  const part = useRef(/** @type {HTMLElement | null} */ (null));
  const isWanted = query.value.show === "keys";
  const [cursor, setCursor] = useState(/** @type {string | null} */ (null));
  const [changed, setChanged] = useState(/** @type {any} */ (null));
  const [made, setMade] = useState(/** @type {any} */ (null));
  const [error, setError] = useState(/** @type {any} */ (null));
  const poll = usePoll(
    (signal) => api.get(path`tenants/${id}/keys`, { order: "newest", limit: ROWS, cursor }, { signal }),
    [id, cursor],
    EVERY_MS,
  );

  const isThere = poll.data !== null;
  useEffect(() => {
    if (isWanted && isThere) part.current?.scrollIntoView();
  }, [isWanted, isThere]);

  /** Whether the server took it. @param {() => Promise<any>} change */
  async function run(change) {
    let refusal = null;
    try {
      await change();
    } catch (refused) {
      refusal = refused;
    }
    setError(refusal);
    poll.reload();
    return refusal === null;
  }

  /** @param {(now: any) => any} bodyOf */
  const create = (bodyOf) => run(async () => setMade((await api.send("POST", path`tenants/${id}/keys`, bodyOf(null))).body));
  /** @param {(now: any) => any} bodyOf */
  const change = (bodyOf) => run(async () => {
    const keys = await api.list(path`tenants/${id}/keys`, {});
    const body = bodyOf(keys.find((/** @type {any} */ one) => one.id === changed.id) ?? changed);
    if (Object.keys(body).length) await api.send("PATCH", path`tenants/${id}/keys/${changed.id}`, body);
    setChanged(null);
  });
  /** @param {string} key */
  const rotate = (key) => run(async () => setMade((await api.send("POST", path`tenants/${id}/keys/${key}/rotate`, { grace_seconds: 3600 })).body));
  /** @param {string} key */
  const revoke = (key) => run(() => api.send("DELETE", path`tenants/${id}/keys/${key}`));

  return html`<div ref=${part} data-testid="keys"><${ui.Section} title="Keys">
    <${KeyForm} key=${changed?.id ?? ""} row=${changed} onSend=${changed ? change : create} onClose=${() => setChanged(null)} />
    ${error && html`<${ui.ErrorBox} error=${error} />`}
    ${made && html`<${Secret} made=${made} onDone=${() => setMade(null)} />`}
    <${ui.Loaded} poll=${poll}>${(/** @type {any} */ page) => html`
      <${ui.Table} caption="Keys" rows=${page.data} keyOf=${(/** @type {any} */ row) => row.id} testid="key-row"
        empty="There is no key yet." columns=${columns(id, setChanged, rotate, revoke)} />
      <${ui.Pager} what="keys" first=${cursor === null} next=${page.next_cursor}
        onFirst=${() => setCursor(null)} onNext=${() => setCursor(page.next_cursor)} />`}<//>
  <//></div>`;
}

/** @param {string} tenant @param {(row: any) => void} edit @param {(key: string) => void} rotate @param {(key: string) => void} revoke */
function columns(tenant, edit, rotate, revoke) {
  return [
    { title: "Key", cell: (/** @type {any} */ row) => html`${row.name ?? "–"} <code>${row.id}</code>` },
    { title: "State", cell: (/** @type {any} */ row) => html`<${ui.Badge} kind=${STATES[row.state]}>${row.state}<//>` },
    { title: "Scopes", cell: (/** @type {any} */ row) => html`<span>${row.scopes.join(", ")}</span>` },
    { title: "Models", cell: (/** @type {any} */ row) => html`<span>${row.models ? row.models.join(", ") : "all"}</span>` },
    { title: "Limits", cell: (/** @type {any} */ row) => html`<${LimitLines} of=${row} />` },
    { title: "Created", cell: (/** @type {any} */ row) => html`<${ui.Time} at=${row.created_at} />` },
    { title: "Last used", cell: (/** @type {any} */ row) => html`<${ui.Time} at=${row.last_used_at} />` },
    { title: "Ends", cell: (/** @type {any} */ row) => html`<${ui.Time} at=${row.revoked_at ?? row.expires_at} />` },
    { title: "Change", cell: (/** @type {any} */ row) => html`<${Actions} tenant=${tenant} row=${row} edit=${edit} rotate=${rotate} revoke=${revoke} />` },
  ];
}

/** @param {{ made: any, onDone: () => void }} props */
function Secret({ made, onDone }) {
  const [copied, setCopied] = useState(false);
  const copy = () => navigator.clipboard.writeText(made.secret).then(() => setCopied(true), () => {});
  return html`<div class="secret" role="status">
    <p><strong>The secret of ${made.name ?? made.id}.</strong> It is shown this once: copy it now.</p>
    <p><code data-testid="key-secret">${made.secret}</code></p>
    <div class="actions">
      ${navigator.clipboard && html`<button type="button" onClick=${copy}>${copied ? "Copied" : "Copy"}</button>`}
      <button type="button" data-testid="key-secret-done" onClick=${onDone}>I have it</button>
    </div>
  </div>`;
}

/**
 * @param {{ tenant: string, row: any, edit: (row: any) => void, rotate: (key: string) => void, revoke: (key: string) => void }} props
 */
function Actions({ tenant, row, edit, rotate, revoke }) {
  const [leaving, setLeaving] = useState(false);
  const timer = useRef(0);
  const pending = useRef(/** @type {null | (() => void)} */ (null));
  useEffect(() => {
    // A page that is left takes no click back any more.
    const leave = () => pending.current?.();
    for (const event of [LEAVING, "pagehide"]) window.addEventListener(event, leave);
    return () => {
      for (const event of [LEAVING, "pagehide"]) window.removeEventListener(event, leave);
      leave();
    };
  }, []);
  if (row.state === "revoked") return null;

  function ask() {
    pending.current = () => {
      window.clearTimeout(timer.current);
      pending.current = null;
      revoke(row.id);
    };
    timer.current = window.setTimeout(() => pending.current?.(), UNDO_MS);
    setLeaving(true);
  }

  function undo() {
    window.clearTimeout(timer.current);
    pending.current = null;
    setLeaving(false);
  }

  const label = row.name ?? row.id;
  if (leaving) {
    return html`<span><span role="status">Revoking the key ${label} (<code>${row.id}</code>) of ${tenant}… </span>
      <button type="button" data-testid="key-keep" onClick=${undo}>Keep it</button></span>`;
  }
  return html`<div class="actions">
    <button type="button" data-testid="key-change" aria-label=${`Change ${label}`} onClick=${() => edit(row)}>Change</button>
    <button type="button" data-testid="key-rotate" aria-label=${`Rotate ${label}`} title="A new secret; the old one works for an hour more."
      onClick=${() => rotate(row.id)}>Rotate</button>
    <button type="button" class="danger" data-testid="key-revoke" aria-label=${`Revoke ${label}`} onClick=${ask}>Revoke</button>
  </div>`;
}
