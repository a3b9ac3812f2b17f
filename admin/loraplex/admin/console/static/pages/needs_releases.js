/** Releases that run by themselves: why one cannot be decided, and what goes on as it should. */
import { html } from "../lib/html.js";
import * as ui from "../lib/ui.js";
import { releaseHref } from "./adapters.js";
import { advised, unitsOf } from "./release_guard.js";

/** @typedef {import("./needs.js").Need} Need */

/** @param {any} row Of GET /needs, as are those below. */
const shareOf = (row) => `${ui.percent(row.share)} of the traffic`;

/** Why it cannot be decided, and what to do. @param {any} row */
function obstacleOf(row) {
  const since = html`<${ui.Time} at=${row.since} />`;
  const alone = row.unit === "request" ? "" : "let each request draw its version (Callers), ";
  const missing = `${ui.num(row.needs)} more ${unitsOf(row)} of both versions`;
  return {
    not_looked: html`${row.looked_at
      ? html`The guard of ${row.version} last looked on <${ui.Time} at=${row.looked_at} />, and no look has succeeded since: a fault of it rolls nothing back.`
      : html`No server has decided about ${row.version} since ${since}.`}
      ${" "}One server must lead, and look: see release_not_watched and background_task_failed in the servers' logs. Until then, pause it or decide by hand.`,
    no_requests: html`${row.version} has ${shareOf(row)} and got no request since ${since}, so nothing can be compared.
      ${" "}Give it a larger share or a longer time, or decide by hand.`,
    no_progress: html`${ui.num(row.requests)} requests of ${row.version} ended since ${since}, but none of the ${missing} came that the guard needs.
      ${" "}${row.unit === "request" ? "Look at what is compared" : "Each counts once: let each request draw its version (Callers)"}, or decide by hand.`,
    too_slow: html`The guard needs ${missing}. As they come now, that takes until <${ui.Time} at=${row.likely_at} />.
      ${" "}Give ${row.version} a larger share than ${ui.percent(row.share)}, ${alone}or decide by hand.`,
    not_passing: html`The time of its step is over, but the guard does not let ${row.version} pass: ${advised(row.advice) || "it holds"}.
      ${" "}Compare the versions, and decide by hand.`,
  }[/** @type {string} */ (row.obstacle)];
}

/** @param {any} row @returns {Need} */
export const ofUndecided = (row) => ({
  what: `${row.tenant_id}/${row.name}`, href: releaseHref(row.tenant_id, row.name), why: obstacleOf(row),
});

/** @param {any} row */
function standingOf(row) {
  if (row.needs === null) return "";
  if (row.needs) return `The guard needs ${ui.num(row.needs)} more ${unitsOf(row)} of both versions.`;
  return row.verdict === "pass" ? "Nothing of it is worse so far." : `The guard holds: ${advised(row.advice) || "it looks again soon"}.`;
}

/** @param {any} row @returns {Need} */
const ofRunning = (row) => ({
  what: `${row.tenant_id}/${row.name}`, href: releaseHref(row.tenant_id, row.name),
  why: html`${row.version} has ${shareOf(row)} since <${ui.Time} at=${row.since} />${row.step !== null && `, step ${row.step + 1} of ${row.steps}`}.
    ${" "}${standingOf(row)} ${row.likely_at && html`Likely decided on <${ui.Time} at=${row.likely_at} />.`}
    ${row.step === null && !row.needs && "It has no end: the guard watches until you release another."}`,
});

/** @param {any} row @returns {Need} */
const ofShadow = (row) => ({
  what: `${row.tenant_id}/${row.name} (shadow)`, href: releaseHref(row.tenant_id, row.name),
  why: html`${row.version} answers ${ui.percent(row.share)} of the requests unseen since <${ui.Time} at=${row.since} />.
    ${" "}${ui.num(row.samples)} answers were compared.`,
});

/** What goes on and asks for nothing. @param {{ running: any, shadows: any, unread_releases: number }} props Of GET /needs. */
export function UnderWay({ running, shadows, unread_releases: unread }) {
  const rows = [...running.data.map(ofRunning), ...shadows.data.map(ofShadow)];
  if (!rows.length && !unread) return null;
  const left = running.total + shadows.total - rows.length;
  return html`<${ui.Section} title="Under way" note="Releases and shadows that go on by themselves. Nothing is to be done.">
    <${ui.Table} caption="Under way" testid="underway-row" keyOf=${(/** @type {Need} */ need) => need.what} rows=${rows}
      columns=${[
        { title: "Where", cell: (/** @type {Need} */ need) => html`<a href=${need.href}>${need.what}</a>` },
        { title: "What goes on", cell: (/** @type {Need} */ need) => html`<span>${need.why}</span>` },
      ]} />
    ${left > 0 && html`<p data-testid="underway-more">There are ${ui.num(left)} more.</p>`}
    ${unread > 0 && html`<p>${ui.num(unread)} more releases run and were not looked at.</p>`}
  <//>`;
}
