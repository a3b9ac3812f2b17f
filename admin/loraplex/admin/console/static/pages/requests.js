/** Requests: the last that failed, were refused or were slow, of all tenants or of the key's own. */
import { api, path } from "../lib/api.js";
import { html, useState } from "../lib/html.js";
import { place, query, setQuery } from "../lib/place.js";
import { usePoll } from "../lib/poll.js";
import { caller, isOperator } from "../lib/store.js";
import * as ui from "../lib/ui.js";
import { adapterHref } from "./adapters.js";

const ROWS = 50;
const EVERY_MS = 10_000;
const BASE = "(base)";
/** @type {Record<string, [words: string, colour: "good" | "busy" | "bad" | "off"]>} */
const KINDS = { failed: ["failed by the server", "bad"], refused: ["refused or given up", "busy"], slow: ["slow", "off"] };
const STATUSES = ["200", "400", "401", "403", "404", "413", "429", "500", "503", "504"];

/** The address of those that fit. @param {Record<string, string>} chosen */
export const requestsHref = (chosen) => `#/requests?${new URLSearchParams(chosen)}`;

export default function Requests() {
  const here = place.value;
  const own = isOperator.value ? "" : caller.value?.tenant ?? "";
  const names = own ? ["id", "adapter", "kind", "status"] : ["id", "tenant", "adapter", "kind", "status"];
  const chosen = Object.fromEntries(names.map((name) => [name, query.value[name] ?? ""]));
  const of = JSON.stringify(chosen);
  const [cursor, setCursor] = useState({ of, at: /** @type {string | null} */ (null) });
  const at = cursor.of === of ? cursor.at : null;
  const where = own ? path`tenants/${own}/requests` : "requests";
  const poll = usePoll((signal) => api.get(where, { ...chosen, cursor: at, limit: ROWS }, { signal }), [where, of, at], EVERY_MS);

  /** @param {string} name @param {string} label @param {string} [hint] */
  const text = (name, label, hint = "all") => html`<${ui.Field} label=${label}>
    <${ui.FilterInput} testid=${`filter-${name}`} placeholder=${hint} value=${chosen[name]} most=${160}
      onText=${(/** @type {string} */ value) => setQuery(here, name, value)} />
  <//>`;
  /** @param {string} name @param {string} label @param {[string, string][]} choices */
  const choice = (name, label, choices) => html`<${ui.Field} label=${label}>
    <select data-testid=${`filter-${name}`} value=${chosen[name]} onChange=${(/** @type {any} */ event) => setQuery(here, name, event.target.value)}>
      <option value="">all</option>
      ${choices.map(([value, words]) => html`<option value=${value}>${words}</option>`)}
      ${chosen[name] && !choices.some(([value]) => value === chosen[name]) && html`<option value=${chosen[name]}>${chosen[name]}</option>`}
    </select>
  <//>`;

  return html`<${ui.Page} title=${own ? `Requests of ${own}` : "Requests"} actions=${html`<button type="button" onClick=${poll.reload}>Reload</button>`}>
    <p class="note">The last 512 of each kind that this server has in memory, shared by the tenants. Slow are those of each minute that
      waited longest for their first token. Prompts and answers are not kept.</p>
    <div class="form filters">
      ${text("id", "Request id", "any")} ${!own && text("tenant", "Tenant")} ${text("adapter", "Adapter", "support@v3")}
      ${choice("kind", "Kind", Object.entries(KINDS).map(([kind, [words]]) => [kind, words]))}
      ${choice("status", "Status", STATUSES.map((status) => [status, status]))}
    </div>
    <${ui.Loaded} poll=${poll}>${(/** @type {any} */ page) => html`
      <${ui.Table} caption="Requests, the newest first" testid="request-row" keyOf=${(/** @type {any} */ row) => row.id} rows=${page.data}
        columns=${COLUMNS} empty=${chosen.id ? "No request with this id is kept." : "No request like this is kept."} />
      <${ui.Pager} what="requests" first=${at === null} next=${page.next_cursor}
        onFirst=${() => setCursor({ of, at: null })} onNext=${() => setCursor({ of, at: page.next_cursor })} />`}<//>
  <//>`;
}

/** @type {import("../lib/ui.js").Column[]} */
const COLUMNS = [
  { title: "Request", cell: (row) => html`<${Request} row=${row} />` },
  { title: "Ended", cell: (row) => html`<${ui.Time} at=${row.time} />` },
  { title: "How", cell: (row) => html`<${How} row=${row} />` },
  { title: "Whose", cell: (row) => html`<${Whose} row=${row} />` },
  { title: "Queue", number: true, cell: (row) => ui.seconds(row.seconds.queue) },
  { title: "Load", number: true, cell: (row) => ui.seconds(row.seconds.load) },
  { title: "First token", number: true, cell: (row) => ui.seconds(row.seconds.first_token) },
  { title: "Total", number: true, cell: (row) => ui.seconds(row.seconds.total) },
  { title: "Tokens in", number: true, cell: (row) => ui.num(row.tokens.prompt) },
  { title: "Out", number: true, cell: (row) => ui.num(row.tokens.completion) },
];

/** Its id, and behind it what is seldom asked for. @param {{ row: any }} props */
const Request = ({ row }) => html`<details>
  <summary><code class="id">${row.request_id}</code></summary>
  <dl class="facts">
    <dt>Route</dt><dd><code>${row.route}</code></dd>
    <dt>Id in the usage ledger</dt><dd><code>${row.id}</code></dd>
    <dt>Key</dt><dd>${row.key ? html`<code>${row.key}</code>` : "none that is valid"}</dd>
    <dt>Cached tokens of the prompt</dt><dd>${ui.num(row.tokens.cached)}</dd>
    <dt>Trace</dt><dd>${row.trace_id ? html`<code>${row.trace_id}</code>` : "not recorded"}</dd>
  </dl>
</details>`;

/** @param {{ row: any }} props */
function How({ row }) {
  const words = row.code ?? KINDS[row.kind]?.[0];
  return html`<span><${ui.Badge} kind=${KINDS[row.kind]?.[1] ?? "off"}>${row.status ?? "no answer"}<//> ${words}</span>`;
}

/** Its tenant and its adapter. @param {{ row: any }} props */
function Whose({ row }) {
  const tenant = row.tenant && html`<a href=${"#/" + path`tenants/${row.tenant}`}>${row.tenant}</a>`;
  const of = row.adapter === BASE ? "the base"
    : row.adapter ? html`<a href=${adapterHref(row.tenant, row.adapter)}>${row.adapter}@${row.version}</a>`
      : row.model ? `${row.model} (not served)` : "no model";
  return html`<span>${tenant || "nobody known"}, ${of}</span>`;
}
