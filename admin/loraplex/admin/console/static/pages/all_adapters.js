/** Adapters of all tenants: filtered and sorted by the server, with what was asked of them; several changed at once. */
import { api, path } from "../lib/api.js";
import { html, useEffect, useRef, useState } from "../lib/html.js";
import { place, query, setQuery } from "../lib/place.js";
import { usePoll } from "../lib/poll.js";
import * as ui from "../lib/ui.js";
import { adapterHref, Released, releaseHref, RunBadge } from "./adapters.js";
import { editTags, TagLink } from "./tags.js";

const ROWS = 100;
const EVERY_MS = 15_000;
const FILTERS = ["tenant", "search", "tag", "state", "release", "base", "min_errors", "min_error_rate", "hours", "sort", "order"];

/** Choices of a filter: the value in the address and its words. @type {Record<string, [string, string][]>} */
const CHOICES = {
  state: [["", "any"], ["ready", "ready"], ["validating", "being checked"], ["incompatible", "of another base"], ["corrupt", "damaged"]],
  release: [["", "any"], ["none", "nothing released"], ["released", "released"], ["running", "rolling out"], ["paused", "paused"]],
  base: [["", "any"], ["served", "the one served"], ["other", "another"]],
  min_errors: [["", "any"], ["1", "1"], ["5", "5"], ["100", "100"]],
  min_error_rate: [["", "any"], ["0.01", "1 %"], ["0.05", "5 %"], ["0.5", "50 %"]],
  hours: [["", "1 hour"], ["6", "6 hours"], ["24", "24 hours"]],
  sort: [["", "name"], ["errors", "errors"], ["requests", "requests"], ["tokens", "tokens"], ["first_token", "first token"],
    ["last_used", "last use"], ["bytes", "size"], ["created", "newest version"]],
  order: [["", "smallest first"], ["desc", "largest first"]],
};

/** @type {Record<string, "good" | "busy" | "bad" | "off">} */
const KINDS = { ready: "good", validating: "busy", corrupt: "bad", incompatible: "off" };

/** @param {any} row */
const keyOf = (row) => `${row.tenant}/${row.name}`;

export default function AllAdapters() {
  const here = place.value;
  const chosen = Object.fromEntries(FILTERS.map((name) => [name, query.value[name] ?? ""]));
  const of = JSON.stringify(chosen);
  const [cursor, setCursor] = useState({ of, at: /** @type {string | null} */ (null) });
  const at = cursor.of === of ? cursor.at : null;
  const [picked, setPicked] = useState(/** @type {Set<string>} */ (new Set()));
  const poll = usePoll((signal) => api.get("adapters", { ...chosen, cursor: at, limit: ROWS }, { signal }), [of, at], EVERY_MS);
  // What is no longer listed is not changed unseen, and is not chosen when it comes back.
  /** @type {any[]} */
  const listed = poll.data?.data ?? [];
  useEffect(() => setPicked((before) => new Set(listed.map(keyOf).filter((key) => before.has(key)))), [poll.data]);

  /** @param {any[]} rows @param {boolean} isOn */
  const pick = (rows, isOn) => setPicked((before) => {
    const next = new Set(before);
    for (const row of rows) isOn ? next.add(keyOf(row)) : next.delete(keyOf(row));
    return next;
  });

  const upload = html`<a class="button" data-testid="nav-upload" href="#/upload">Upload</a>`;
  return html`<${ui.Page} title="Adapters of all tenants" actions=${upload}>
    <div class="form filters">
      ${text(here, "tenant", "Tenant")} ${text(here, "search", "Name has")} ${text(here, "tag", "Tag")}
      ${Object.keys(CHOICES).map((name) => html`<${Choice} here=${here} name=${name} value=${chosen[name]} />`)}
    </div>
    <${Bulk} rows=${listed.filter((row) => picked.has(keyOf(row)))} shown=${listed.length}
      onDone=${(/** @type {any[]} */ changed) => (pick(changed, false), poll.reload())} />
    <${ui.Loaded} poll=${poll}>${(/** @type {any} */ page) => html`
      <${Totals} totals=${page.totals} />
      <${ui.Words} of=${["tier", "pin"]} />
      ${page.data.length > 0 && html`<label class="check"><input type="checkbox" data-testid="pick-all"
        checked=${page.data.every((/** @type {any} */ row) => picked.has(keyOf(row)))}
        onChange=${(/** @type {any} */ event) => pick(page.data, event.target.checked)} /> All ${ui.num(page.data.length)} of this page</label>`}
      <${ui.Table} caption="Adapters" testid="adapter-row" keyOf=${keyOf} rows=${page.data} columns=${columns(picked, pick)}
        empty="No adapter is like this." />
      <${ui.Pager} what="adapters" first=${at === null} next=${page.next_cursor}
        onFirst=${() => setCursor({ of, at: null })} onNext=${() => setCursor({ of, at: page.next_cursor })} />`}<//>
  <//>`;
}

