/** Now: what the engine does at this moment, for operators. */
import { api, path } from "../lib/api.js";
import { Chart } from "../lib/chart.js";
import { html, useRef, useState } from "../lib/html.js";
import { place, query, setQuery } from "../lib/place.js";
import { usePoll } from "../lib/poll.js";
import * as ui from "../lib/ui.js";
import { adapterHref } from "./adapters.js";

const EVERY_MS = 2000;
const HISTORY = 150;
/** Tiles of adapters on a page. */
const TILES = 60;

/** @typedef {{ at: number, steps: number, tokens: number, restarts: number }} Count */

/** Counters of the steps become times between two readings. */
class StepHistory {
  constructor() {
    /** @type {number[]} */
    this.times = [];
    /** @type {(number | null)[]} */
    this.stepSeconds = [];
    /** @type {(number | null)[]} */
    this.running = [];
    /** @type {(number | null)[]} */
    this.waiting = [];
    /** @type {Count | null} */
    this.last = null;
    /** Of the last two readings. @type {number | null} */
    this.tokensPerStep = null;
  }

  /** @param {any} engine As GET /engine answers. @param {number} at Seconds. */
  add(engine, at) {
    const stats = engine.stats;
    const now = stats && { at, steps: stats.num_steps, tokens: stats.num_step_tokens, restarts: engine.restarts };
    const last = this.last;
    // A new engine process begins at 0.
    const steps = now && last && now.restarts === last.restarts ? now.steps - last.steps : 0;
    this.tokensPerStep = steps > 0 && last ? (now.tokens - last.tokens) / steps : null;
    this.times = [...this.times, at].slice(-HISTORY);
    this.stepSeconds = [...this.stepSeconds, steps > 0 && last ? (at - last.at) / steps : null].slice(-HISTORY);
    this.running = [...this.running, stats?.num_running ?? null].slice(-HISTORY);
    this.waiting = [...this.waiting, stats?.num_waiting ?? null].slice(-HISTORY);
    this.last = now;
  }
}

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
  const history = useRef(new StepHistory());
  const poll = usePoll(
    async (signal) => {
      const [engine, cluster, tenants] = await Promise.all([
        api.get("engine", {}, { signal }),
        api.get("cluster", { limit: 1 }, { signal }),
        api.list("tenants", {}, { signal }),
      ]);
      history.current.add(engine, Date.now() / 1000);
      return { engine, cluster, tenants };
    },
    [],
    EVERY_MS,
  );
  return html`<${ui.Page} title="Now">
    <${ui.Loaded} poll=${poll}>${(/** @type {any} */ data) => html`<${Moment} ...${data} history=${history.current} />`}<//>
    <${Adapters} />
  <//>`;
}

/** @param {{ engine: any, cluster: any, tenants: any[], history: StepHistory }} props */
function Moment({ engine, cluster, tenants, history }) {
  const { stats, info } = engine;
  const several = cluster.wanted > 1 || cluster.replicas.length > 1;
  const step = history.stepSeconds[history.stepSeconds.length - 1];
  return html`
    ${!engine.healthy && html`<p class="error" role="alert"><strong>The engine is not ready.</strong> ${engine.unhealthy_reason}</p>`}
    <${ui.Tiles}>
      <${ui.Tile} name="Running" testid="running" value=${ui.num(stats?.num_running)} note=${`of ${ui.num(info.max_num_seqs)} places`} />
      <${ui.Tile} name="Waiting" testid="waiting" value=${ui.num(stats?.num_waiting)} note=${`of ${ui.num(info.max_waiting)}`} />
      <${ui.Tile} name="Step" testid="step-time" value=${ui.seconds(step)}
        note=${history.tokensPerStep === null ? "no step since the last look" : `${ui.num(Math.round(history.tokensPerStep))} tokens each`} />
      <${ui.Tile} name="Adapters in use" value=${ui.num(stats?.running_adapters.length)} note=${`${ui.num(stats?.waiting_adapters.length)} waited for`} />
      <${ui.Tile} name="Engine restarts" value=${ui.num(engine.restarts)} note=${info.device} />
      <${ui.Tile} name="Preemptions" value=${ui.num(stats?.num_preemptions)} note="since the engine began" />
    <//>
    ${stats && html`<${ui.Bar} name="KV blocks" testid="kv" used=${stats.num_kv_blocks_used} limit=${stats.num_kv_blocks} />`}
    <${ui.Section} title="The batch by tenant" note="The share of running sequences, beside the share that the weights give the tenants that have any.">
      <${Batch} rows=${shares(stats, tenants)} />
    <//>
    <${ui.Section} title="Sequences" note="Since this page was opened, every ${EVERY_MS / 1000} seconds.">
      <${Chart} label="Running and waiting sequences since this page was opened" times=${history.times}
        series=${[{ name: "running", values: history.running }, { name: "waiting", values: history.waiting }]} />
    <//>
    <${ui.Section} title="Time of a step" note="The time between two looks over the steps in it, so a pause counts too.">
      <${Chart} label="Seconds of a step since this page was opened" times=${history.times} show=${ui.seconds}
        series=${[{ name: "step", values: history.stepSeconds }]} />
    <//>
    ${several && html`<${Replicas} cluster=${cluster} />`}`;
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

/** @param {{ cluster: any }} props */
function Replicas({ cluster }) {
  const kinds = /** @type {Record<string, string>} */ ({ ready: "good", draining: "busy", away: "bad" });
  return html`<${ui.Section} title="Replicas" note=${`${ui.num(cluster.wanted)} wanted.`}>
    <${ui.Table} caption="Replicas" rows=${cluster.replicas} keyOf=${(/** @type {any} */ row) => row.id} testid="replica-row"
      columns=${[
        { title: "Replica", cell: (/** @type {any} */ row) => row.id },
        { title: "State", cell: (/** @type {any} */ row) => html`<${ui.Badge} kind=${kinds[row.state]}>${row.state}<//> ${row.reason}` },
        { title: "Node", cell: (/** @type {any} */ row) => row.node },
        { title: "Requests", number: true, cell: (/** @type {any} */ row) => ui.num(row.live_requests) },
        { title: "On the device", number: true, cell: (/** @type {any} */ row) => ui.num(row.adapters.hot) },
        { title: "In host memory", number: true, cell: (/** @type {any} */ row) => ui.num(row.adapters.warm) },
        { title: "Restarts", number: true, cell: (/** @type {any} */ row) => ui.num(row.restarts) },
      ]} />
  <//>`;
}

