/** Needs: what an operator has to look at, each with what to do and a link to where. */
import { api } from "../lib/api.js";
import { html } from "../lib/html.js";
import { usePoll } from "../lib/poll.js";
import * as ui from "../lib/ui.js";
import { adapterHref, releaseHref } from "./adapters.js";
import { requestsHref } from "./requests.js";
import { limitsHref } from "./tenant_editor.js";

const EVERY_MS = 30_000;
const DAY_MS = 86_400_000;
/** Adapters of one kind that are named; a link has the others. */
const SHOWN = 20;
/** Rows of the audit log that are read of one action: many may be of one name. */
const AUDIT_ROWS = 500;
/** A budget or a quota is near its end when less than this part is left. */
const PART_LEFT = 0.1;
/** Errors of an adapter in the last hour: at least so many, of at least this part of its requests. */
const MIN_ERRORS = 5;
const MIN_ERROR_RATE = 0.05;
/** Tenants whose budgets and quotas are looked at. */
const MOST_TENANTS = 2000;

const FAILING = { min_errors: MIN_ERRORS, min_error_rate: MIN_ERROR_RATE, sort: "errors", order: "desc" };

/** @typedef {{ what: string, href: string, why: any }} Need */

/** @param {AbortSignal} signal */
async function read(signal) {
  const start = new Date(Date.now() - DAY_MS).toISOString();
  /** @param {Record<string, any>} chosen */
  const adapters = (chosen) => api.get("adapters", { limit: SHOWN, ...chosen }, { signal });
  const [engine, cluster, tenants] = await Promise.all([
    api.get("engine", {}, { signal }),
    api.get("cluster", { limit: 1 }, { signal }),
    api.list("tenants", {}, { signal, most: MOST_TENANTS }),
  ]);
  // One after another: the server refuses many reports at once.
  const failing = await adapters(FAILING);
  // These show no figures: with no hours the ledger is not read.
  const corrupt = await adapters({ state: "corrupt", hours: 0 });
  const incompatible = await adapters({ state: "incompatible", hours: 0 });
  const paused = await adapters({ release: "paused", hours: 0 });
  const rolledBack = await api.get("audit", { action: "release.rolled_back", start, limit: AUDIT_ROWS }, { signal });
  // The first by a caller's files, the second by what the engine computed with them.
  const refused = await api.get("audit", { action: "version.upload", outcome: "refused", start, limit: AUDIT_ROWS }, { signal });
  const rejected = await api.get("audit", { action: "version.check", outcome: "refused", start, limit: AUDIT_ROWS }, { signal });
  return { engine, cluster, failing, corrupt, incompatible, paused, rolledBack, refused, rejected, tenants };
}

export default function Needs() {
  const poll = usePoll(read, [], EVERY_MS);
  return html`<${ui.Page} title="What needs you">
    <${ui.Loaded} poll=${poll}>${(/** @type {any} */ data) => html`<${Sections} ...${data} />`}<//>
  <//>`;
}

/** The first of each. @param {Need[]} needs */
const once = (needs) => needs.filter(({ what }, i) => needs.findIndex((other) => other.what === what) === i);

/**
 * The rows of an action, the newest of each name, the tenants in turn: one with many does not hide the others.
 * @param {any} page Of GET /audit. @param {string} action @param {(row: any) => Need} of
 */
function ofAudit(page, action, of) {
  // A key that named another tenant's adapter says nothing about that tenant.
  const own = page.data.filter((/** @type {any} */ row) => row.actor_tenant_id === null || row.actor_tenant_id === row.tenant_id);
  /** @type {Map<string, number>} */
  const turns = new Map();
  const found = once(own.map(of)).map((need) => {
    const tenant = need.what.split("/")[0];
    const turn = turns.get(tenant) ?? 0;
    turns.set(tenant, turn + 1);
    return { need, turn };
  });
  const needs = found.sort((a, b) => a.turn - b.turn).slice(0, SHOWN).map(({ need }) => need);
  return { needs, count: found.length + (page.next_cursor ? 1 : 0), href: `#/audit?action=${action}` };
}