/** @param {string} here @param {string} name @param {string} label */
const text = (here, name, label) => html`<${ui.Field} label=${label}>
  <${ui.FilterInput} testid=${`filter-${name}`} placeholder="all" value=${query.value[name] ?? ""}
    onText=${(/** @type {string} */ value) => setQuery(here, name, value)} />
<//>`;

/** @type {Record<string, string>} */
const LABELS = {
  state: "State", release: "Release", base: "Base", min_errors: "Errors, at least", min_error_rate: "Error rate, at least",
  hours: "Figures of the last", sort: "Sorted by", order: "Order",
};

/** @param {{ here: string, name: string, value: string }} props */
function Choice({ here, name, value }) {
  const known = CHOICES[name].some(([some]) => some === value);
  return html`<${ui.Field} label=${LABELS[name]}>
    <select data-testid=${`filter-${name}`} value=${value} onChange=${(/** @type {any} */ event) => setQuery(here, name, event.target.value)}>
      ${CHOICES[name].map(([some, words]) => html`<option value=${some}>${words}</option>`)}
      ${!known && html`<option value=${value}>${value}</option>`}
    </select>
  <//>`;
}

/** @param {{ totals: any }} props */
function Totals({ totals }) {
  const states = Object.entries(totals.states).map(([state, count]) => `${ui.num(count)} ${state}`).join(", ");
  return html`<${ui.Tiles}>
    <${ui.Tile} name="Adapters" testid="total-adapters" value=${ui.num(totals.adapters)} note=${states} />
    <${ui.Tile} name="Size" value=${ui.bytes(totals.bytes)} note="of all living versions" />
    <${ui.Tile} name="Requests" testid="total-requests" value=${ui.num(totals.requests)} />
    <${ui.Tile} name="Errors" testid="total-errors" value=${ui.num(totals.errors)} note="made by the server" />
    <${ui.Tile} name="Tokens" value=${ui.compact(totals.tokens)} note=${ui.num(totals.tokens)} />
  <//>`;
}

