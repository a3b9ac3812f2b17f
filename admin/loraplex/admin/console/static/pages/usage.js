/** A tenant's requests and tokens by day and adapter or key, as the ledger sums them up. */
import { api, ApiError, path } from "../lib/api.js";
import { Chart } from "../lib/chart.js";
import { save } from "../lib/download.js";
import { html, useState } from "../lib/html.js";
import { usePoll } from "../lib/poll.js";
import * as ui from "../lib/ui.js";

const DAY_S = 86_400;
/** Adapters or keys with a series of their own; the table has all. */
const SERIES = 5;
/** Pages of a file that is saved, of 500 rows each. */
const CSV_PAGES = 100;
const COUNTS = /** @type {[string, string][]} */ ([
  ["requests", "Requests"],
  ["prompt_tokens", "Prompt tokens"],
  ["cached_tokens", "Of them cached"],
  ["completion_tokens", "Answer tokens"],
]);

/**
 * Sums for one time span, so that the totals are those of the rows.
 * @param {string} id @param {number} days @param {By} by @param {AbortSignal} signal
 */
async function readUsage(id, days, by, signal) {
  const where = path`tenants/${id}/usage`;
  const span = spanOf(days);
  const [total, groups, byDay] = await Promise.all([
    api.get(where, { ...span, bucket: "none" }, { signal }),
    api.list(where, { ...span, bucket: "none", group_by: by }, { signal }),
    api.list(where, { ...span, bucket: "day", group_by: by }, { signal, most: 20_000 }),
  ]);
  return { total: total.data[0] ?? null, groups, byDay, by, start: Date.parse(span.start) / 1000, days };
}

/** So many days of UTC up to now. @param {number} days */
function spanOf(days) {
  const end = new Date();
  const start = new Date(Math.floor(end.getTime() / 1000 / DAY_S - days + 1) * DAY_S * 1000);
  return { start: start.toISOString(), end: end.toISOString() };
}

/**
 * Save all sums by day, adapter and key as the server writes them, a page after another. Throws ApiError.
 * @param {string} id @param {number} days
 */
async function saveCsv(id, days) {
  const asked = { ...spanOf(days), bucket: "day", group_by: "adapter,key", limit: 500 };
  /** @type {string[]} */
  const parts = [];
  /** @type {string | null} */
  let cursor = null;
  do {
    if (parts.length === CSV_PAGES) throw new ApiError(0, "too_large", "This is more than the page reads. Use loraplex usage --csv.");
    /** @type {Response} */
    const answer = await api.request("GET", path`tenants/${id}/usage`, { params: { ...asked, cursor }, headers: { accept: "text/csv" } });
    const text = await answer.text();
    parts.push(cursor === null ? text : text.slice(text.indexOf("\n") + 1)); // each page begins with the columns' names
    cursor = answer.headers.get("x-next-cursor");
  } while (cursor !== null);
  save(new Blob(parts, { type: "text/csv" }), `usage-${id}-${asked.end.slice(0, 10)}-${days}-days.csv`);
}

/** @typedef {"adapter" | "key"} By */

/** @param {any} row */
const tokens = (row) => row.prompt_tokens + row.completion_tokens;

/**
 * For each day one value of each of the largest groups, and one of all others.
 * @param {any} usage @param {(row: any) => number} valueOf
 */
function seriesOf(usage, valueOf) {
  const times = Array.from({ length: usage.days }, (_, day) => usage.start + day * DAY_S);
  const largest = [...usage.groups].sort((a, b) => valueOf(b) - valueOf(a)).slice(0, SERIES).map((row) => row[usage.by]);
  const names = usage.groups.length > largest.length ? [...largest, "others"] : largest;
  const series = names.map((name) => ({ name, values: times.map(() => 0) }));
  for (const row of usage.byDay) {
    const day = Math.round((Date.parse(row.start) / 1000 - usage.start) / DAY_S);
    const place = largest.indexOf(row[usage.by]);
    series[place < 0 ? names.length - 1 : place].values[day] += valueOf(row);
  }
  return { times, series };
}

/** @param {{ id: string }} props */
export function Usage({ id }) {
  const [days, setDays] = useState(30);
  const [by, setBy] = useState(/** @type {By} */ ("adapter"));
  const [error, setError] = useState(/** @type {any} */ (null));
  const [isLoading, setLoading] = useState(false);
  const poll = usePoll((signal) => readUsage(id, days, by, signal), [id, days, by]);
  async function onCsv() {
    setLoading(true);
    setError(null);
    await saveCsv(id, days).catch(setError);
    setLoading(false);
  }
  return html`<${ui.Section} title="Usage" note="Days are UTC. A request counts some seconds after its end.">
    <div class="form">
      <${ui.Field} label="Period">
        <select data-testid="usage-days" value=${days} onChange=${(/** @type {any} */ event) => setDays(Number(event.target.value))}>
          ${[7, 30, 90].map((some) => html`<option value=${some}>${some} days</option>`)}
        </select>
      <//>
      <${ui.Field} label="By">
        <select data-testid="usage-by" value=${by} onChange=${(/** @type {any} */ event) => setBy(event.target.value)}>
          <option value="adapter">adapter</option>
          <option value="key">key</option>
        </select>
      <//>
      <button type="button" onClick=${poll.reload}>Reload</button>
      <button type="button" data-testid="usage-csv" title="By day, adapter and key" disabled=${isLoading} onClick=${onCsv}>
        ${isLoading ? "Loading…" : "Download CSV"}</button>
    </div>
    ${error && html`<${ui.ErrorBox} error=${error} />`}
    <${ui.Loaded} poll=${poll}>${(/** @type {any} */ usage) =>
      usage.total === null || usage.total.requests === 0
        ? html`<${ui.Empty}>Nothing was used in this time.<//>`
        : html`<h3>Requests by day and ${usage.by}</h3>
            <${Chart} byDay label=${`Requests by day and ${usage.by}`} ...${seriesOf(usage, (row) => row.requests)} />
            <h3>Tokens by day and ${usage.by}</h3>
            <${Chart} byDay label=${`Tokens by day and ${usage.by}`} ...${seriesOf(usage, tokens)} />
            <${Sums} usage=${usage} />`}<//>
  <//>`;
}

/** @param {{ usage: any }} props */
function Sums({ usage }) {
  const columns = [
    { title: usage.by === "key" ? "Key" : "Adapter", cell: (/** @type {any} */ row) => row[usage.by] },
    ...COUNTS.map(([name, title]) => ({ title, number: true, cell: (/** @type {any} */ row) => ui.num(row[name]) })),
  ];
  const foot = ["All", ...COUNTS.map(([name]) => html`<span data-testid=${`total-${name}`}>${ui.num(usage.total[name])}</span>`)];
  return html`<${ui.Table} caption=${`Usage by ${usage.by}`} rows=${usage.groups} keyOf=${(/** @type {any} */ row) => row[usage.by]}
    columns=${columns} foot=${foot} testid="usage-row" />`;
}
