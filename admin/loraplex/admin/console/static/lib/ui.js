/** The parts that pages are made of. A value is text, whatever it holds. */
import { html, useEffect, useId, useRef, useState } from "./html.js";
import { dateTime, fullDateTime, num } from "./format.js";

export * from "./format.js";

/**
 * A page: its heading, which names the tenant, is the document's title, and takes the focus when it comes, so that a screen reader
 * reads it.
 * @param {{ title: string, actions?: any, children?: any }} props
 */
export function Page({ title, actions, children }) {
  const heading = useRef(/** @type {HTMLElement | null} */ (null));
  useEffect(() => {
    // Not from the middle of typing.
    if (!document.activeElement?.matches("input")) heading.current?.focus({ preventScroll: true });
  }, []);
  useEffect(() => {
    document.title = `${title} · Loraplex`;
  }, [title]);
  return html`<header class="page-head">
      <h1 tabindex="-1" ref=${heading}>${title}</h1>
      <div class="actions">${actions}</div>
    </header>
    ${children}`;
}

/** A part of a page. @param {{ title: any, note?: any, children?: any }} props */
export function Section({ title, note, children }) {
  const id = useId();
  return html`<section aria-labelledby=${id}>
    <h2 id=${id}>${title}</h2>
    ${note && html`<p class="note">${note}</p>`} ${children}
  </section>`;
}

/**
 * @typedef {{ title: string, cell: (row: any) => any, number?: boolean }} Column
 */

/**
 * Rows, scrolling sideways where they do not fit; where the screen is narrow, each is a card with the columns' titles beside its
 * values. The first column names the row.
 * @param {{ caption: string, columns: Column[], rows: any[], keyOf: (row: any) => string, testid?: string,
 *   empty?: string, foot?: any[] }} props `foot`: the cells of a last row, such as totals.
 */
export function Table({ caption, columns, rows, keyOf, testid, empty, foot }) {
  if (!rows.length && empty) return html`<${Empty}>${empty}<//>`;
  const kind = (/** @type {Column} */ column) => (column.number ? "number" : "");
  return html`<div class="scroll" tabindex="0" role="region" aria-label=${caption}>
    <table class="cards">
      <caption class="hidden">${caption}</caption>
      <thead>
        <tr>${columns.map((column) => html`<th scope="col" class=${kind(column)}>${column.title}</th>`)}</tr>
      </thead>
      <tbody>
        ${rows.map(
          (row) => html`<tr key=${keyOf(row)} data-testid=${testid} data-key=${keyOf(row)}>
            ${columns.map((column, i) =>
              i === 0
                ? html`<th scope="row" class=${kind(column)}>${column.cell(row)}</th>`
                : html`<td class=${kind(column)} data-title=${column.title}>${column.cell(row)}</td>`,
            )}
          </tr>`,
        )}
      </tbody>
      ${foot && html`<tfoot><tr>${columns.map((column, i) => html`<td class=${kind(column)} data-title=${i ? column.title : undefined}>${foot[i]}</td>`)}</tr></tfoot>`}
    </table>
  </div>`;
}

/** One figure. @param {{ name: string, value: any, note?: any, testid?: string }} props */
export function Tile({ name, value, note, testid }) {
  return html`<div class="tile" data-testid=${testid}>
    <dt>${name}</dt>
    <dd>${value}</dd>
    ${note && html`<dd class="note">${note}</dd>`}
  </div>`;
}

/** @param {{ children?: any }} props */
export const Tiles = ({ children }) => html`<dl class="tiles">${children}</dl>`;

/**
 * What is used of a limit; `held` is reserved for requests that run.
 * @param {{ name: any, used: number, held?: number, limit: number, show?: (value: number) => string, note?: any,
 *   testid?: string }} props
 */
