/** What the guard of a release found: its verdict, its evidence over time, what is missing, and its numbers. */
import { figure, num, percent, seconds } from "../lib/format.js";
import { html } from "../lib/html.js";
import { Badge, Empty, Section, Table, Time } from "../lib/ui.js";
import { METRICS } from "./release_arms.js";

/**
 * @typedef {{ time: string, evidence: number, threshold: number, part: number, requests: number, needs: number }} Point
 * @typedef {{ step: number, since: string, points: Point[] }} Leg
 */

/** @type {Record<string, "good" | "busy" | "bad">} */
const VERDICTS = { pass: "good", hold: "busy", breach: "bad" };
/** @type {Record<string, string>} */
const UNITS = { user: "Users", key: "Keys", request: "Requests" };
const MINUTE_S = 60;
/** Rows of the numbers behind the line. */
const ROWS = 20;

/** @param {string} name */
const titleOf = (name) => METRICS.find((one) => one.name === name)?.title ?? name;

/** A reason of the guard in the page's words. @param {string | null | undefined} reason */
export function inWords(reason) {
  const told = (reason ?? "").replace(/; the control's (.{1,40}) allows /, "; $1 of the version before allow ");
  return METRICS.reduce((text, one) => text.replace(`guard: ${one.name}: `, `${one.title}: `), told);
}

/**
 * @param {{ comparison: any, run: any, isGiven: boolean }} props `comparison`: the answer of `GET …/release/comparison`; `isGiven`: the
 *   release has a guard, which may not have looked yet.
 */
export function Guard({ comparison, run, isGiven }) {
  const { guard, course } = comparison;
  if (!guard) return isGiven && html`<${Section} title="Guard"><${Empty}>The guard has not looked yet.<//><//>`;
  const candidate = comparison.run?.candidate ?? "the new version";
  const said = {
    pass: `A gross fault of ${candidate} would have been found, and nothing of it is worse so far.`,
    hold: `It cannot say yet whether ${candidate} is worse.`,
    breach: `${candidate} is worse: ${String(titleOf(guard.breach)).toLowerCase()}.`,
  }[/** @type {string} */ (guard.verdict)];
  return html`<${Section} title="Guard" note="It compares the new version with the one before while both serve, and goes back by itself where the new one is worse.">
    <p data-testid="guard-verdict"><${Badge} kind=${VERDICTS[guard.verdict]}>${guard.verdict}<//> ${said}</p>
    ${guard.verdict === "hold" && run?.status === "running" && html`<p data-testid="guard-needs">${missing(guard, course)}</p>`}
    <p data-testid="guard-evidence">
      Evidence that ${candidate} is worse: ${figure(guard.evidence)} of ${figure(guard.threshold)}, which is
      ${" "}${percent(guard.evidence / guard.threshold)} of what it takes to go back. ${num(guard.requests)} requests of ${candidate} ended since
      ${" "}<${Time} at=${guard.since} />.
    </p>
    ${course.length > 0 && html`<${Course} course=${course} candidate=${candidate} isEnded=${run?.status !== "running"} />`}
    <${Readings} guard=${guard} run=${comparison.run} />
  <//>`;
}

/** The guard's advice in the page's words. @param {string | null} advice */
export const advised = (advice) =>
  METRICS.reduce((text, one) => text.replace(new RegExp(`^${one.name} looks`), `${one.title}: looks`), advice ?? "");

/** What is counted, in words. @param {{ unit: string }} guard */
export const unitsOf = (guard) => String(UNITS[guard.unit] ?? guard.unit).toLowerCase();

/** What the guard waits for: its advice, with the pace where that is a count of units. @param {any} guard @param {Leg[]} course */
function missing(guard, course) {
  if (!guard.needs || !String(guard.advice).startsWith("needs ")) {
    const named = advised(guard.advice);
    return `${named[0].toUpperCase()}${named.slice(1)}.`;
  }
  const unit = unitsOf(guard);
  const left = secondsLeft(course[course.length - 1]);
  const pace = left === null ? "" : `; as they come now, in ${left < MINUTE_S ? "less than a minute" : `about ${seconds(left)}`}`;
  const few = guard.unit === "request" ? "" : ` Where fewer come, let each request draw its version: Callers, below.`;
  return `It needs about ${num(guard.needs)} more ${unit} of both versions together${pace}.${few}`;
}

/** At the pace of this leg, until nothing is missing. @param {Leg | undefined} leg @returns {number | null} */
function secondsLeft(leg) {
  if (!leg || leg.points.length < 2) return null;
  const [first, last] = [leg.points[0], leg.points[leg.points.length - 1]];
  const passed = (Date.parse(last.time) - Date.parse(first.time)) / 1000;
  const came = first.needs - last.needs;
  return came > 0 && passed > 0 ? (passed * last.needs) / came : null;
}

const WIDTH = 600;
const HEIGHT = 160;
/** Powers of ten of the threshold, from the bottom to the top. */
const DECADES = [-3, -2, -1, 0, 1];
const [LEAST, MOST] = [DECADES[0], DECADES[DECADES.length - 1]];

/** @param {number} power */
const levelOf = (power) => (HEIGHT * (MOST - Math.min(MOST, Math.max(LEAST, power)))) / (MOST - LEAST);

/**
 * The evidence as a line against its threshold, each guard's own; a guard begins without evidence.
 * @param {{ course: Leg[], candidate: string, isEnded: boolean }} props
 */
function Course({ course, candidate, isEnded }) {
  const points = course.flatMap((leg) => leg.points);
  const begin = Date.parse(course[0].since);
  const last = points[points.length - 1];
  const span = Math.max(1, Date.parse(last.time) - begin);
  const x = (/** @type {string} */ time) => Math.min(WIDTH, Math.max(0, (WIDTH * (Date.parse(time) - begin)) / span));
  const line = (/** @type {Point[]} */ all) => all.map((one) => `${x(one.time).toFixed(1)},${levelOf(Math.log10(one.part)).toFixed(1)}`).join(" ");
  const most = Math.max(...points.map((one) => one.part));
  const text = `Evidence that ${candidate} is worse, as a part of its threshold: ${isEnded ? "at last" : "now"} ${percent(last.part)}, at most ${percent(most)}.`;
  return html`<figure class="course">
    <figcaption>
      Evidence over time, as a part of what it takes to go back. Each line is ten times the one below; at the dashed line of 100% the release
      goes back.${course.length > 1 ? " An upright line is where a step began, or began again: without evidence." : ""}
    </figcaption>
    <div class="course-levels" aria-hidden="true">${[...DECADES].reverse().map((power) => html`<span>${percent(10 ** power)}</span>`)}</div>
    <svg viewBox="0 0 ${WIDTH} ${HEIGHT}" preserveAspectRatio="none" role="img" aria-label=${text} data-testid="course">
      ${DECADES.map((power) => html`<line class=${power === 0 ? "threshold" : "level"} x1="0" x2=${WIDTH} y1=${levelOf(power)} y2=${levelOf(power)} />`)}
      ${course.slice(1).map((leg) => html`<line class="step" x1=${x(leg.since)} x2=${x(leg.since)} y1="0" y2=${HEIGHT} />`)}
      ${course.map((leg) => html`<polyline class="evidence" points=${line(leg.points.length > 1 ? leg.points : [...leg.points, ...leg.points])} />`)}
      <polyline class=${last.part >= 1 ? "latest bad" : "latest"} points=${line([last, last])} />
    </svg>
    <p class="course-times"><${Time} at=${course[0].since} /><${Time} at=${last.time} /></p>
    <${Numbers} course=${course} candidate=${candidate} />
  </figure>`;
}

/** The line as a table: at most `ROWS` of its points, the last one among them. @param {{ course: Leg[], candidate: string }} props */
function Numbers({ course, candidate }) {
  const all = course.flatMap((leg) => leg.points.map((point) => ({ ...point, step: leg.step })));
  const every = Math.ceil(all.length / ROWS);
  const rows = all.filter((_, at) => (all.length - 1 - at) % every === 0);
  const columns = [
    { title: "Time", cell: (/** @type {any} */ row) => html`<${Time} at=${row.time} />` },
    { title: "Step", number: true, cell: (/** @type {any} */ row) => num(row.step + 1) },
    { title: "Evidence", number: true, cell: (/** @type {any} */ row) => figure(row.evidence) },
    { title: "Goes back at", number: true, cell: (/** @type {any} */ row) => figure(row.threshold) },
    { title: "Part", number: true, cell: (/** @type {any} */ row) => percent(row.part) },
    { title: `Requests of ${candidate}`, number: true, cell: (/** @type {any} */ row) => num(row.requests) },
    { title: "Needed", number: true, cell: (/** @type {any} */ row) => num(row.needs) },
  ];
  return html`<details>
    <summary>The same in numbers</summary>
    <${Table} caption="Evidence over time" columns=${columns} rows=${rows} keyOf=${(/** @type {any} */ row) => `${row.step} ${row.time}`} testid="course-row" cards />
  </details>`;
}

/** @param {{ guard: any, run: any }} props */
function Readings({ guard, run }) {
  const versions = { control: run?.control ?? "before", candidate: run?.candidate ?? "new" };
  const columns = [
    { title: "Compared", cell: (/** @type {any} */ row) => titleOf(row.name) },
    { title: versions.control, number: true, cell: (/** @type {any} */ row) => reading(row, "control") },
    { title: versions.candidate, number: true, cell: (/** @type {any} */ row) => reading(row, "candidate") },
    { title: "Allowed", number: true, cell: (/** @type {any} */ row) => shown(row.name, row.allowed) },
    { title: "Evidence", number: true, cell: (/** @type {any} */ row) => figure(row.evidence) },
    { title: `${UNITS[guard.unit] ?? guard.unit} of both`, number: true, cell: (/** @type {any} */ row) => `${num(row.control_users)} + ${num(row.candidate_users)}` },
  ];
  return html`<${Table} caption="What the guard compares" columns=${columns} rows=${guard.metrics} keyOf=${(/** @type {any} */ row) => row.name} cards />`;
}

/** @param {any} row @param {"control" | "candidate"} arm */
const reading = (row, arm) => (row.unended.includes(arm) ? "did not end" : shown(row.name, row[arm]));

/** @param {string} metric @param {number | null} value */
const shown = (metric, value) => (METRICS.find((one) => one.name === metric)?.show ?? figure)(value);
