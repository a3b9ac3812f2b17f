/** The draft of a release: weights, stickiness, guard, schedule. */
import { html, useState } from "../lib/html.js";
import { mayCall } from "../lib/store.js";
import { Field, Section } from "../lib/ui.js";
import { bodyOf, setShare, withoutVersion, withVersion } from "../lib/release_plan.js";

/** @typedef {import("../lib/release_plan.js").Draft} Draft */

const STICKY = { user: "each user on one version", key: "each key on one version", none: "each request by chance" };
const FIRST_STEPS = [
  { percent: 1, minutes: 10 },
  { percent: 10, minutes: 60 },
  { percent: 50, minutes: 60 },
];
const NEW_SHARE = 10;

/**
 * @param {{ draft: Draft, release: any, versions: string[], isBusy: boolean, onChange: (draft: Draft) => void,
 *   onSave: (body: any) => void }} props
 */
export function Editor({ draft, release, versions, isBusy, onChange, onSave }) {
  const { targets } = draft;
  const others = versions.filter((one) => !targets.some((target) => target.version === one));
  const isWatched = release.run?.status === "running" || release.run?.status === "paused";
  /** @param {Event} event */
  function onSubmit(event) {
    event.preventDefault();
    onSave(bodyOf(draft));
  }
  return html`<${Section} title="Change it">
    <form class="release" onSubmit=${onSubmit}>
      ${targets.map(
        (target) => html`<${Weight} key=${target.version} target=${target} isAlone=${targets.length === 1}
          onWeight=${(/** @type {number} */ percent) => onChange({ ...draft, targets: setShare(targets, target.version, percent) })}
          onRemove=${() => onChange(withoutVersion(draft, target.version))} />`,
      )}
      <${AddVersion} versions=${others} onAdd=${(/** @type {string} */ version) => onChange(withVersion(draft, version, NEW_SHARE))} />
      <div class="form">
        <${Field} label="Callers">
          <select data-testid="release-sticky" value=${draft.sticky}
            onChange=${(/** @type {any} */ event) => onChange({ ...draft, sticky: event.target.value })}>
            ${Object.entries(STICKY).map(([value, text]) => html`<option value=${value}>${text}</option>`)}
          </select>
        <//>
      </div>
      ${targets.length > 1 && html`<${Watch} draft=${draft} onChange=${onChange} />`}
      ${isWatched && html`<p class="note">The schedule or guard that runs now ends with the next change.</p>`}
      <p class="actions">
        <button class="primary" data-testid="release-save" disabled=${isBusy || !mayCall("adapters:write")}>Save</button>
        ${!mayCall("adapters:write") && html`<span class="note">This key lacks the scope adapters:write.</span>`}
      </p>
    </form>
  <//>`;
}

/**
 * @param {{ target: { version: string, weight: number }, isAlone: boolean, onWeight: (percent: number) => void,
 *   onRemove: () => void }} props
 */
function Weight({ target, isAlone, onWeight, onRemove }) {
  const { version, weight } = target;
  const onInput = (/** @type {any} */ event) => onWeight(Math.max(0, Math.min(100, Math.round(Number(event.target.value)))));
  return html`<div class="weight" data-testid="weight-row" data-key=${version}>
    <b>${version}</b>
    <input type="range" min="0" max="100" step="1" value=${weight} disabled=${isAlone} aria-label="Share of ${version}"
      aria-valuetext="${weight} percent" onInput=${onInput} />
    <span><input type="number" min="0" max="100" value=${weight} disabled=${isAlone} aria-label="Percent of ${version}" onChange=${onInput} />%</span>
    <button type="button" disabled=${isAlone} aria-label="Remove ${version}" onClick=${onRemove}>×</button>
  </div>`;
}

/** @param {{ versions: string[], onAdd: (version: string) => void }} props */
function AddVersion({ versions, onAdd }) {
  const [chosen, setChosen] = useState("");
  if (versions.length === 0) return null;
  const version = versions.includes(chosen) ? chosen : versions[0];
  return html`<div class="form">
    <${Field} label="Another ready version">
      <select data-testid="add-version" value=${version} onChange=${(/** @type {any} */ event) => setChosen(event.target.value)}>
        ${versions.map((one) => html`<option value=${one}>${one}</option>`)}
      </select>
    <//>
    <button type="button" data-testid="add-canary" onClick=${() => onAdd(version)}>Add ${version} with ${NEW_SHARE}%</button>
  </div>`;
}

/** Guard and schedule. @param {{ draft: Draft, onChange: (draft: Draft) => void }} props */
function Watch({ draft, onChange }) {
  const { steps } = draft;
  /** @param {number} place @param {Partial<import("../lib/release_plan.js").Step>} changed */
  const setStep = (place, changed) =>
    onChange({ ...draft, steps: steps.map((step, at) => (at === place ? { ...step, ...changed } : step)) });
  const isScheduled = steps.length > 0;
  return html`<label class="check">
      <input type="checkbox" data-testid="release-guard" checked=${draft.isGuarded}
        onChange=${(/** @type {any} */ event) => onChange({ ...draft, isGuarded: event.target.checked })} />
      Guard: back at once where the newest version is worse
    </label>
    <label class="check">
      <input type="checkbox" data-testid="release-schedule" checked=${isScheduled}
        onChange=${(/** @type {any} */ event) => onChange({ ...draft, steps: event.target.checked ? FIRST_STEPS : [] })} />
      Schedule: the newest version's share rises in steps, the last is 100%
    </label>
    ${isScheduled &&
    html`<ol class="schedule">
      ${steps.map(
        (step, place) => html`<li key=${place}>
          <input type="number" min="1" max="99" step="1" value=${step.percent} aria-label="Percent of step ${place + 1}"
            onChange=${(/** @type {any} */ event) => setStep(place, { percent: Number(event.target.value) })} />% for
          ${" "}<input type="number" min="0.02" step="any" value=${step.minutes} aria-label="Minutes of step ${place + 1}"
            onChange=${(/** @type {any} */ event) => setStep(place, { minutes: Number(event.target.value) })} /> minutes
          <button type="button" aria-label="Remove step ${place + 1}"
            onClick=${() => onChange({ ...draft, steps: steps.filter((_, at) => at !== place) })}>×</button>
        </li>`,
      )}
      <li><button type="button" onClick=${() => onChange({ ...draft, steps: [...steps, nextStep(steps)] })}>Add a step</button></li>
    </ol>`}`;
}

/** @param {import("../lib/release_plan.js").Step[]} steps */
function nextStep(steps) {
  const last = steps[steps.length - 1];
  return { percent: Math.min(99, last.percent + Math.ceil((100 - last.percent) / 2)), minutes: last.minutes };
}
