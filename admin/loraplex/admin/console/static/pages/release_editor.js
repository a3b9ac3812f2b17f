/** The draft of a release: weights, stickiness, guard, schedule, shadow. */
import { html, useState } from "../lib/html.js";
import { mayCall } from "../lib/store.js";
import { Field, NumberInput, Section } from "../lib/ui.js";
import { firstShares, isWatched, withoutVersion, withVersion } from "../lib/release_plan.js";

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
 *   onSave: () => void }} props
 */
export function Editor({ draft, release, versions, isBusy, onChange, onSave }) {
  const { targets } = draft;
  const others = versions.filter((one) => !targets.some((target) => target.version === one));
  const isScheduled = isWatched(release) && release.schedule !== null && !draft.isByHand;
  /** @param {Event} event */
  function onSubmit(event) {
    event.preventDefault();
    onSave();
  }
  return html`<${Section} title="Change it">
    <form class="release" onSubmit=${onSubmit}>
      ${firstShares(draft).map(
        (target) => html`<${Weight} key=${target.version} target=${target} isAlone=${targets.length === 1}
          isOff=${targets.length === 1 || isScheduled || draft.steps.length > 0}
          onWeight=${(/** @type {number} */ weight) => onChange(withVersion(draft, target.version, weight))}
          onRemove=${() => onChange(withoutVersion(draft, target.version))} />`,
      )}
      ${draft.steps.length > 0 && targets.length > 1 && html`<p class="note">The shares are those of the schedule's first step.</p>`}
      ${isScheduled &&
      draft.steps.length === 0 &&
      html`<p class="note">The schedule that runs sets the shares.${" "}
        <button type="button" data-testid="release-by-hand" onClick=${() => onChange({ ...draft, isByHand: true })}>Set them by hand, which ends it</button></p>`}
      ${release.shadow && !draft.shadow && targets.some((one) => one.version === release.shadow.version) &&
      html`<p class="note" data-testid="shadow-ends">The shadow ${release.shadow.version} ends: it gets traffic.</p>`}
      <${AddVersion} versions=${others} onAdd=${(/** @type {string} */ version) => onChange(withVersion(draft, version, NEW_SHARE))} />
      <div class="form">
        <${Field} label="Callers">
          <select data-testid="release-sticky" value=${draft.sticky}
            onChange=${(/** @type {any} */ event) => onChange({ ...draft, sticky: event.target.value })}>
            ${Object.entries(STICKY).map(([value, text]) => html`<option value=${value}>${text}</option>`)}
          </select>
        <//>
      </div>
      <${ShadowOf} shadow=${draft.shadow} versions=${others} onChange=${(/** @type {any} */ shadow) => onChange({ ...draft, shadow })} />
      ${targets.length > 1 && html`<${Watch} draft=${draft} onChange=${onChange} />`}
      ${isWatched(release) && html`<p class="note">The schedule or guard that runs now ends with the next change.</p>`}
      <p class="actions">
        <button class="primary" data-testid="release-save" disabled=${isBusy || !mayCall("adapters:write")}>Save</button>
        ${!mayCall("adapters:write") && html`<span class="note">This key lacks the scope adapters:write.</span>`}
      </p>
    </form>
  <//>`;
}

/**
 * @param {{ target: { version: string, weight: number }, isAlone: boolean, isOff: boolean, onWeight: (percent: number) => void,
 *   onRemove: () => void }} props `isOff`: something else sets the share.
 */
function Weight({ target, isAlone, isOff, onWeight, onRemove }) {
  const { version, weight } = target;
  return html`<div class="weight" data-testid="weight-row" data-key=${version}>
    <b>${version}</b>
    <input type="range" min="0" max="100" step="1" value=${weight} disabled=${isOff} aria-label="Share of ${version}"
      aria-valuetext="${weight} percent" onInput=${(/** @type {any} */ event) => onWeight(Number(event.target.value))} />
    <span><${NumberInput} min=${0} max=${100} value=${weight} disabled=${isOff} label="Percent of ${version}"
      onNumber=${(/** @type {number} */ value) => onWeight(Math.round(value))} />%</span>
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

/**
 * A version that answers unseen: one without traffic.
 * @param {{ shadow: import("../lib/release_plan.js").Shadow | null, versions: string[],
 *   onChange: (shadow: import("../lib/release_plan.js").Shadow | null) => void }} props
 */
function ShadowOf({ shadow, versions, onChange }) {
  const choices = shadow && !versions.includes(shadow.version) ? [shadow.version, ...versions] : versions;
  if (choices.length === 0) return null;
  /** @param {any} event */
  function onVersion({ target: { value: version } }) {
    onChange(version ? { sample: NEW_SHARE / 100, keep_texts: false, ...shadow, version } : null);
  }
  return html`<div class="form">
    <${Field} label="Shadow: answers requests too, and nobody gets its answers">
      <select data-testid="release-shadow" value=${shadow?.version ?? ""} onChange=${onVersion}>
        <option value="">none</option>
        ${choices.map((one) => html`<option value=${one}>${one}</option>`)}
      </select>
    <//>
    ${shadow &&
    html`<${Field} label="Percent of the requests that it answers">
        <${NumberInput} testid="shadow-share" min=${0.01} max=${100} step="any" value=${Number((100 * shadow.sample).toFixed(6))}
          onNumber=${(/** @type {number} */ share) => onChange({ ...shadow, sample: share / 100 })} />
      <//>
      <label><input type="checkbox" data-testid="shadow-texts" checked=${shadow.keep_texts}
        onChange=${(/** @type {any} */ event) => onChange({ ...shadow, keep_texts: event.target.checked })} />
        Keep prompts and answers</label>`}
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
          <${NumberInput} min=${1} max=${99} value=${step.percent} label="Percent of step ${place + 1}"
            onNumber=${(/** @type {number} */ value) => setStep(place, { percent: Math.round(value) })} />% for
          ${" "}<${NumberInput} min=${0.02} step="any" value=${step.minutes} label="Minutes of step ${place + 1}"
            onNumber=${(/** @type {number} */ minutes) => setStep(place, { minutes })} /> minutes
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
