/** Needs: what an operator has to look at, each with what to do and a link to where. */
import { api } from "../lib/api.js";
import { html } from "../lib/html.js";
import { usePoll } from "../lib/poll.js";
import * as ui from "../lib/ui.js";
import { adapterHref, releaseHref } from "./adapters.js";
import { keysHref } from "./keys.js";
import { UnderWay, ofUndecided } from "./needs_releases.js";
import { requestsHref } from "./requests.js";
import { limitsHref } from "./tenant_editor.js";

const EVERY_MS = 30_000;
/** Adapters of one kind that are named; a link has the others. */
const SHOWN = 20;
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
  const needs = await api.get("needs", {}, { signal });
  return { engine, cluster, failing, corrupt, incompatible, paused, needs, tenants };
}

export default function Needs() {
  const poll = usePoll(read, [], EVERY_MS);
  return html`<${ui.Page} title="What needs you">
    <${ui.Loaded} poll=${poll}>${(/** @type {any} */ data) => html`<${Sections} ...${data} />`}<//>
  <//>`;
}

/**
 * Rows of which the server shows some: the tenants in turn, so that one with many does not hide the others.
 * @param {{ data: any[], total: number, more?: { tenant_id: string, count: number }[] }} found @param {(row: any) => Need} of
 */
const ofTurns = (found, of) => ({ needs: found.data.map(of), count: found.total, left: found.more });

/** @param {any} data As `read` gives it. */
function Sections({ engine, cluster, failing, corrupt, incompatible, paused, needs, tenants }) {
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
      title: "Releases that cannot be decided", act: "Each row says what is missing. To decide by hand is to promote the new version or to roll it back.",
      more: "release=running", ...ofTurns(needs.undecided, ofUndecided),
    },
    {
      title: "Rollbacks of the last day", act: "Read the guard's reason before you release the version again.",
      href: "#/audit?action=release.rolled_back", ...ofTurns(needs.rolled_back, ofRollback),
    },
    {
      title: "Versions that failed their check in the last day", act: "Read the version's report, then train or export it again.",
      href: "#/audit?action=version.check&outcome=refused", ...ofTurns(needs.failed_checks, ofCheck),
    },
    {
      title: "Uploads that were refused in the last day", act: "Tell the tenant what the code means, or raise the limit that it names.",
      href: "#/audit?action=version.upload&outcome=refused", ...ofTurns(needs.refused_uploads, ofUpload),
    },
    {
      title: "Adapters that are loaded again and again",
      act: "Pin the version, reserve device memory for its tenant, or give adapters more memory: --adapter-memory for copies to the device, --adapter-cpu-memory for loads from the disk.",
      ...ofTurns(needs.thrashing, ofThrashing),
    },
    { title: `Disks of ${needs.disks.node || "this server"}`, act: "Make room, or mount a larger disk. Without room uploads are refused.", needs: disks(needs.disks) },
    {
      title: "Keys that end soon", act: "They are in use. Give them a later end, or tell the tenant to change to another key.",
      href: "#/all-tenants", ...ofTurns(needs.ending_keys, ofKeys),
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
    ${!open.length && html`<${ui.Empty}>${isCut ? "Nothing else that was looked at needs you now." : "Nothing needs you now."}<//>`}
    <${UnderWay} ...${needs} />`;
}

/**
 * @param {{ title: string, act: string, needs: Need[], more?: string, href?: string, count?: number,
 *   left?: { tenant_id: string, count: number }[] }} props `act`: what to do; `count`: all that there are; `left`: the rows of a tenant
 *   that are not here.
 */
function Section({ title, act, needs, more, href = more && `#/all-adapters?${more}`, count = needs.length, left = [] }) {
  const rest = `There are ${ui.num(count - needs.length)} more.`;
  const ofTenants = left.map((one) => `${one.tenant_id} ${ui.num(one.count)}`).join(", ");
  return html`<${ui.Section} title=${title} note=${act}>
    <${ui.Table} caption=${title} testid="need-row" keyOf=${(/** @type {Need} */ need) => need.what} rows=${needs}
      columns=${[
        { title: "Where", cell: (/** @type {Need} */ need) => html`<a href=${need.href}>${need.what}</a>` },
        { title: "Why", cell: (/** @type {Need} */ need) => html`<span>${need.why}</span>` },
      ]} />
    ${count > needs.length && html`<p data-testid="need-more">
      ${href ? html`<a href=${href}>${rest}</a>` : rest}${ofTenants && html` By tenant: ${ofTenants}.`}</p>`}
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

/** @param {any} row Of GET /needs, as are those below. @returns {Need} */
const ofRollback = (row) => ({
  what: `${row.tenant_id}/${row.name}`, href: releaseHref(row.tenant_id, row.name), why: html`The guard rolled it back on <${ui.Time} at=${row.time} />.`,
});

/** @param {any} row */
const codeOf = (row) => html`<code>${row.code}</code> on <${ui.Time} at=${row.time} />.`;

/** @param {any} row @returns {Need} */
const ofCheck = (row) => ({ what: `${row.tenant_id}/${row.name}@${row.version}`, href: adapterHref(row.tenant_id, row.name), why: codeOf(row) });

/** Of a name that may have no version. @param {any} row @returns {Need} */
function ofUpload(row) {
  const chosen = new URLSearchParams({ action: "version.upload", outcome: "refused", tenant: row.tenant_id });
  return { what: `${row.tenant_id}/${row.name}`, href: `#/audit?${chosen}`, why: codeOf(row) };
}

