/** A tenant's requests and tokens by day and adapter, as the ledger sums them up. */
import { api, path } from "../lib/api.js";
import { Chart } from "../lib/chart.js";
import { html, useState } from "../lib/html.js";
import { usePoll } from "../lib/poll.js";
import * as ui from "../lib/ui.js";

const DAY_S = 86_400;
/** Adapters with a series of their own; the table has all. */
const SERIES = 5;
const COUNTS = /** @type {[string, string][]} */ ([
  ["requests", "Requests"],
  ["prompt_tokens", "Prompt tokens"],
  ["cached_tokens", "Of them cached"],
  ["completion_tokens", "Answer tokens"],
]);

/**
 * Sums for one time span, so that the totals are those of the rows.
 * @param {string} id @param {number} days @param {AbortSignal} signal
 */
async function readUsage(id, days, signal) {
  const where = path`tenants/${id}/usage`;
  const end = new Date();
  const start = new Date(Math.floor(end.getTime() / 1000 / DAY_S - days + 1) * DAY_S * 1000);
  const span = { start: start.toISOString(), end: end.toISOString() };
  const [total, adapters, byDay] = await Promise.all([
    api.get(where, { ...span, bucket: "none" }, { signal }),
    api.list(where, { ...span, bucket: "none", group_by: "adapter" }, { signal }),
    api.list(where, { ...span, bucket: "day", group_by: "adapter" }, { signal, most: 20_000 }),
  ]);
  return { total: total.data[0] ?? null, adapters, byDay, start: start.getTime() / 1000, days };
}

/** @param {any} row */
const tokens = (row) => row.prompt_tokens + row.completion_tokens;

/**
 * For each day one value of each of the largest adapters, and one of all others.
 * @param {any} usage @param {(row: any) => number} valueOf
 */
export function seriesOf(usage, valueOf) {
  const times = Array.from({ length: usage.days }, (_, day) => usage.start + day * DAY_S);
  const largest = [...usage.adapters].sort((a, b) => valueOf(b) - valueOf(a)).slice(0, SERIES).map((row) => row.adapter);
  const names = usage.adapters.length > largest.length ? [...largest, "others"] : largest;
  const series = names.map((name) => ({ name, values: times.map(() => 0) }));
  for (const row of usage.byDay) {
    const day = Math.round((Date.parse(row.start) / 1000 - usage.start) / DAY_S);
    const place = largest.indexOf(row.adapter);
    series[place < 0 ? names.length - 1 : place].values[day] += valueOf(row);
  }
  return { times, series };
}

/** @param {{ id: string }} props */
export function Usage({ id }) {
  const [days, setDays] = useState(30);
  const poll = usePoll((signal) => readUsage(id, days, signal), [id, days]);
  return html`<${ui.Section} title="Usage" note="Days are UTC. A request counts some seconds after its end.">
    <div class="form">
      <${ui.Field} label="Period">
        <select data-testid="usage-days" value=${days} onChange=${(/** @type {any} */ event) => setDays(Number(event.target.value))}>
          ${[7, 30, 90].map((some) => html`<option value=${some}>${some} days</option>`)}
        </select>
      <//>
      <button type="button" onClick=${poll.reload}>Reload</button>
    </div>
    <${ui.Loaded} poll=${poll}>${(/** @type {any} */ usage) =>
      usage.total === null || usage.total.requests === 0
        ? html`<${ui.Empty}>Nothing was used in this time.<//>`
        : html`<h3>Requests by day and adapter</h3>
            <${Chart} byDay label="Requests by day and adapter" ...${seriesOf(usage, (row) => row.requests)} />
            <h3>Tokens by day and adapter</h3>
            <${Chart} byDay label="Tokens by day and adapter" ...${seriesOf(usage, tokens)} />
            <${Sums} usage=${usage} />`}<//>
  <//>`;
}

/** @param {{ usage: any }} props */
function Sums({ usage }) {
  const columns = [
    { title: "Adapter", cell: (/** @type {any} */ row) => row.adapter },
    ...COUNTS.map(([name, title]) => ({ title, number: true, cell: (/** @type {any} */ row) => ui.num(row[name]) })),
  ];
  const foot = ["All", ...COUNTS.map(([name]) => html`<span data-testid=${`total-${name}`}>${ui.num(usage.total[name])}</span>`)];
  return html`<${ui.Table} caption="Usage by adapter" rows=${usage.adapters} keyOf=${(/** @type {any} */ row) => row.adapter}
    columns=${columns} foot=${foot} testid="usage-row" />`;
}
