/** Now: what the engine does at this moment, and the last minutes or hour of this server's requests, for operators. */
import { api, path } from "../lib/api.js";
import { Chart } from "../lib/chart.js";
import { html, useRef, useState } from "../lib/html.js";
import { place, query, setQuery } from "../lib/place.js";
import { usePoll } from "../lib/poll.js";
import * as ui from "../lib/ui.js";
import { adapterHref, figuresHref, releaseHref } from "./adapters.js";

const EVERY_MS = 2000;
/** The tenants are read for their weights, which few change. */
const TENANTS_MS = 30_000;
/** A slice of the history has 10 seconds. */
const HISTORY_MS = 10_000;
/** Tenants and adapters with a row of their own. */
const ROWS = 10;

/**
 * The tenants with a sequence, with their part of the batch beside their part of the weights.
 * @param {any} stats @param {any[]} tenants
 */
export function shares(stats, tenants) {
  const weights = new Map(tenants.map((one) => [one.id, one.weight]));
  const rows = Object.entries(stats?.tenants ?? {})
    .map(([id, of]) => ({ id, running: of.running, waiting: of.waiting, weight: weights.get(id) ?? 1 }))
    .filter((row) => row.running || row.waiting);
  const total = rows.reduce((sum, row) => sum + row.running, 0);
  const weight = rows.reduce((sum, row) => sum + row.weight, 0);
  return rows
    .map((row) => ({ ...row, share: total ? row.running / total : 0, due: row.weight / weight }))
    .sort((a, b) => b.running - a.running || b.waiting - a.waiting || (a.id < b.id ? -1 : 1));
}

export default function Now() {
  const known = useRef({ at: -Infinity, tenants: /** @type {any[]} */ ([]) });
  const poll = usePoll(
    async (signal) => {
      const isOld = Date.now() - known.current.at >= TENANTS_MS;
      const [engine, cluster, tenants] = await Promise.all([
        api.get("engine", {}, { signal }),
        api.get("cluster", { limit: 1 }, { signal }),
        isOld ? api.list("tenants", {}, { signal }) : known.current.tenants,
      ]);
      if (isOld) known.current = { at: Date.now(), tenants };
      return { engine, cluster, tenants };
    },
    [],
    EVERY_MS,
  );
  return html`<${ui.Page} title="Now">
    <${ui.Loaded} poll=${poll}>${(/** @type {any} */ { engine }) => html`<${Moment} engine=${engine} />`}<//>
    <${Past} />
    ${poll.data && html`<${Machines} ...${poll.data} onChange=${poll.reload} />`}
  <//>`;
}

/** @param {{ engine: any }} props */
function Moment({ engine }) {
  const { stats, info } = engine;
  return html`
    ${!engine.healthy && html`<p class="error" role="alert"><strong>The engine is not ready.</strong> ${engine.unhealthy_reason}</p>`}
    <${ui.Tiles}>
      <${ui.Tile} name="Running" testid="running" value=${ui.num(stats?.num_running)} note=${`of ${ui.num(info.max_num_seqs)} places`} />
      <${ui.Tile} name="Waiting" testid="waiting" value=${ui.num(stats?.num_waiting)} note=${`of ${ui.num(info.max_waiting)}`} />
      <${ui.Tile} name="Adapters in use" value=${ui.num(stats?.running_adapters.length)} note=${`${ui.num(stats?.waiting_adapters.length)} waited for`} />
      <${ui.Tile} name="Engine restarts" value=${ui.num(engine.restarts)} note=${info.device} />
      <${ui.Tile} name="Preemptions" value=${ui.num(stats?.num_preemptions)} note="since the engine began" />
    <//>
    <${ui.Words} of=${["place"]} />`;
}

/** Choices in the address: the value and its words; the first is meant where the address has none. @type {Record<string, [string, string][]>} */
const CHOICES = {
  range: [["", "5 minutes"], ["1h", "hour"]],
  sort: [["", "errors"], ["error_rate", "error rate"], ["limited", "429s"], ["tokens", "tokens"], ["first_token", "first token"], ["requests", "requests"]],
};

