/** Audit: who changed what, and whether the log is whole. For operators. */
import { api } from "../lib/api.js";
import { html, useState } from "../lib/html.js";
import { place, query, setQuery } from "../lib/place.js";
import { usePoll } from "../lib/poll.js";
import * as ui from "../lib/ui.js";

const ROWS = 50;
const FILTERS = ["tenant", "actor", "action", "outcome"];
const OUTCOMES = /** @type {Record<string, string>} */ ({ done: "good", refused: "busy", failed: "bad" });

export default function Audit() {
  const chosen = Object.fromEntries(FILTERS.map((name) => [name, query.value[name] ?? ""]));
  const here = place.value;
  const [cursor, setCursor] = useState(/** @type {string | null} */ (null));
  const poll = usePoll(
    (signal) => api.get("audit", { limit: ROWS, cursor, ...chosen }, { signal }),
    [cursor, JSON.stringify(chosen)],
  );

  /** @param {string} name @param {string} value */
  function choose(name, value) {
    setCursor(null);
    setQuery(here, name, value);
  }

  /** @param {string} name @param {string} label @param {string} hint */
  const filter = (name, label, hint) => html`<${ui.Field} label=${label}>
    <${ui.FilterInput} testid=${`audit-${name}`} placeholder=${hint} value=${chosen[name]}
      onText=${(/** @type {string} */ text) => choose(name, text)} />
  <//>`;

  return html`<${ui.Page} title="Audit" actions=${html`<button type="button" onClick=${poll.reload}>Reload</button>`}>
    <${Verify} />
    <div class="form">
      ${filter("tenant", "Tenant", "all")} ${filter("actor", "Actor", "admin, local or a key's id")}
      ${filter("action", "Action", "key.create")}
      <${ui.Field} label="Outcome">
        <select data-testid="audit-outcome" value=${chosen.outcome} onChange=${(/** @type {any} */ event) => choose("outcome", event.target.value)}>
          <option value="">all</option>
          ${Object.keys(OUTCOMES).map((name) => html`<option value=${name}>${name}</option>`)}
        </select>
      <//>
    </div>
    <${ui.Loaded} poll=${poll}>${(/** @type {any} */ page) => html`
      <${Rows} rows=${page.data} />
      <${ui.Pager} what="audit rows" first=${cursor === null} next=${page.next_cursor}
        onFirst=${() => setCursor(null)} onNext=${() => setCursor(page.next_cursor)} />`}<//>
  <//>`;
}

/** The server walks the whole log. With the anchor of an earlier time, a rewriting since then is found too. */
function Verify() {
  const [anchor, setAnchor] = useState("");
  const [verdict, setVerdict] = useState(/** @type {any} */ (null));
  const { busy, error, run } = ui.useWork();

  /** @param {Event} event */
  function onSubmit(event) {
    event.preventDefault();
    setVerdict(null);
    run(async () => setVerdict(await api.get("audit/verify", { anchor: anchor.trim() })));
  }

  return html`<form class="form" onSubmit=${onSubmit}>
      <${ui.Field} label="Anchor of an earlier time (optional)">
        <input data-testid="audit-anchor" placeholder="12:9f86d0…" value=${anchor} spellcheck=${false} autocomplete="off"
          onInput=${(/** @type {any} */ event) => setAnchor(event.target.value)} />
      <//>
      <button type="submit" data-testid="audit-verify" disabled=${busy}>${busy ? "Verifying…" : "Verify the log"}</button>
    </form>
    <div role="status" data-testid="audit-verdict">
      ${verdict?.whole && html`<p><${ui.Badge} kind="good">whole<//> ${ui.num(verdict.rows)} rows, none changed and none missing.
        Keep the anchor elsewhere: <code>${verdict.anchor}</code></p>`}
      ${verdict && !verdict.whole && html`<p class="error"><strong>The log is broken at row ${ui.num(verdict.broken_at)}.</strong> ${verdict.reason}</p>`}
    </div>
    ${error && html`<${ui.ErrorBox} error=${error} />`}`;
}

/** @param {{ rows: any[] }} props */
function Rows({ rows }) {
  return html`<${ui.Table} caption="Audit rows, the latest first" rows=${rows} keyOf=${(/** @type {any} */ row) => String(row.seq)}
    testid="audit-row" empty="No row fits."
    columns=${[
      { title: "Row", cell: (/** @type {any} */ row) => ui.num(row.seq) },
      { title: "Time", cell: (/** @type {any} */ row) => html`<${ui.Time} at=${row.time} />` },
      { title: "Actor", cell: (/** @type {any} */ row) => actor(row) },
      { title: "Action", cell: (/** @type {any} */ row) => row.action },
      { title: "Outcome", cell: (/** @type {any} */ row) => html`<${ui.Badge} kind=${OUTCOMES[row.outcome]}>${row.outcome}<//> ${row.code}` },
      { title: "Target", cell: (/** @type {any} */ row) => row.target },
      { title: "Change", cell: (/** @type {any} */ row) => html`<${Change} row=${row} />` },
    ]} />`;
}

/** @param {any} row */
const actor = (row) => (row.actor === "key" ? `key ${row.actor_key_id} of ${row.actor_tenant_id}` : row.actor);

/** @param {{ row: any }} props */
function Change({ row }) {
  if (!row.before && !row.after) return null;
  const shown = JSON.stringify({ before: row.before, after: row.after, hash: row.hash }, null, 2);
  return html`<details><summary>Show</summary><pre>${shown}</pre></details>`;
}
