/** An upload's report: its checks, and norm and error by layer. */

import { html } from "../lib/html.js";
import { figure, num, percent } from "../lib/format.js";

/**
 * @typedef {{name: string, norm: number, error: number | null}} Layer
 */

const HEIGHT = 48;
/** Height of the names of layers below the bars. */
const NAMES = 14;
const STEP = 14;

/**
 * Norm and error of each layer: the norms of its modules together, and the largest of their errors.
 * @param {any} found the report's `reference_error`
 * @returns {Layer[]}
 */
function byLayer(found) {
  /** @type {Map<string, Layer>} */
  const layers = new Map();
  for (const [module, norm] of Object.entries(found.norms || {})) {
    const match = /\.(?:layers|h)\.(\d+)\./.exec(module);
    const name = match ? match[1] : module;
    const layer = layers.get(name) || { name, norm: 0, error: null };
    layer.norm = Math.hypot(layer.norm, Number(norm));
    const error = found.errors ? found.errors[module] : undefined;
    if (typeof error === "number") layer.error = Math.max(layer.error ?? 0, error);
    layers.set(name, layer);
  }
  return [...layers.values()].sort((a, b) => Number(a.name) - Number(b.name));
}

/** @param {{report: any, isRefused?: boolean}} props */
export function Report({ report, isRefused = false }) {
  if (!report) return html`<p class="note">There is no report.</p>`;
  return html`<div class="report" data-testid="report">
    ${report.refusal ? html`<p class="bad" role="alert">${report.refusal.code}: ${report.refusal.message}</p>` : null}
    <${Checks} checks=${report.checks} isRefused=${isRefused || Boolean(report.refusal)} />
    <${Numbers} found=${report.reference_error} />
    <${BaseError} found=${report.base_error} />
    <${Facts} report=${report} />
  </div>`;
}

/** @param {{checks: any, isRefused: boolean}} props A check of an accepted adapter that did not pass is a warning. */
function Checks({ checks, isRefused }) {
  if (!Array.isArray(checks) || checks.length === 0) return null;
  return html`<h3>Checks</h3>
    <ul class="checks">
      ${checks.map(
        (check) => html`<li class=${check.ok ? "good" : isRefused ? "bad" : "busy"}>
          <span class="mark" role="img" aria-label=${check.ok ? "passed" : "not passed"}>${check.ok ? "✓" : "!"}</span>
          <b>${String(check.name).replaceAll("_", " ")}</b> <span>${String(check.detail)}</span>
        </li>`,
      )}
    </ul>`;
}

/** @param {{found: any}} props */
function Numbers({ found }) {
  if (!found) return html`<h3>Numbers</h3><p class="note">Not checked yet.</p>`;
  const layers = byLayer(found);
  return html`<h3>Numbers</h3>
    <p>
      <b class=${found.verdict === "equal" ? "good" : "bad"}>${found.verdict}</b>: the largest error is
      ${" "}${figure(found.max)} of a tolerance of ${figure(found.tolerance)}, the mean ${figure(found.mean)}, served in
      ${" "}${found.dtype}. The largest is of <code>${found.worst_module}</code>.
    </p>
    <${Strip} title="Norm of the change by layer" layers=${layers} value=${(/** @type {Layer} */ one) => one.norm} />
    ${layers.some((one) => one.error !== null)
      ? html`<${Strip}
          title="Largest error by layer; the line is the tolerance, ${figure(found.tolerance)}"
          layers=${layers}
          value=${(/** @type {Layer} */ one) => one.error ?? 0}
          most=${found.tolerance}
        />`
      : null}`;
}

/** Where a part of the height is, not on the picture's edge. @param {number} part */
const levelOf = (part) => Math.max(0.5, HEIGHT * (1 - part));

/**
 * Bars of equal width, one a layer; `most` is a line across them.
 * @param {{title: string, layers: Layer[], value: (layer: Layer) => number, most?: number}} props
 */
function Strip({ title, layers, value, most }) {
  const top = Math.max(most ?? 0, ...layers.map(value)) || 1;
  const width = layers.length * STEP;
  const said = layers.map((one) => `${one.name}: ${figure(value(one))}`).join(", ");
  return html`<figure class="strip">
    <figcaption>${title}</figcaption>
    <svg viewBox="0 0 ${width} ${HEIGHT + NAMES}" role="img" aria-label="${title}. ${said}" preserveAspectRatio="xMinYMin">
      ${layers.map((one, place) => {
        const height = Math.max(1, (Math.min(value(one), top) / top) * HEIGHT);
        const over = most !== undefined && value(one) > most;
        return html`<g>
          <rect class=${over ? "bar-over" : "bar-norm"} x=${place * STEP + 1} y=${HEIGHT - height} width=${STEP - 2} height=${height}>
            <title>layer ${one.name}: ${figure(value(one))}</title>
          </rect>
          ${layers.length <= 12 || place % 5 === 0
            ? html`<text x=${place * STEP + STEP / 2} y=${HEIGHT + NAMES - 3} text-anchor="middle">${one.name.slice(0, 3)}</text>`
            : null}
        </g>`;
      })}
      ${most !== undefined && html`<line class="tolerance" x1="0" x2=${width} y1=${levelOf(most / top)} y2=${levelOf(most / top)} />`}
    </svg>
  </figure>`;
}

/** @param {{found: any}} props */
function BaseError({ found }) {
  if (!found) return null;
  const figures =
    found.kl === null
      ? found.reason
      : `${figure(found.kl)} nats a token, ${percent(found.top1)} of ${found.tokens} tokens have the same most likely next one`;
  return html`<h3>Base</h3>
    <p>Trained on ${found.trained_on}, served over ${found.served}: ${figures}.</p>`;
}

/** @param {{report: any}} props */
function Facts({ report }) {
  const ranks = [...new Set(Object.values(report.rank_by_module || {}))].sort((a, b) => a - b);
  const facts = [
    ["Modules", num(report.modules_matched)],
    ["Ignored copies of base weights", num(report.modules_ignored)],
    ["Parameters", num(report.parameters)],
    ["Rank", ranks.join(", ")],
    ["Norm", report.norm ? `${figure(report.norm.total)}; the largest is ${figure(report.norm.max)}` : ""],
  ];
  return html`<dl class="facts">
    ${facts.map(([name, value]) => (value ? html`<div><dt>${name}</dt><dd>${value}</dd></div>` : null))}
  </dl>`;
}