/** The last minutes or the last hour: who hurts, and the course of it. */
function Past() {
  const here = place.value;
  const chosen = Object.fromEntries(["range", "sort", "tenant", "adapter"].map((name) => [name, query.value[name] ?? ""]));
  const servers = useRef(/** @type {Set<string>} */ (new Set()));
  const poll = usePoll(
    async (signal) => {
      const found = await api.get("history", { ...chosen, limit: ROWS }, { signal });
      servers.current.add(found.server.id);
      return { found, several: servers.current.size > 1 };
    },
    [JSON.stringify(chosen)],
    HISTORY_MS,
  );

  /** @param {string} name @param {string} label */
  const choice = (name, label) => html`<${ui.Field} label=${label}>
    <select data-testid=${`now-${name}`} value=${chosen[name]} onChange=${(/** @type {any} */ event) => setQuery(here, name, event.target.value)}>
      ${CHOICES[name].map(([value, words]) => html`<option value=${value}>${words}</option>`)}
      ${CHOICES[name].every(([value]) => value !== chosen[name]) && html`<option value=${chosen[name]}>${chosen[name]}</option>`}
    </select>
  <//>`;
  /** @param {string} name @param {string} label */
  const filter = (name, label) => html`<${ui.Field} label=${label}>
    <${ui.FilterInput} testid=${`now-${name}`} placeholder="all" value=${chosen[name]}
      onText=${(/** @type {string} */ text) => setQuery(here, name, text)} />
  <//>`;

  return html`<div class="form filters">
      ${choice("range", "Figures of the last")} ${choice("sort", "Most first")} ${filter("tenant", "Tenant")} ${filter("adapter", "Adapter")}
    </div>
    <${ui.Loaded} poll=${poll}>${(/** @type {any} */ { found, several }) => html`<${Figures} ...${found} several=${several} />`}<//>`;
}

/** @param {any} props What GET /history answers; `several`: servers with other ids have answered this page. */
function Figures({ server, slice_seconds: length, slices, total, tenants, other_tenants, adapters, other_adapters, exact, several }) {
  const times = slices.map((/** @type {any} */ one) => Date.parse(one.start) / 1000);
  /** @param {string} name @param {(figures: any) => number | null} of */
  const series = (name, of) => ({ name, values: slices.map((/** @type {any} */ { figures }) => of(figures)) });
  /** @param {string} name @param {string} field */
  const rate = (name, field) => series(name, (figures) => figures[field] / length);
  const node = server.node ? ` ${server.node}` : "";
  return html`
    <p class="note" data-testid="now-server">Requests that ended at the server${node}, which has counted since <${ui.Time} at=${server.since} />.
      ${several && " This page was answered by more than one server, or by one that was started anew: each counts its own requests."}
      ${!exact && " More tenants or adapters were asked than are kept: a row may be too small, and so may all figures of one tenant or adapter."}</p>
    ${total.requests === 0
      ? html`<${ui.Empty}>${exact ? "No request ended in this time." : "Of this time no request of it was kept; some may have ended."}<//>`
      : html`<${ui.Section} title="Adapters">
          <${Rows} caption="Adapters" testid="now-adapter-row" rows=${adapters} others=${other_adapters} title="Adapter" />
        <//>
        ${tenants.length > 0 && html`<${ui.Section} title="Tenants">
          <${Rows} caption="Tenants" testid="now-tenant-row" rows=${tenants} others=${other_tenants} title="Tenant" />
        <//>`}
        <div class="charts">
          <${ui.Section} title="Requests a second">
            <${Chart} label="Requests, 429s and errors a second" times=${times} show=${ui.figure}
              series=${[rate("requests", "requests"), rate("429s", "limited"), rate("errors", "errors")]} />
          <//>
          <${ui.Section} title="Tokens a second">
            <${Chart} label="Tokens a second" times=${times} show=${ui.figure}
              series=${[rate("prompt computed", "computed_tokens"), rate("prompt cached", "cached_tokens"), rate("output", "output_tokens")]} />
          <//>
          <${ui.Section} title="First token">
            <${Chart} label="Seconds to the first token" times=${times} show=${ui.seconds}
              series=${[series("median", (of) => of.first_token_seconds), series("95 %", (of) => of.first_token_p95_seconds)]} />
          <//>
          <${ui.Section} title="Between two tokens">
            <${Chart} label="Seconds between two tokens" times=${times} show=${ui.seconds}
              series=${[series("median", (of) => of.gap_seconds), series("95 %", (of) => of.gap_p95_seconds)]} />
          <//>
        </div>`}`;
}