/** @param {any} data As `read` gives it. */
function Sections({ engine, cluster, failing, corrupt, incompatible, paused, rolledBack, refused, rejected, tenants }) {
  const all = [
    { title: "Engines", act: "Look at the node and its log. An engine comes back by itself once its process runs.", needs: engines(engine, cluster) },
    {
      title: "Adapters that fail", act: "Look at the release. If its newest version is the cause, pause it or roll it back.",
      more: String(new URLSearchParams(/** @type {any} */ (FAILING))), count: failing.totals.adapters,
      needs: failing.data.map((/** @type {any} */ row) => ofRelease(row, ofErrors(row))),
    },
    {
      title: "Damaged versions", act: "Upload the version again, or delete it.", more: "state=corrupt", count: corrupt.totals.adapters,
      needs: corrupt.data.map((/** @type {any} */ row) => ofAdapter(row, `The stored files of ${versionsIn(row, "corrupt")} changed.`)),
    },
    {
      title: "Versions for another base", act: "Train the version again on the base that is served, or delete it.",
      more: "state=incompatible", count: incompatible.totals.adapters,
      needs: incompatible.data.map((/** @type {any} */ row) => ofAdapter(row, `Made for another base than the one served: ${versionsIn(row, "incompatible")}.`)),
    },
    {
      title: "Releases that are paused", act: "Resume the release, or roll it back.", more: "release=paused", count: paused.totals.adapters,
      needs: paused.data.map((/** @type {any} */ row) => ofRelease(row, "Its schedule does not go on.")),
    },
    {
      title: "Rollbacks of the last day", act: "Read the guard's reason before you release the version again.",
      ...ofAudit(rolledBack, "release.rolled_back", ofRollback),
    },
    {
      title: "Versions that failed their check in the last day", act: "Read the version's report, then train or export it again.",
      ...ofAudit(rejected, "version.check", ofCheck),
    },
    {
      title: "Uploads that were refused in the last day", act: "Tell the tenant what the code means, or raise the limit that it names.",
      ...ofAudit(refused, "version.upload", ofUpload),
    },
    { title: "Budgets near their end", act: "Raise the budget, or tell the tenant.", needs: budgets(tenants) },
    { title: "Quotas near their end", act: "Raise the limit, or tell the tenant to delete adapters, versions or files.", needs: quotas(tenants) },
  ];
  const open = all.filter((section) => section.needs.length > 0);
  // Of the tenants that were not read nothing is said.
  const isCut = tenants.length >= MOST_TENANTS;
  return html`${isCut && html`<p class="note" data-testid="needs-cut">
      Budgets and quotas of the first ${ui.num(MOST_TENANTS)} tenants were looked at. The others' are on their <a href="#/tenants">pages</a>.
    </p>`}
    ${open.map((section) => html`<${Section} key=${section.title} ...${section} />`)}
    ${!open.length && html`<${ui.Empty}>${isCut ? "Nothing else that was looked at needs you now." : "Nothing needs you now."}<//>`}`;
}

/**
 * @param {{ title: string, act: string, needs: Need[], more?: string, href?: string, count?: number }} props `act`: what to do;
 *   `count`: all that there are.
 */
function Section({ title, act, needs, more, href = `#/all-adapters?${more}`, count = needs.length }) {
  return html`<${ui.Section} title=${title} note=${act}>
    <${ui.Table} caption=${title} testid="need-row" keyOf=${(/** @type {Need} */ need) => need.what} rows=${needs}
      columns=${[
        { title: "Where", cell: (/** @type {Need} */ need) => html`<a href=${need.href}>${need.what}</a>` },
        { title: "Why", cell: (/** @type {Need} */ need) => html`<span>${need.why}</span>` },
      ]} />
    ${count > needs.length && html`<p><a href=${href}>There are more.</a></p>`}
  <//>`;
}

