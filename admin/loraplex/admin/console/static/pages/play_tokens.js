/** The tokens of an answer, each with its log probability and the likeliest tokens in its place. */
import { figure, num, percent } from "../lib/format.js";
import { html, useRef, useState } from "../lib/html.js";
import { Table } from "../lib/ui.js";

/** @typedef {import("../lib/stream.js").Token} Token */

/** Tokens with a mark of their own. */
const SHOWN = 2000;
/** Probabilities below which a token has a thicker line. */
const LEVELS = [0.9, 0.5, 0.2, 0.05];

/** @param {number} logprob */
const levelOf = (logprob) => LEVELS.filter((level) => Math.exp(logprob) < level).length;

/** As text without white space that nobody sees. @param {string} token */
const written = (token) => JSON.stringify(token);

/** @param {{ token: string, logprob: number }} one */
const said = ({ token, logprob }) => `${written(token)}, log probability ${figure(logprob)}, ${percent(Math.exp(logprob))}`;

/** @param {number} count */
const counted = (count) => (count === 1 ? "1 token" : `${num(count)} tokens`);

/** A list in which the arrow keys go from token to token. @param {{ tokens: Token[] }} props */
export function Tokens({ tokens }) {
  const [at, setAt] = useState(/** @type {number | null} */ (null));
  const list = useRef(/** @type {HTMLElement | null} */ (null));
  const shown = tokens.slice(0, SHOWN);
  const sum = tokens.reduce((all, one) => all + one.logprob, 0);
  const least = tokens.reduce((one, other) => (other.logprob < one.logprob ? other : one));

  /** @param {KeyboardEvent} event */
  function onKeyDown(event) {
    const now = at ?? 0;
    const to = new Map([["ArrowRight", now + 1], ["ArrowLeft", now - 1], ["Home", 0], ["End", shown.length - 1]]).get(event.key);
    if (to === undefined) return;
    event.preventDefault();
    /** @type {HTMLElement | undefined} */ (list.current?.children[Math.max(0, Math.min(shown.length - 1, to))])?.focus();
  }

  return html`<div class="answer" role="listbox" aria-label="Tokens of the answer" aria-orientation="horizontal" ref=${list} onKeyDown=${onKeyDown}>
      ${shown.map(
        (one, place) => html`<span key=${place} role="option" class=${`token p${levelOf(one.logprob)}`} data-testid="play-token"
          tabindex=${place === (at ?? 0) ? 0 : -1} aria-selected=${place === at} aria-label=${said(one)} title=${said(one)}
          onFocus=${() => setAt(place)}>${one.token}</span>`,
      )}</div>
    ${tokens.length > SHOWN && html`<div class="answer">${tokens.slice(SHOWN).map((one) => one.token).join("")}</div>`}
    <p class="note" data-testid="play-logprobs">Mean log probability ${figure(sum / tokens.length)} of ${counted(tokens.length)}, the least
      likely is ${said(least)}. Lines are under tokens below
      ${LEVELS.map((level, place) => html` <span class=${`token p${place + 1}`}>${percent(level)}</span>`)}.
      ${at === null && " Choose a token to see what else was likely."}</p>
    ${at !== null && tokens[at] && html`<${Likely} token=${tokens[at]} />`}`;
}

/** @param {{ token: Token }} props */
function Likely({ token }) {
  const columns = [
    { title: "Token", cell: (/** @type {any} */ one) => html`<code>${written(one.token)}</code>${one.token === token.token && " (drawn)"}` },
    { title: "Probability", number: true, cell: (/** @type {any} */ one) => percent(Math.exp(one.logprob)) },
    { title: "Log probability", number: true, cell: (/** @type {any} */ one) => figure(one.logprob) },
  ];
  const isAmong = token.top_logprobs.some((one) => one.token === token.token);
  const rows = (isAmong ? token.top_logprobs : [token, ...token.top_logprobs]).map((one, place) => ({ ...one, place }));
  return html`<div data-testid="play-likely" aria-live="polite">
    <${Table} caption="Likeliest tokens in place of ${written(token.token)}" columns=${columns} rows=${rows} testid="play-likely-row"
      keyOf=${(/** @type {any} */ one) => String(one.place)} />
  </div>`;
}