/** Every version as a tile, by where it is. */
function Adapters() {
  const [cursor, setCursor] = useState(/** @type {string | null} */ (null));
  const { tenant = "", adapter = "" } = query.value;
  const of = { tenant, adapter };
  const here = place.value;
  const poll = usePoll((signal) => api.get("cache", { limit: TILES, cursor, ...of }, { signal }), [cursor, tenant, adapter], EVERY_MS);

  /** @param {"tenant" | "adapter"} name @param {string} label */
  const filter = (name, label) => html`<${ui.Field} label=${label}>
    <${ui.FilterInput} testid=${`cache-${name}`} placeholder="all" value=${of[name]}
      onText=${(/** @type {string} */ text) => (setCursor(null), setQuery(here, name, text))} />
  <//>`;

  return html`<${ui.Section} title="Adapters" note="Each version by its fastest memory: device, host, disk.">
    <div class="form">${filter("tenant", "Tenant")} ${filter("adapter", "Adapter")}</div>
    <${ui.Loaded} poll=${poll}>${(/** @type {any} */ page) => html`
      <${ui.Bar} name="Device memory" show=${ui.bytes} used=${page.totals.device.bytes_used} limit=${page.totals.device.bytes_capacity} />
      <${ui.Bar} name="Host memory" show=${ui.bytes} used=${page.totals.host.bytes_used} limit=${page.totals.host.bytes_capacity} />
      ${page.data.length === 0 && html`<${ui.Empty}>There is no such adapter.<//>`}
      <ul class="adapters" aria-label="Adapters">${page.data.map((/** @type {any} */ row) => html`<${AdapterTile} row=${row} key=${`${row.tenant_id}/${row.name}@${row.version}`} />`)}</ul>
      <${ui.Pager} what="adapters" first=${cursor === null} next=${page.next_cursor}
        onFirst=${() => setCursor(null)} onNext=${() => setCursor(page.next_cursor)} />`}<//>
  <//>`;
}

/** @param {number} time In seconds. */
const ago = (time) => (time < 1 ? "just now" : `${ui.seconds(time)} ago`);

/** @param {{ row: any }} props A row of GET /cache. */
function AdapterTile({ row }) {
  const [fastest] = row.residency;
  const words = [
    row.loading ? "loading" : fastest,
    row.pinned && "pinned",
    row.leases > 0 && `in use by ${ui.num(row.leases)}`,
    row.last_used_seconds_ago !== null && `used ${ago(row.last_used_seconds_ago)}`,
  ];
  return html`<li class=${fastest} data-testid="adapter-tile" data-residency=${fastest}>
    <a href=${adapterHref(row.tenant_id, row.name)}>${row.name}@${row.version}</a>
    <div class="note">${row.tenant_id} · ${ui.bytes(row.disk_bytes)}</div>
    <div>${words.filter(Boolean).join(", ")}</div>
    ${row.error && html`<div class="note">${row.error}</div>`}
  </li>`;
}