/** @param {any} row Of GET /history. */
function Name({ tenant, adapter, version }) {
  if (tenant === null) return html`<span class="note">others</span>`;
  const of = path`tenants/${tenant}`;
  if (version === null) return html`<a href=${`#/${of}`}>${adapter === null ? tenant : `${tenant}/${adapter}`}</a>`;
  return html`<a href=${adapterHref(tenant, adapter)}>${tenant}/${adapter}@${version}</a>`;
}

/** Where a row leads: to its figures alone, and to the release of an adapter. @param {any} row Of GET /history. */
function Ways({ tenant, adapter, version }) {
  if (tenant === null) return null;
  const { range } = query.value;
  const chosen = { ...(range && { range }), tenant, ...(adapter !== null && { adapter }) };
  const of = adapter === null ? tenant : `${tenant}/${adapter}`;
  return html`<span><a data-testid="see-figures" href=${figuresHref(chosen)} aria-label=${`Figures of ${of}`}>Figures</a>
    ${version !== null && html` <a data-testid="see-release" href=${releaseHref(tenant, adapter)} aria-label=${`Release of ${of}`}>Release</a>`}</span>`;
}

/** How many of the requests, as a part of them too. @param {{ count: number, of: number, bad?: boolean }} props */
const Part = ({ count, of, bad }) =>
  html`<span class=${bad && count ? "bad" : ""}>${ui.num(count)}${count > 0 && ` (${ui.percent(count / of)})`}</span>`;

/** @param {{ caption: string, testid: string, title: string, rows: any[], others: any }} props `others`: the figures without a row. */
function Rows({ caption, testid, title, rows, others }) {
  const all = others.requests ? [...rows, { tenant: null, adapter: null, version: null, figures: others }] : rows;
  /** @param {string} named @param {(figures: any) => any} cell */
  const column = (named, cell) => ({ title: named, number: true, cell: (/** @type {any} */ row) => cell(row.figures) });
  return html`<${ui.Table} caption=${caption} testid=${testid} rows=${all} keyOf=${(/** @type {any} */ row) =>
      [row.tenant ?? "others", row.adapter, row.version].filter((one) => one !== null).join("/")}
    columns=${[
      { title, cell: (/** @type {any} */ row) => html`<${Name} ...${row} />` },
      column("Requests", (of) => ui.num(of.requests)),
      column("Errors", (of) => html`<${Part} bad count=${of.errors} of=${of.requests} />`),
      column("429s", (of) => html`<${Part} count=${of.limited} of=${of.requests} />`),
      column("Tokens", (of) => ui.num(of.computed_tokens + of.cached_tokens + of.output_tokens)),
      column("First token", (of) => ui.seconds(of.first_token_seconds)),
      column("First token, 95 %", (of) => ui.seconds(of.first_token_p95_seconds)),
      column("Between tokens", (of) => ui.seconds(of.gap_seconds)),
      { title: "See", cell: (/** @type {any} */ row) => html`<${Ways} ...${row} />` },
    ]} />`;
}

/** @param {{ engine: any, cluster: any, tenants: any[], onChange: () => void }} props */
function Machines({ engine, cluster, tenants, onChange }) {
  const { stats, info } = engine;
  const several = cluster.wanted > 1 || cluster.replicas.length > 1;
  return html`
    <${ui.Section} title="The batch by tenant" note="The share of running sequences, beside the share that the weights give the tenants that have any.">
      <${Batch} rows=${shares(stats, tenants)} />
    <//>
    ${several && html`<${Replicas} cluster=${cluster} onChange=${onChange} />`}
    ${stats && html`<${ui.Section} title="Memory">
      <${ui.Bar} name="KV blocks" testid="kv" used=${stats.num_kv_blocks_used} limit=${stats.num_kv_blocks} />
      <${ui.Bar} name="Adapters on the device" show=${ui.bytes} used=${stats.num_arena_pages_used * info.arena_page_bytes}
        limit=${stats.num_arena_pages * info.arena_page_bytes} />
      <${ui.Bar} name="Adapters in host memory" show=${ui.bytes} used=${stats.host_bytes_used} limit=${stats.host_bytes} />
      <p><a href="#/all-adapters?sort=last_used&order=desc">Each adapter and where it is</a></p>
    <//>`}`;
}

