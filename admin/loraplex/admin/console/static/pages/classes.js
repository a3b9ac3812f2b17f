/** Heads of versions: what one gives, and the probabilities of an answer. */
import { figure, num, percent } from "../lib/format.js";
import { html } from "../lib/html.js";
import { Badge, Table } from "../lib/ui.js";

/** Labels, or tokens, with a row of their own. */
const SHOWN = 200;
const PROBLEMS = /** @type {Record<string, string>} */ ({
  single_label_classification: "one label",
  multi_label_classification: "any number of labels",
  regression: "a number for each label",
});

/** @typedef {{ task: string, labels: string[], problem_type: string }} Head */

/** What a version is beside its text. @param {{ head: Head | null, embedding: any }} props */
export function Pooled({ head, embedding }) {
  if (!head && !embedding) return null;
  const shown = head?.labels.slice(0, SHOWN) ?? [];
  const rest = (head?.labels.length ?? 0) - shown.length;
  const facts = [
    ["Classifies", head && (head.task === "token_classify" ? "each token" : "each text")],
    ["Gives", head && `${PROBLEMS[head.problem_type] ?? ""} (${head.problem_type})`],
    ["Pooling", embedding && `${embedding.pooling}${embedding.normalize ? ", normalised" : ""}`],
    ["Dimensions", embedding && (embedding.dimensions === null ? "all" : num(embedding.dimensions))],
  ];
  return html`<div data-testid="pooled">
    <h3>${head ? "Head" : "Embeddings"}</h3>
    <dl class="facts">
      ${facts.map(([name, value]) => value && html`<div><dt>${name}</dt><dd>${value}</dd></div>`)}
      ${head && html`<div><dt>${shown.length === 1 ? "Label" : `${num(head.labels.length)} labels`}</dt>
        <dd>${shown.map((label) => html`<${Badge} kind="off">${label}<//> `)}${rest > 0 && `and ${num(rest)} more`}</dd></div>`}
    </dl>
  </div>`;
}

/**
 * What a head gave for one text: labels by their numbers, the largest first; of a head for tokens each token with its own largest.
 * @param {{ head: Head, item: any, tokens: string[] }} props `item`: of the answer's `data`; `tokens`: their names, by place.
 */
export function Classes({ head, item, tokens }) {
  const isNumber = head.problem_type === "regression";
  const number = { title: isNumber ? "Number" : "Probability", number: true, cell: (/** @type {any} */ row) => html`<${Value} value=${row.value} isNumber=${isNumber} />` };
  const label = { title: "Label", cell: (/** @type {any} */ row) => row.label };
  const rows = item.tokens
    ? item.tokens.map((/** @type {any} */ one, /** @type {number} */ place) => ({
        place,
        token: tokens[place] ?? num(one.token_id),
        label: one.label,
        value: Math.max(...one.probs),
      }))
    : head.labels
        .map((name, place) => ({ place, label: name, value: item.probs[place] }))
        .sort((a, b) => b.value - a.value);
  const columns = item.tokens ? [{ title: "Token", cell: (/** @type {any} */ row) => row.token }, label, number] : [label, number];
  return html`<${Table} caption="Labels" columns=${columns} rows=${rows.slice(0, SHOWN)} testid="class-row"
      keyOf=${(/** @type {any} */ row) => String(row.place)} />
    ${rows.length > SHOWN && html`<p class="note">and ${num(rows.length - SHOWN)} more</p>`}`;
}

/** @param {{ value: number, isNumber: boolean }} props */
function Value({ value, isNumber }) {
  if (isNumber) return figure(value);
  return html`${percent(value)}
    <div class="bar-track" aria-hidden="true"><div class="bar-used" style=${{ width: `${100 * value}%` }}></div></div>`;
}
