/** Playground: the base and versions of an adapter in conversations side by side, with one seed. Only on the data port. */
import { api } from "../lib/api.js";
import { again, answer, bodyOf, hasResults, isWritten, next, NOTHING, typedJson } from "../lib/conversation.js";
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
  if (!canAsk()) return html`<${Elsewhere} title=${title} why=${WHY} at=${tenant && `#/${place.value}${rest.value && `?${rest.value}`}`} />`;
  return html`<${Page} title=${title}><${Bench} key=${rest.value} tenant=${tenant} adapter=${adapter} link=${rest.value} /><//>`;
}

/** @param {{ tenant: string, adapter: string, link: string }} props `link`: what the address fills in. */
function Bench({ tenant, adapter, link }) {
  const base = caller.value?.base.name ?? "";
  const [linked] = useState(() => readLink(link));
  const [ask, setAsk] = useState(linked.ask);
  const first = linked.models.length ? linked.models : adapter ? [base, adapter] : [base];
  const [columns, setColumns] = useState(/** @type {ColumnState[]} */ (first.map((model, id) => ({ id, model, turns: [], results: [] }))));
  const nextId = useRef(first.length);
  const [kinds, setKinds] = useState(/** @type {Map<string, boolean>} */ (new Map()));
  const [isRunning, setRunning] = useState(false);
  /** Null where nothing runs: told at once, while `isRunning` is told with the next drawing. */
  const running = useRef(/** @type {AbortController | null} */ (null));
  const models = usePoll((signal) => api.get("/v1/models", {}, { signal }), []);
  useEffect(() => () => running.current?.abort(), []);

  /** @param {number} id @param {(column: ColumnState) => Partial<ColumnState>} change */
  const changeColumn = (id, change) =>
    setColumns((before) => before.map((one) => (one.id === id ? { ...one, ...change(one) } : one)));

  /** @param {ColumnState} column @param {Partial<import("../lib/conversation.js").Answer>} changed Of its last turn. */
  function onAnswer({ id, model }, changed) {
    const { classifies } = changed;
    if (typeof classifies === "boolean") setKinds((before) => new Map(before).set(model, classifies));
    changeColumn(id, (column) => withAnswer(column, changed));
  }

  /** @param {(column: ColumnState) => Told | null} tell What each column is told; null leaves it as it is. */
  async function run(tell) {
    if (running.current) return;
    const control = new AbortController();
    running.current = control;
    const all = columns.flatMap((column) => {
      const told = tell(column);
      if (!told) return [];
      const { before, text, results } = told;
      return { column, before, turn: { text, results, body: bodyOf(column.model, ask, told), answer: NOTHING } };
    });
    for (const { column, before, turn } of all) changeColumn(column.id, () => ({ turns: [...before, turn] }));
    setRunning(true);
    await Promise.all(all.map(({ column, turn }) => answer(turn, control.signal, (changed) => onAnswer(column, changed))));
    running.current = null;
    setRunning(false);
  }

  /** @param {Event} event */
  function onSend(event) {
    event.preventDefault();
    if (running.current || !isReadable || !isTold) return; // the keyboard passes by a disabled button
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
          key=${column.id}
          number=${at + 1}
          tenant=${tenant}
          column=${column}
          models=${models}
          isRunning=${isRunning}
          onChange=${(/** @type {Partial<ColumnState>} */ changed) => changeColumn(column.id, () => changed)}
          onRemove=${columns.length > 1 ? () => setColumns(columns.filter(({ id }) => id !== column.id)) : null}
        />`,
      )}
    </div>
    <form class="ask" onSubmit=${onSend}>
      <${Prompt} value=${ask.prompt} isFirst=${isNew} onText=${(/** @type {string} */ prompt) => setAsk({ ...ask, prompt })} />
      <p class="actions">
        <button class="primary" data-testid="play-send" disabled=${isRunning || !isReadable || !isTold}>Send</button>
        <button type="button" data-testid="play-stop" disabled=${!isRunning} onClick=${() => running.current?.abort()}>Stop</button>
        <button type="button" data-testid="play-again" disabled=${isRunning || !isReadable || isNew} onClick=${() => run(again)}>Ask again</button>
        <button type="button" data-testid="play-clear" disabled=${isRunning || isNew}
          onClick=${() => setColumns(columns.map(({ id, model }) => ({ id, model, turns: [], results: [] })))}>New conversation</button>
        <button type="button" data-testid="play-add" disabled=${isRunning || columns.length >= MAX_COLUMNS}
          onClick=${() => setColumns([...columns, { ...columns[columns.length - 1], id: nextId.current++, model: base }])}>Add a column</button>
      </p>
      <${Settings} ask=${ask} onChange=${setAsk} />
    </form>
    <${Share} tenant=${tenant} ask=${{ ...ask, prompt: ask.prompt || (columns[0].turns.at(-1)?.text ?? "") }}
      models=${columns.map(({ model }) => model)} />
    <${Code} column=${columns[columns.length - 1]} ask=${ask} kinds=${kinds} />`;
}

/** The column with its last answer changed. @param {ColumnState} column @param {any} changed @returns {Partial<ColumnState>} */
function withAnswer({ turns }, changed) {
  const last = turns[turns.length - 1];
  const turn = { ...last, answer: { ...last.answer, ...changed } };
  // Results were used once an answer is there: those of a turn that failed are sent with the next one.
  return { turns: [...turns.slice(0, -1), turn], results: isWritten(turn) ? [] : turn.results.map(({ text }) => text) };
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
