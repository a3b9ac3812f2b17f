/** A release's versions side by side, drawn on one scale for each number; and what its shadow found. */
import { figure, num, percent, seconds } from "../lib/format.js";
import { html } from "../lib/html.js";
import { Section, Time } from "../lib/ui.js";

/**
 * @typedef {{ word: string, value: number, low: number | null, high: number | null }} Mark A value with its 95% interval.
 * @typedef {{ name: string, title: string, show: (value: number | null) => string, least?: number, marks: (arm: any) => Mark[] }} Metric
 * `least`: where the scale ends at the earliest.
 */

/** @param {number | null} value @param {any} interval @returns {Mark[]} */
const share = (value, interval) => (value === null ? [] : [{ word: "", value, low: interval?.low ?? null, high: interval?.high ?? null }]);

/** @param {any} found @returns {Mark[]} */
const quantiles = (found) =>
  found === null
    ? []
    : [
        { word: "median ", value: found.p50, ...found.p50_interval },
        { word: "95% below ", value: found.p95, ...found.p95_interval },
      ];

/** @type {Metric[]} */
export const METRICS = [
  { name: "error_rate", title: "Errors", show: percent, least: 0.05, marks: (arm) => share(arm.error_rate?.value ?? null, arm.error_rate) },
  { name: "length_share", title: "Answers cut at their limit", show: percent, least: 0.05, marks: (arm) => share(arm.length_share, arm.length_share_interval) },
  { name: "ttft", title: "Time to the first token", show: seconds, marks: (arm) => quantiles(arm.ttft) },
  { name: "itl", title: "Time between tokens", show: seconds, marks: (arm) => quantiles(arm.itl) },
  { name: "output_length", title: "Tokens of an answer", show: figure, marks: (arm) => quantiles(arm.output_length) },
];

/** What each version is in a watched release. @type {Record<string, string>} */
const ROLES = { control: "the one before", candidate: "the new one" };

/** @param {{ found: any }} props The answer of `GET …/release/comparison`. */
export function Arms({ found }) {
  const { arms } = found;
  const drawn = METRICS.filter((metric) => arms.some((/** @type {any} */ arm) => metric.marks(arm).length > 0));
  return html`<${Section} title=${arms.length > 1 ? "Versions side by side" : "Its requests"} note=${html`Requests that ended since <${Time} at=${found.since} />. A bar is where the number
      lies with a confidence of 95%, if each request were on its own. A few callers with many requests can move a bar: the guard counts callers.`}>
    <dl class="facts">
      ${arms.map(
        (/** @type {any} */ arm) => html`<div data-testid="arm" data-key=${arm.version}>
          <dt>${nameOf(arm)}</dt>
          <dd>${num(arm.requests)} requests, ${num(arm.errors)} ${arm.errors === 1 ? "error" : "errors"}</dd>
        </div>`,
      )}
    </dl>
    ${drawn.map((metric) => html`<${Marks} key=${metric.name} metric=${metric} arms=${arms} />`)}
  <//>`;
}

/** @param {any} arm */
const nameOf = (arm) => (arm.role in ROLES ? `${arm.version}, ${ROLES[arm.role]}` : arm.version);

/** One number of all versions, each beside its drawing. @param {{ metric: Metric, arms: any[] }} props */
function Marks({ metric, arms }) {
  const all = arms.flatMap(metric.marks);
  const most = Math.max(metric.least ?? 0, ...all.map((one) => Math.max(one.value, one.high ?? 0))) || 1;
  return html`<figure class="marks" data-testid="marks" data-key=${metric.name}>
    <figcaption>${metric.title}</figcaption>
    <dl>
      ${arms.map(
        (arm) => html`<div class=${`marks-row ${arm.role in ROLES ? arm.role : ""}`}>
          <dt>${nameOf(arm)}</dt>
          <dd class="marks-track" aria-hidden="true"><${Track} marks=${metric.marks(arm)} most=${most} /></dd>
          <dd>${metric.marks(arm).map((one) => said(one, metric.show)).join(", ") || "nothing yet"}</dd>
        </div>`,
      )}
    </dl>
    <p class="marks-row" aria-hidden="true"><span></span><span class="marks-scale"><span>0</span><span>${metric.show(most)}</span></span></p>
  </figure>`;
}

const WIDTH = 300;
const HEIGHT = 12;
/** Width of a value. */
const VALUE = 3;

/** Values on a scale from 0 to `most`; the text beside them says the same. @param {{ marks: Mark[], most: number }} props */
function Track({ marks, most }) {
  const at = (/** @type {number} */ value) => (WIDTH * value) / most;
  return html`<svg viewBox="0 0 ${WIDTH} ${HEIGHT}"
    preserveAspectRatio="none">
    <line class="axis" x1="0" y1=${HEIGHT / 2} x2=${WIDTH} y2=${HEIGHT / 2} />
    ${marks.map(
      (one) => html`<rect class="range" x=${at(one.low ?? one.value)} y="3" width=${at(one.high ?? one.value) - at(one.low ?? one.value)} height=${HEIGHT - 6} />
        <rect class="value" x=${Math.min(WIDTH - VALUE, at(one.value))} y="0" width=${VALUE} height=${HEIGHT} />`,
    )}
  </svg>`;
}

/** @param {Mark} mark @param {Metric["show"]} show */
function said({ word, value, low, high }, show) {
  const bounds =
    low !== null && high !== null
      ? `${show(low)} to ${show(high)}`
      : low !== null
        ? `at least ${show(low)}`
        : high !== null
          ? `at most ${show(high)}`
          : "too few to say how exact";
  return `${word}${show(value)} (${bounds})`;
}

/** @param {{ shadow: any }} props */
export function Shadow({ shadow }) {
  if (!shadow) return null;
  const facts = [
    ["Answers compared", num(shadow.samples)],
    ["Word for word the same", `${num(shadow.exact)} (${percent(shadow.samples ? shadow.exact / shadow.samples : null)})`],
    ["Tokens before the first different one", figure(shadow.mean_same_tokens)],
    ["Output tokens, both", `${num(shadow.live_tokens)} and ${num(shadow.shadow_tokens)}`],
    ["Log probability a token, both", `${figure(shadow.logprob)} and ${figure(shadow.shadow_logprob)}`],
    ["Given up for want of room, failed", `${num(shadow.dropped)}, ${num(shadow.failed)}`],
  ];
  return html`<${Section} title="Shadow ${shadow.version}" note="It answers a share of the requests too; nobody gets its answers.">
    <dl class="facts">${facts.map(([name, value]) => html`<div><dt>${name}</dt><dd>${value}</dd></div>`)}</dl>
  <//>`;
}