/**
 * The versions in that state: the newest one, and those that take traffic.
 * @param {any} row Of GET /adapters. @param {string} state
 */
function versionsIn(row, state) {
  const older = row.released.filter((/** @type {any} */ one) => one.state === state && one.version !== row.version);
  const named = older.map((/** @type {any} */ one) => `${one.version} (released)`);
  return [...(row.state === state ? [row.version] : []), ...named].join(" and ");
}

/** @param {any} row Of GET /adapters. */
const ofErrors = (row) => html`${ui.num(row.errors)} of ${ui.num(row.requests)} requests failed in the last hour.
  ${" "}<a href=${requestsHref({ tenant: row.tenant, adapter: row.name, kind: "failed" })}>Which ones</a>`;

/** @param {any} row Of GET /adapters. @param {any} why @returns {Need} */
const ofAdapter = (row, why) => ({ what: `${row.tenant}/${row.name}`, href: adapterHref(row.tenant, row.name), why });

/** @param {any} row Of GET /adapters. @param {any} why @returns {Need} */
const ofRelease = (row, why) => ({ ...ofAdapter(row, why), href: releaseHref(row.tenant, row.name) });

/** @param {any} row Of GET /audit; its target is `tenants/TENANT/adapters/NAME/release`. @returns {Need} */
function ofRollback(row) {
  const [, tenant, , name] = row.target.split("/");
  return {
    what: `${tenant}/${name}`, href: releaseHref(tenant, name), why: html`The guard rolled it back on <${ui.Time} at=${row.time} />.`,
  };
}

/** @param {any} row Of GET /audit; its target is `tenants/TENANT/adapters/NAME/versions/VERSION`. @returns {Need} */
function ofCheck(row) {
  const [, tenant, , name, , version] = row.target.split("/");
  return {
    what: `${tenant}/${name}@${version}`, href: adapterHref(tenant, name),
    why: html`<code>${row.code}</code> on <${ui.Time} at=${row.time} />.`,
  };
}

/** @param {any} row Of GET /audit; its target is `tenants/TENANT/adapters/NAME/versions`, of a name that may have none. @returns {Need} */
function ofUpload(row) {
  const [, tenant, , name] = row.target.split("/");
  const chosen = new URLSearchParams({ action: "version.upload", outcome: "refused", ...(row.tenant_id && { tenant: row.tenant_id }) });
  return { what: `${tenant}/${name}`, href: `#/audit?${chosen}`, why: html`<code>${row.code}</code> on <${ui.Time} at=${row.time} />.` };
}

/** @param {any} engine @param {any} cluster @returns {Need[]} */
function engines(engine, cluster) {
  const away = cluster.replicas.filter((/** @type {any} */ one) => one.state === "away");
  const needs = away.map((/** @type {any} */ one) => ({ what: one.id, href: "#/now", why: one.reason ?? "The engine is away." }));
  if (!engine.healthy && !needs.length) needs.push({ what: "engine", href: "#/now", why: engine.unhealthy_reason ?? "The engine is not ready." });
  return needs;
}

/** @param {any[]} tenants @returns {Need[]} */
const budgets = (tenants) => tenants
  .filter(({ budget }) => budget && budget.left < PART_LEFT * budget.limit)
  .map(({ id, budget }) => ({
    what: id, href: limitsHref(id), why: `${ui.num(budget.left)} of ${ui.num(budget.limit)} tokens are left.`,
  }));

/** @param {any[]} tenants @returns {Need[]} */
const quotas = (tenants) => tenants.flatMap(({ id, limits, stored }) => [
  ["adapters", stored.adapters, limits.max_adapters, ui.num],
  ["bytes", stored.bytes, limits.max_adapter_bytes, ui.bytes],
].filter(([, used, limit]) => used !== null && limit - used < PART_LEFT * limit)
  .map(([name, used, limit, show]) => ({ what: `${id}: ${name}`, href: limitsHref(id), why: `${show(used)} of ${show(limit)} are used.` })));
