/** A release's versions side by side, and what its guard and shadow found. */
import { figure, num, percent, seconds } from "../lib/format.js";
import { html } from "../lib/html.js";
import { Badge, Empty, Section, Table, Time } from "../lib/ui.js";

/** @type {Record<string, "good" | "busy" | "bad">} */
const VERDICTS = { pass: "good", hold: "busy", breach: "bad" };
const RATES = ["error_rate", "length_share"];
const TIMES = ["ttft", "itl"];

/** @param {{ found: any }} props The answer of `GET …/release/comparison`. */
export function Arms({ found }) {
  const rows = [
    { name: "Requests that ended", of: (/** @type {any} */ arm) => num(arm.requests) },
    { name: "Errors", of: (/** @type {any} */ arm) => num(arm.errors) },
    { name: "Error rate", of: (/** @type {any} */ arm) => html`<${Interval} share=${arm.error_rate} />` },
    { name: "First token, median", of: (/** @type {any} */ arm) => seconds(arm.ttft?.p50) },
    { name: "First token, 95%", of: (/** @type {any} */ arm) => seconds(arm.ttft?.p95) },
    { name: "Between tokens, median", of: (/** @type {any} */ arm) => seconds(arm.itl?.p50) },
    { name: "Between tokens, 95%", of: (/** @type {any} */ arm) => seconds(arm.itl?.p95) },
    { name: "Output tokens, mean", of: (/** @type {any} */ arm) => figure(arm.output_tokens) },
    { name: "Cut at the limit", of: (/** @type {any} */ arm) => percent(arm.length_share) },
  ];
  const columns = [
    { title: "", cell: (/** @type {any} */ row) => row.name },
    ...found.arms.map((/** @type {any} */ arm) => ({
      title: `${arm.version}${arm.role ? `, ${arm.role}` : ""}`,
      number: true,
      cell: (/** @type {any} */ row) => row.of(arm),
    })),
  ];
  return html`<${Section} title="Versions side by side" note=${html`Requests since <${Time} at=${found.since} />; a rate with its 95% interval.`}>
    <${Table} caption="Versions side by side" columns=${columns} rows=${rows} keyOf=${(/** @type {any} */ row) => row.name} testid="arm-row" />
  <//>`;
}

/** A share, and its interval as a line on a scale that ends at the interval's end. @param {{ share: any }} props */
function Interval({ share }) {
  if (!share) return "–";
  const most = Math.max(share.high, 0.05);
  const at = (/** @type {number} */ value) => (100 * value) / most;
  const text = `${percent(share.value)} (${percent(share.low)} to ${percent(share.high)})`;
  return html`<span class="interval">
    <svg viewBox="0 0 100 8" preserveAspectRatio="none" aria-hidden="true">
      <line class="axis" x1="0" y1="4" x2="100" y2="4" />
      <line class="range" x1=${at(share.low)} y1="4" x2=${at(share.high)} y2="4" />
      <rect class="value" x=${Math.min(98, at(share.value))} y="0" width="2" height="8" />
    </svg>
    ${text}
  </span>`;
}

/** @param {{ guard: any, run: any, isGiven: boolean }} props `isGiven`: the release has a guard, which may not have looked yet. */
export function Guard({ guard, run, isGiven }) {
  if (!guard) {
    const text = isGiven ? "The guard has not looked yet." : "No guard watches this release.";
    return html`<${Section} title="Guard"><${Empty}>${text}<//><//>`;
  }
  const said = {
    pass: "A gross fault would have been found, and no metric is worse.",
    hold: `No verdict yet: ${guard.advice}.`,
    breach: `The candidate is worse in ${guard.breach}.`,
  }[/** @type {string} */ (guard.verdict)];
  const columns = [
    { title: "Metric", cell: (/** @type {any} */ row) => row.name.replaceAll("_", " ") },
    { title: "Control", number: true, cell: (/** @type {any} */ row) => reading(row, "control") },
    { title: "Candidate", number: true, cell: (/** @type {any} */ row) => reading(row, "candidate") },
    { title: "Allowed", number: true, cell: (/** @type {any} */ row) => shown(row.name, row.allowed) },
    { title: "Evidence", number: true, cell: (/** @type {any} */ row) => figure(row.evidence) },
    { title: { user: "Users", key: "Keys", request: "Requests" }[/** @type {string} */ (guard.unit)], number: true, cell: (/** @type {any} */ row) => `${num(row.control_users)} + ${num(row.candidate_users)}` },
  ];
  return html`<${Section} title="Guard" note=${run?.reason ?? ""}>
    <p data-testid="guard-verdict">
      <${Badge} kind=${VERDICTS[guard.verdict]}>${guard.verdict}<//> ${said} Evidence ${figure(guard.evidence)} of
      ${" "}${figure(guard.threshold)}; ${num(guard.requests)} requests of the candidate since <${Time} at=${guard.since} />.
    </p>
    <${Table} caption="The guard's metrics" columns=${columns} rows=${guard.metrics} keyOf=${(/** @type {any} */ row) => row.name} />
  <//>`;
}

/** @param {any} row @param {"control" | "candidate"} arm */
const reading = (row, arm) => (row.unended.includes(arm) ? "unended" : shown(row.name, row[arm]));

/** @param {string} metric @param {number | null} value */
function shown(metric, value) {
  if (RATES.includes(metric)) return percent(value);
  return TIMES.includes(metric) ? seconds(value) : figure(value);
}

/** @param {{ shadow: any }} props */
export function Shadow({ shadow }) {
  if (!shadow) return null;
  const facts = [
    ["Samples", num(shadow.samples)],
    ["Same tokens", `${num(shadow.exact)} (${percent(shadow.samples ? shadow.exact / shadow.samples : null)})`],
    ["Tokens before the first different one", figure(shadow.mean_same_tokens)],
    ["Output tokens, both", `${num(shadow.live_tokens)} and ${num(shadow.shadow_tokens)}`],
    ["Log probability a token, both", `${figure(shadow.logprob)} and ${figure(shadow.shadow_logprob)}`],
    ["Dropped, failed", `${num(shadow.dropped)}, ${num(shadow.failed)}`],
  ];
  return html`<${Section} title="Shadow ${shadow.version}" note="It answers a share of the requests too; nobody gets its answers.">
    <dl class="facts">${facts.map(([name, value]) => html`<div><dt>${name}</dt><dd>${value}</dd></div>`)}</dl>
  <//>`;
}
