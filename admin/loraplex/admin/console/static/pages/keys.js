/** A tenant's keys: create, rotate, revoke. For operators. */
import { api, path } from "../lib/api.js";
import { html, useEffect, useRef, useState } from "../lib/html.js";
import { limitLines } from "../lib/limits.js";
import { usePoll } from "../lib/poll.js";
import { LEAVING } from "../lib/store.js";
import * as ui from "../lib/ui.js";

const SCOPES = ["inference", "adapters:read", "adapters:write", "adapters:train", "usage:read"];
const ROWS = 50;
const EVERY_MS = 15_000;
/** How long a click on Revoke can be taken back. */
const UNDO_MS = 3000;
const STATES = /** @type {Record<string, string>} */ ({ valid: "good", expired: "off", revoked: "off" });

/** @param {{ id: string }} props The tenant's. */
export function Keys({ id }) {
  const [cursor, setCursor] = useState(/** @type {string | null} */ (null));
  const [made, setMade] = useState(/** @type {any} */ (null));
  const [error, setError] = useState(/** @type {any} */ (null));
  const poll = usePoll(
    (signal) => api.get(path`tenants/${id}/keys`, { order: "newest", limit: ROWS, cursor }, { signal }),
    [id, cursor],
    EVERY_MS,
  );

  /** @param {() => Promise<any>} change */
  async function run(change) {
    setError(null);
    try {
      await change();
    } catch (refused) {
      setError(refused);
    }
    poll.reload();
  }

  /** @param {any} body */
  const create = (body) => run(async () => setMade((await api.send("POST", path`tenants/${id}/keys`, body)).body));
  /** @param {string} key */
  const rotate = (key) => run(async () => setMade((await api.send("POST", path`tenants/${id}/keys/${key}/rotate`, { grace_seconds: 3600 })).body));
  /** @param {string} key */
  const revoke = (key) => run(() => api.send("DELETE", path`tenants/${id}/keys/${key}`));

  return html`<${ui.Section} title="Keys">
    <${NewKey} onCreate=${create} />
    ${error && html`<${ui.ErrorBox} error=${error} />`}
    ${made && html`<${Secret} made=${made} onDone=${() => setMade(null)} />`}
    <${ui.Loaded} poll=${poll}>${(/** @type {any} */ page) => html`
      <${ui.Table} caption="Keys" rows=${page.data} keyOf=${(/** @type {any} */ row) => row.id} testid="key-row"
        empty="There is no key yet." columns=${columns(id, rotate, revoke)} />
      <${ui.Pager} what="keys" first=${cursor === null} next=${page.next_cursor}
        onFirst=${() => setCursor(null)} onNext=${() => setCursor(page.next_cursor)} />`}<//>
  <//>`;
}

/** @param {string} tenant @param {(key: string) => void} rotate @param {(key: string) => void} revoke */
function columns(tenant, rotate, revoke) {
  return [
    { title: "Key", cell: (/** @type {any} */ row) => html`${row.name ?? "–"} <code>${row.id}</code>` },
    { title: "State", cell: (/** @type {any} */ row) => html`<${ui.Badge} kind=${STATES[row.state]}>${row.state}<//>` },
    { title: "Scopes", cell: (/** @type {any} */ row) => row.scopes.join(", ") },
    { title: "Models", cell: (/** @type {any} */ row) => (row.models ? row.models.join(", ") : "all") },
    { title: "Limits", cell: (/** @type {any} */ row) => limitLines(row).map((line) => html`<div>${line}</div>`) },
    { title: "Created", cell: (/** @type {any} */ row) => html`<${ui.Time} at=${row.created_at} />` },
    { title: "Last used", cell: (/** @type {any} */ row) => html`<${ui.Time} at=${row.last_used_at} />` },
    { title: "Ends", cell: (/** @type {any} */ row) => html`<${ui.Time} at=${row.revoked_at ?? row.expires_at} />` },
    { title: "Change", cell: (/** @type {any} */ row) => html`<${Change} tenant=${tenant} row=${row} rotate=${rotate} revoke=${revoke} />` },
  ];
}

/** @param {{ onCreate: (body: any) => Promise<void> }} props */
function NewKey({ onCreate }) {
  const [name, setName] = useState("");
  const [scopes, setScopes] = useState(["inference"]);
  const [busy, setBusy] = useState(false);

  /** @param {Event} event */
  async function onSubmit(event) {
    event.preventDefault();
    setBusy(true);
    await onCreate({ ...(name.trim() ? { name: name.trim() } : {}), scopes });
    setName("");
    setBusy(false);
  }

  /** @param {string} scope */
  const toggle = (scope) => setScopes(SCOPES.filter((one) => scopes.includes(one) !== (one === scope)));

  return html`<form class="form" onSubmit=${onSubmit}>
    <${ui.Field} label="Name">
      <input data-testid="key-name" maxlength="200" value=${name} autocomplete="off"
        onInput=${(/** @type {any} */ event) => setName(event.target.value)} />
    <//>
    <fieldset><legend>Scopes</legend>
      ${SCOPES.map((scope) => html`<label><input type="checkbox" checked=${scopes.includes(scope)}
        data-testid=${`scope-${scope}`} onChange=${() => toggle(scope)} /> ${scope}</label>`)}
    </fieldset>
    <button type="submit" class="primary" data-testid="key-create" disabled=${busy || !scopes.length}>Create a key</button>
  </form>`;
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

/** @param {{ tenant: string, row: any, rotate: (key: string) => void, revoke: (key: string) => void }} props */
function Change({ tenant, row, rotate, revoke }) {
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
    return html`<span role="status">Revoking the key ${label} (<code>${row.id}</code>) of ${tenant}… </span>
      <button type="button" data-testid="key-keep" onClick=${undo}>Keep it</button>`;
  }
  return html`<div class="actions">
    <button type="button" data-testid="key-rotate" aria-label=${`Rotate ${label}`} title="A new secret; the old one works for an hour more."
      onClick=${() => rotate(row.id)}>Rotate</button>
    <button type="button" class="danger" data-testid="key-revoke" aria-label=${`Revoke ${label}`} onClick=${ask}>Revoke</button>
  </div>`;
}