/** @param {Set<string>} picked @param {(rows: any[], isOn: boolean) => void} pick */
const columns = (picked, pick) => [
  {
    title: "Adapter",
    cell: (/** @type {any} */ row) => html`<label class="hidden" for=${`pick-${keyOf(row)}`}>Choose ${keyOf(row)}</label>
      <input type="checkbox" id=${`pick-${keyOf(row)}`} data-testid="pick" checked=${picked.has(keyOf(row))}
        onChange=${(/** @type {any} */ event) => pick([row], event.target.checked)} />
      ${" "}<a href=${adapterHref(row.tenant, row.name)}>${row.tenant}/${row.name}</a>
      ${row.tags.map((/** @type {string} */ tag) => html` <${TagLink} tag=${tag} />`)}`,
  },
  { title: "State", cell: (/** @type {any} */ row) => html`<span>${row.version} <${ui.Badge} kind=${KINDS[row.state] ?? "off"}>${row.state}<//></span>` },
  {
    title: "Released",
    cell: (/** @type {any} */ row) => html`<span><${Traffic} row=${row} />
      ${row.released.filter((/** @type {any} */ one) => one.state !== "ready" && one.version !== row.version).map(
        (/** @type {any} */ one) => html` <${ui.Badge} kind=${KINDS[one.state] ?? "off"}>${one.version} ${one.state}<//>`)}
      ${row.run && html` <${RunBadge} run=${{ status: row.run }} />`}</span>`,
  },
  { title: "Requests", number: true, cell: (/** @type {any} */ row) => ui.num(row.requests) },
  { title: "Errors", number: true, cell: (/** @type {any} */ row) => html`<span class=${row.errors ? "bad" : ""}>${ui.num(row.errors)}${
    row.errors > 0 && ` (${ui.percent(row.errors / row.requests)})`}</span>` },
  { title: "Tokens", number: true, cell: (/** @type {any} */ row) => ui.num(row.tokens) },
  { title: "First token", number: true, cell: (/** @type {any} */ row) => ui.seconds(row.first_token_seconds) },
  { title: "Last use", cell: (/** @type {any} */ row) => html`<${Ago} at=${row.last_used_at} />` },
  { title: "Where", cell: (/** @type {any} */ row) => (row.residency ? row.residency[0] : "–") },
  { title: "Size", number: true, cell: (/** @type {any} */ row) => ui.bytes(row.bytes) },
  { title: "Pinned", number: true, cell: (/** @type {any} */ row) => ui.num(row.pinned) },
];

/** What takes the traffic, which leads to the release. @param {{ row: any }} props Of GET /adapters. */
function Traffic({ row }) {
  const shown = html`<${Released} release=${{ targets: row.released }} />`;
  if (!row.released.length) return shown;
  return html`<a data-testid="see-release" href=${releaseHref(row.tenant, row.name)}><span class="hidden">Release of ${keyOf(row)}: </span>${shown}</a>`;
}

/** @param {{ at: string | null }} props */
function Ago({ at }) {
  if (!at) return html`<span class="note">none</span>`;
  return html`<time datetime=${at} title=${ui.fullDateTime(at)}>${ui.seconds(Math.max(0, (Date.now() - Date.parse(at)) / 1000))} ago</time>`;
}

/** What each change does to one adapter. A pin is of its newest version. @type {Record<string, (row: any, tag: string) => Promise<any>>} */
const ACTS = {
  Pin: (row) => api.send("PUT", path`tenants/${row.tenant}/adapters/${row.name}/versions/${row.version}/pin`),
  Unpin: (row) => api.send("DELETE", path`tenants/${row.tenant}/adapters/${row.name}/versions/${row.version}/pin`),
  Tag: (row, tag) => editTags(row.tenant, row.name, [tag], []),
  Untag: (row, tag) => editTags(row.tenant, row.name, [], [tag]),
  Delete: (row) => api.send("DELETE", path`tenants/${row.tenant}/adapters/${row.name}`),
};
/** @type {Record<string, (rows: any[], tag: string) => string>} */
const QUESTIONS = {
  Pin: (rows) => `Pin the newest version of ${counted(rows)}?`,
  Unpin: (rows) => `Unpin the newest version of ${counted(rows)}?`,
  Tag: (rows, tag) => `Add the tag ${tag} to ${counted(rows)}?`,
  Untag: (rows, tag) => `Remove the tag ${tag} from ${counted(rows)}? ${ui.num(rows.filter((row) => row.tags.includes(tag)).length)} of them have it.`,
  Delete: (rows) => `Delete ${counted(rows)} with ${versions(rows.reduce((sum, row) => sum + row.num_versions, 0))}? ${
    ui.num(rows.filter((row) => row.requests).length)} of them got requests in this time. This cannot be undone.`,
};

/** @param {number} count */
const versions = (count) => (count === 1 ? "the only version" : `all ${ui.num(count)} versions`);

/** @param {any[]} rows */
function counted(rows) {
  const tenants = new Set(rows.map((row) => row.tenant)).size;
  return `${ui.num(rows.length)} ${rows.length === 1 ? "adapter" : "adapters"} of ${ui.num(tenants)} ${tenants === 1 ? "tenant" : "tenants"}`;
}

/**
 * One question for all that were chosen; then one request after another, whatever is listed meanwhile.
 * @param {{ rows: any[], shown: number, onDone: (changed: any[]) => void }} props `shown`: the rows of the page; without any there is
 *   no bar, unless it works. `onDone` gets the rows that changed.
 */
function Bulk({ rows, shown, onDone }) {
  const [asked, setAsked] = useState("");
  const [tag, setTag] = useState("");
  const [work, setWork] = useState({ done: 0, of: 0 });
  const [failed, setFailed] = useState(/** @type {{ row: any, error: any }[]} */ ([]));
  const dialog = useRef(/** @type {HTMLDialogElement | null} */ (null));
  const left = useRef(false);
  useEffect(() => () => void (left.current = true), []);

  /** @param {string} act */
  function ask(act) {
    setAsked(act);
    dialog.current?.showModal();
  }

  async function run() {
    const chosen = rows;
    const changed = [];
    const refused = [];
    dialog.current?.close();
    setFailed([]);
    for (const [number, row] of chosen.entries()) {
      if (left.current) return; // a page that is left changes nothing more
      setWork({ done: number, of: chosen.length });
      try {
        await ACTS[asked](row, tag);
        changed.push(row);
      } catch (error) {
        refused.push({ row, error });
      }
    }
    setWork({ done: 0, of: 0 });
    setFailed(refused);
    onDone(changed);
  }

  const busy = work.of > 0;
  return html`<div class=${shown || busy ? "actions" : "hidden"}>
      <span data-testid="picked" role="status">${busy ? `${ui.num(work.done)} of ${ui.num(work.of)} done…` : `${ui.num(rows.length)} chosen`}</span>
      <input data-testid="bulk-tag-name" aria-label="Tag to add or remove" placeholder="tag" value=${tag} maxlength="32" spellcheck=${false}
        autocomplete="off" disabled=${busy} onInput=${(/** @type {any} */ event) => setTag(event.target.value.trim())} />
      ${Object.keys(ACTS).map((act) => html`<button type="button" data-testid=${`bulk-${act.toLowerCase()}`}
        class=${act === "Delete" ? "danger" : ""} disabled=${busy || !rows.length || (act.endsWith("ag") && !tag)} onClick=${() => ask(act)}>${act}</button>`)}
    </div>
    ${failed.length > 0 && html`<div class="error" role="alert" data-testid="bulk-failed">
      <p><strong>${ui.num(failed.length)} did not change.</strong></p>
      <ul>${failed.map(({ row, error }) => html`<li>${keyOf(row)}: ${error.message}</li>`)}</ul>
    </div>`}
    <dialog ref=${dialog} aria-label=${asked} data-testid="bulk-question">
      <p>${asked && rows.length > 0 && QUESTIONS[asked](rows, tag)}</p>
      <div class="actions">
        <button type="button" class=${asked === "Delete" ? "danger" : "primary"} data-testid="bulk-yes" onClick=${run}>${asked}</button>
        <button type="button" data-testid="bulk-no" onClick=${() => dialog.current?.close()}>Keep as it is</button>
      </div>
    </dialog>`;
}