export function Bar({ name, used, held = 0, limit, show = num, note, testid }) {
  const id = useId();
  const part = (/** @type {number} */ value) => `${Math.max(0, Math.min(100, (100 * value) / (limit || 1)))}%`;
  const left = Math.max(0, limit - used - held);
  const text = `${show(used)} used${held ? `, ${show(held)} held` : ""}, ${show(left)} left of ${show(limit)}`;
  return html`<div class="bar" data-testid=${testid}>
    <div class="bar-text"><span id=${id}>${name}</span><span>${text}</span></div>
    <div class="bar-track" role="meter" aria-labelledby=${id} aria-valuemin="0" aria-valuemax=${limit}
      aria-valuenow=${Math.min(limit, used + held)} aria-valuetext=${text}>
      <div class=${left ? "bar-used" : "bar-used full"} style=${{ width: part(used) }}></div>
      <div class="bar-held" style=${{ width: part(held) }}></div>
    </div>
    ${note && html`<p class="note">${note}</p>`}
  </div>`;
}

/** A state as a word with a colour. @param {{ kind: "good" | "busy" | "bad" | "off", children?: any }} props */
export const Badge = ({ kind, children }) => html`<span class=${`badge ${kind}`}>${children}</span>`;

/** A time in the viewer's zone. @param {{ at: string | null | undefined, none?: string }} props */
export function Time({ at, none = "never" }) {
  if (!at) return html`<span class="note">${none}</span>`;
  return html`<time datetime=${at} title=${`${fullDateTime(at)} (${at})`}>${dateTime(at)}</time>`;
}

/** @param {{ children?: any }} props */
export const Empty = ({ children }) => html`<p class="empty" data-testid="empty">${children}</p>`;

/** @param {{ what?: string }} props */
export const Loading = ({ what = "Loading" }) =>
  html`<p class="empty" role="status" data-testid="loading">${what}…</p>`;

/**
 * Why something is not shown, and what to do.
 * @param {{ error: any, retry?: () => void }} props
 */
export function ErrorBox({ error, retry }) {
  return html`<div class="error" role="alert" data-testid="error">
    <p><strong>${titleOf(error)}</strong> ${error.message}</p>
    ${error.code && html`<p class="note">${error.status ? `${error.status} ` : ""}<code>${error.code}</code></p>`}
    ${retry && html`<button type="button" onClick=${retry}>Try again</button>`}
  </div>`;
}

/** What a form or a button asks for: busy until it ends, and what refused it. `run` says whether nothing did; `forget` the refusal. */
export function useWork() {
  const [error, setError] = useState(/** @type {any} */ (null));
  const [busy, setBusy] = useState(false);

  /** @param {() => Promise<void>} work */
  async function run(work) {
    setBusy(true);
    setError(null);
    const refused = await work().then(() => null, (/** @type {any} */ why) => why);
    setError(refused);
    setBusy(false);
    return !refused;
  }
  return { busy, error, run, forget: () => setError(null) };
}

/** @param {any} error */
function titleOf(error) {
  if (error.code === "offline") return "The server is away.";
  if (error.code === "tenant_suspended") return "This key's tenant is suspended.";
  if (error.code === "insufficient_scope") return "This key may not see or do this.";
  if (error.code === "database_unavailable") return "The database is away.";
  if (error.code === "engine_restarting") return "The engine is starting.";
  if (error.status === 401) return "The secret is not valid.";
  if (error.status === 404) return "This is not there.";
  if (error.status === 412) return "Someone else changed this meanwhile.";
  return "This did not work.";
}

/**
 * The state of a poll around what it read: loading, an error, or the content, with the error above it if it is old.
 * @param {{ poll: { data: any, error: any, reload: () => void }, onward?: any, children: (data: any) => any }} props
 * `onward`: where to go from what is not there.
 */
export function Loaded({ poll, onward, children }) {
  if (poll.data === null) {
    if (!poll.error) return html`<${Loading} />`;
    return html`<${ErrorBox} error=${poll.error} retry=${poll.reload} />${poll.error.status === 404 && onward}`;
  }
  return html`${poll.error && html`<${ErrorBox} error=${poll.error} retry=${poll.reload} />`}
    <div class=${poll.error ? "stale" : ""}>${children(poll.data)}</div>`;
}

