/** Playground: the base and versions of an adapter in conversations side by side, with one seed. Only on the data port. */
import { api } from "../lib/api.js";
import { again, answer, bodyOf, hasResults, next, NOTHING, typedJson } from "../lib/conversation.js";
import { canAsk, Elsewhere } from "../lib/elsewhere.js";
import { html, useEffect, useRef, useState } from "../lib/html.js";
import { place, rest } from "../lib/place.js";
import { MAX_COLUMNS, readLink } from "../lib/play_link.js";
import { usePoll } from "../lib/poll.js";
import { caller } from "../lib/store.js";
import { Field, Page } from "../lib/ui.js";
import { Code } from "./play_code.js";
import { Column } from "./play_column.js";
import { Settings } from "./play_settings.js";
import { Share } from "./play_share.js";

const WHY = "Prompts go to the data port, so the playground is";

/** @typedef {import("../lib/conversation.js").Ask} Ask */
/** @typedef {import("../lib/conversation.js").Column} ColumnState */
/** @typedef {import("../lib/conversation.js").Told} Told */

/** @param {{ tenant?: string, adapter?: string }} props `adapter`: compared with the base; without it, the base alone. */
export default function Playground({ tenant = "", adapter = "" }) {
  const title = tenant ? `Playground of ${tenant}` : "Playground";
  if (!canAsk()) return html`<${Elsewhere} title=${title} why=${WHY} at=${tenant && `#/${place.value}`} />`;
  return html`<${Page} title=${title}><${Bench} key=${rest.value} tenant=${tenant} adapter=${adapter} link=${rest.value} /><//>`;
}

/** @param {{ tenant: string, adapter: string, link: string }} props `link`: what the address fills in. */
function Bench({ tenant, adapter, link }) {
  const base = caller.value?.base.name ?? "";
  const [linked] = useState(() => readLink(link));
  const [ask, setAsk] = useState(linked.ask);
  const first = linked.models.length ? linked.models : adapter ? [base, adapter] : [base];
  const [columns, setColumns] = useState(/** @type {ColumnState[]} */ (first.map((model) => ({ model, turns: [], results: [] }))));
  const [isRunning, setRunning] = useState(false);
  const stop = useRef(/** @type {AbortController | null} */ (null));
  const models = usePoll((signal) => api.get("/v1/models", {}, { signal }), []);
  useEffect(() => () => stop.current?.abort(), []);

  /** @param {number} at @param {(column: ColumnState) => Partial<ColumnState>} change */
  const changeColumn = (at, change) =>
    setColumns((before) => before.map((one, place) => (place === at ? { ...one, ...change(one) } : one)));

  /** @param {(column: ColumnState) => Told | null} tell What each column is told; null leaves it as it is. */
  async function run(tell) {
    const control = new AbortController();
    stop.current = control;
    const all = columns.map((column) => {
      const told = tell(column);
      if (!told) return null;
      const { before, text, results } = told;
      return { before, turn: { text, results, body: bodyOf(column.model, ask, told), answer: NOTHING } };
    });
    all.forEach((one, at) => one && changeColumn(at, () => ({ turns: [...one.before, one.turn] })));
    setRunning(true);
    await Promise.all(
      all.map((one, at) => one && answer(one.turn, control.signal, (changed) => changeColumn(at, (column) => withAnswer(column, changed)))),
    );
    setRunning(false);
  }

  /** @param {Event} event */
  function onSend(event) {
    event.preventDefault();
    run((column) => next(column, ask.prompt));
    setAsk({ ...ask, prompt: "" });
  }

  const isReadable = !typedJson(ask.schema).problem && !typedJson(ask.tools).problem;
  const isTold = Boolean(ask.prompt) || columns.some(hasResults);
  const isNew = columns.every((column) => !column.turns.length);
  return html`
    ${link && isNew && html`<${FromLink} problems=${linked.problems} />`}
    <div class="columns">
      ${columns.map(
        (column, at) => html`<${Column}
          key=${at}
          number=${at + 1}
          tenant=${tenant}
          column=${column}
          models=${models}
          isRunning=${isRunning}
          onChange=${(/** @type {Partial<ColumnState>} */ changed) => changeColumn(at, () => changed)}
          onRemove=${columns.length > 1 ? () => setColumns(columns.filter((_, other) => other !== at)) : null}
        />`,
      )}
    </div>
    <form class="ask" onSubmit=${onSend}>
      <${Prompt} value=${ask.prompt} isFirst=${isNew} onText=${(/** @type {string} */ prompt) => setAsk({ ...ask, prompt })} />
      <p class="actions">
        <button class="primary" data-testid="play-send" disabled=${isRunning || !isReadable || !isTold}>Send</button>
        <button type="button" data-testid="play-stop" disabled=${!isRunning} onClick=${() => stop.current?.abort()}>Stop</button>
        <button type="button" data-testid="play-again" disabled=${isRunning || !isReadable || isNew} onClick=${() => run(again)}>Ask again</button>
        <button type="button" data-testid="play-clear" disabled=${isRunning || isNew}
          onClick=${() => setColumns(columns.map(({ model }) => ({ model, turns: [], results: [] })))}>New conversation</button>
        <button type="button" data-testid="play-add" disabled=${isRunning || columns.length >= MAX_COLUMNS}
          onClick=${() => setColumns([...columns, { ...columns[columns.length - 1], model: base }])}>Add a column</button>
      </p>
      <${Settings} ask=${ask} onChange=${setAsk} />
    </form>
    <${Share} tenant=${tenant} ask=${{ ...ask, prompt: ask.prompt || (columns[0].turns.at(-1)?.text ?? "") }}
      models=${columns.map(({ model }) => model)} />
    <${Code} column=${columns[columns.length - 1]} ask=${ask} />`;
}

/** The column with its last answer changed. @param {ColumnState} column @param {any} changed @returns {Partial<ColumnState>} */
function withAnswer({ turns, results }, changed) {
  const last = turns[turns.length - 1];
  const answered = { ...last.answer, ...changed };
  // Results were used once an answer is there: those of a turn that failed are sent with the next one.
  const isUsed = answered.text || answered.calls.length;
  return { turns: [...turns.slice(0, -1), { ...last, answer: answered }], results: isUsed ? [] : results };
}

/** @param {{ value: string, isFirst: boolean, onText: (text: string) => void }} props */
function Prompt({ value, isFirst, onText }) {
  /** @param {any} event */
  function onKeyDown(event) {
    if (event.key !== "Enter" || !(event.ctrlKey || event.metaKey)) return;
    event.preventDefault();
    event.target.form.requestSubmit();
  }
  return html`<${Field} label=${isFirst ? "Prompt" : "Next turn"} hint="Ctrl+Enter sends it.">
    <textarea data-testid="play-prompt" rows="3" value=${value} onKeyDown=${onKeyDown}
      onInput=${(/** @type {any} */ event) => onText(event.target.value)}></textarea>
  <//>`;
}

/** @param {{ problems: string[] }} props */
function FromLink({ problems }) {
  return html`<div class="card" role="note" data-testid="play-linked">
    <p>A link filled this page in. Nothing was sent: read it before you send it.</p>
    ${problems.length > 0 &&
    html`<p>Some of the link was not used:</p>
      <ul>${problems.map((problem) => html`<li data-testid="play-problem">${problem}</li>`)}</ul>`}
  </div>`;
}