/** @param {any} row @returns {Need} */
function ofThrashing(row) {
  const ways = [
    row.copies && `${ui.num(row.copies)} copies to the device`,
    row.loads && `${ui.num(row.loads)} loads from the disk`,
  ].filter(Boolean);
  const alike = [
    row.others && `${ui.num(row.others)} more of this tenant`,
    row.elsewhere && `${ui.num(row.elsewhere)} of other tenants`,
  ].filter(Boolean);
  const others = alike.length ? ` The same files: ${alike.join(", ")}.` : "";
  return {
    what: `${row.tenant_id}/${row.name}@${row.version}`, href: adapterHref(row.tenant_id, row.name),
    why: `${ways.join(" and ")} in the last hour.${row.pinned ? " It is pinned." : ""}${others}`,
  };
}

/** @type {Record<string, { what: string, href: string }>} */
const DISKS = {
  data: { what: "Database and usage", href: "#/now" },
  adapters: { what: "Adapters", href: "#/all-adapters?sort=bytes&order=desc" },
  prefixes: { what: "Prefixes of the KV cache", href: "#/now" },
};

/** @param {any} found @returns {Need[]} */
function disks(found) {
  const needs = found.data.map((/** @type {any} */ one) => ({
    ...DISKS[one.holds],
    why: one.error
      ? html`<code>${one.path}</code> cannot be reached: ${one.error}. Look at its mount and at the rights of the folder.`
      : html`${ui.bytes(one.free)} of ${ui.bytes(one.size)} are free at <code>${one.path}</code>; ${ui.bytes(one.wanted)} are wanted.`,
  }));
  const off = found.prefixes_off;
  if (off) {
    needs.push({
      what: "Disk of prefixes", href: "#/now",
      why: `${ui.num(off)} ${off === 1 ? "engine leaves its" : "engines leave their"} disk of --kv-disk alone for now: it fails, or it is slower than computing anew. Look at that disk.`,
    });
  }
  return needs;
}

/** @param {any} row @returns {Need} */
const ofKeys = (row) => ({
  what: row.tenant_id, href: keysHref(row.tenant_id),
  why: html`${ui.num(row.count)} ${row.count === 1 ? "key" : "keys"}: ${row.keys.map((/** @type {any} */ key, /** @type {number} */ i) => html`${i ? "; " : ""}
    ${key.name && html`<q>${key.name}</q> `}<code>${key.id}</code> ${Date.parse(key.expires_at) > Date.now() ? "ends" : "ended"} on <${ui.Time} at=${key.expires_at} />`)}${row.count > row.keys.length ? "; …" : "."}`,
});

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