/** @param {{ rows: ReturnType<typeof shares> }} props */
function Batch({ rows }) {
  return html`<${ui.Table} caption="The batch by tenant" rows=${rows} keyOf=${(/** @type {any} */ row) => row.id}
    testid="batch-row" empty="No request runs or waits."
    columns=${[
      { title: "Tenant", cell: (/** @type {any} */ row) => html`<a href=${"#/" + path`tenants/${row.id}`}>${row.id}</a>` },
      { title: "Running", number: true, cell: (/** @type {any} */ row) => ui.num(row.running) },
      { title: "Waiting", number: true, cell: (/** @type {any} */ row) => ui.num(row.waiting) },
      { title: "Share", number: true, cell: (/** @type {any} */ row) => ui.percent(row.share) },
      { title: "By weight", number: true, cell: (/** @type {any} */ row) => ui.percent(row.due) },
      { title: "Weight", number: true, cell: (/** @type {any} */ row) => ui.num(row.weight) },
    ]} />`;
}

/** @param {{ cluster: any, onChange: () => void }} props */
function Replicas({ cluster, onChange }) {
  const kinds = /** @type {Record<string, string>} */ ({ ready: "good", draining: "busy", away: "bad" });
  const ready = cluster.replicas.filter((/** @type {any} */ one) => one.state === "ready").length;
  return html`<${ui.Section} title="Replicas" note=${`${ui.num(cluster.wanted)} wanted. One that is drained finishes what it has and gets nothing new.`}>
    <${ui.Table} caption="Replicas" rows=${cluster.replicas} keyOf=${(/** @type {any} */ row) => row.id} testid="replica-row"
      columns=${[
        { title: "Replica", cell: (/** @type {any} */ row) => row.id },
        { title: "State", cell: (/** @type {any} */ row) => html`<span><${ui.Badge} kind=${kinds[row.state]}>${row.state}<//> ${row.reason}</span>` },
        { title: "Node", cell: (/** @type {any} */ row) => row.node },
        { title: "Requests", number: true, cell: (/** @type {any} */ row) => ui.num(row.live_requests) },
        { title: "On the device", number: true, cell: (/** @type {any} */ row) => ui.num(row.adapters.hot) },
        { title: "In host memory", number: true, cell: (/** @type {any} */ row) => ui.num(row.adapters.warm) },
        { title: "Restarts", number: true, cell: (/** @type {any} */ row) => ui.num(row.restarts) },
        { title: "Change", cell: (/** @type {any} */ row) => html`<${Drain} row=${row} isLast=${ready < 2} onChange=${onChange} />` },
      ]} />
  <//>`;
}

/** A drain, or its undo: nothing is lost by either. @param {{ row: any, isLast: boolean, onChange: () => void }} props */
function Drain({ row, isLast, onChange }) {
  const [error, setError] = useState(/** @type {any} */ (null));
  const [busy, setBusy] = useState(false);
  const drained = row.state === "draining";
  if (row.state === "away" || (!drained && isLast)) return null;

  async function change() {
    setBusy(true);
    try {
      await api.send(drained ? "DELETE" : "POST", path`cluster/replicas/${row.id}/drain`);
      setError(null);
    } catch (refused) {
      setError(refused);
    }
    setBusy(false);
    onChange();
  }

  return html`<span><button type="button" data-testid=${drained ? "undrain" : "drain"} disabled=${busy} onClick=${change}
      aria-label=${`${drained ? "Use again" : "Drain"} ${row.id}`}>${drained ? "Use again" : "Drain"}</button>
    ${error && html`<${ui.ErrorBox} error=${error} />`}</span>`;
}