/**
 * A number as it is typed: what is in the field stays there until it is left, whatever else changes. Each key tells a number within
 * the bounds: an empty field the one before.
 * @param {{ value: number, onNumber: (value: number) => void, label?: string, min?: number, max?: number, step?: number | "any",
 *   disabled?: boolean, testid?: string }} props
 */
export function NumberInput({ value, onNumber, label, min, max, step = 1, disabled, testid }) {
  const [typed, setTyped] = useState(/** @type {string | null} */ (null));
  /** @param {any} event */
  function onInput({ target: { value: text, valueAsNumber: given } }) {
    setTyped(text);
    onNumber(Number.isNaN(given) ? value : Math.max(min ?? given, Math.min(max ?? given, given)));
  }
  return html`<input type="number" min=${min} max=${max} step=${step} value=${typed ?? value} disabled=${disabled} aria-label=${label}
    data-testid=${testid} onInput=${onInput} onBlur=${() => setTyped(null)} />`;
}

/**
 * A text to filter by, which holds with Enter or when the field is left. Until then it stays as it is typed.
 * @param {{ value: string, onText: (text: string) => void, placeholder: string, testid: string, most?: number }} props
 */
export function FilterInput({ value, onText, placeholder, testid, most = 64 }) {
  const [typed, setTyped] = useState(/** @type {string | null} */ (null));
  return html`<input data-testid=${testid} placeholder=${placeholder} value=${typed ?? value} maxlength=${most} spellcheck=${false}
    autocomplete="off" onInput=${(/** @type {any} */ event) => setTyped(event.target.value)}
    onChange=${(/** @type {any} */ event) => (setTyped(null), onText(event.target.value.trim()))} />`;
}

/** A labelled control: `children` is one input. @param {{ label: any, hint?: any, children?: any }} props */
export const Field = ({ label, hint, children }) =>
  html`<label class="field"><span>${label}</span>${children}${hint && html`<small class="note">${hint}</small>`}</label>`;

/**
 * Steps through the pages of a list.
 * @param {{ first: boolean, next: string | null, onFirst: () => void, onNext: () => void, what: string }} props
 */
export const Pager = ({ first, next, onFirst, onNext, what }) =>
  (!first || next) &&
  html`<nav class="pager" aria-label=${`Pages of ${what}`}>
    <button type="button" disabled=${first} onClick=${onFirst}>First</button>
    <button type="button" disabled=${!next} onClick=${onNext} data-testid="next-page">Next</button>
  </nav>`;

/** Words of this server, and what each means. */
const MEANINGS = {
  evidence: "How strongly the answers say that the new version is worse. It begins at 1; at its threshold the release goes back by itself.",
  hold: "The guard has no verdict yet: too few requests came, or one measure by itself looks bad. A step does not end while it holds.",
  pin: "An order to bring a version to the device and to keep it there, across restarts too.",
  place: "Room for one sequence in the batch that the engine computes. A request with several answers takes one for each.",
  reserve: "Device memory that stays with this tenant's most recently used adapters, whatever other tenants load.",
  step: "A part of a schedule: a share of the traffic for some time. It ends when the time is over and the guard, if there is one, says pass.",
  sticky: "Whether a caller stays with one version: each user, each key, or none. Without it each request draws its version anew.",
  tier: "The memory that has an adapter: the device is the fastest, then the host, then the disk. A request brings its adapter to the device.",
};

/** Words of the page; a click, a touch or a key explains each. @param {{ of: (keyof typeof MEANINGS)[] }} props */
export function Words({ of }) {
  const [open, setOpen] = useState(/** @type {keyof typeof MEANINGS | null} */ (null));
  const id = useId();
  return html`<div class="words">
    <p class="note">Explained:
      ${of.map((word) => html` <button type="button" class="link" key=${word} data-testid="word" aria-expanded=${open === word} aria-controls=${id}
        onClick=${() => setOpen(open === word ? null : word)}>${word}</button>`)}</p>
    <p id=${id} role="status" data-testid="meaning">${open && MEANINGS[open]}</p>
  </div>`;
}
