/** A release as the editor changes it, and the body of the PUT that it becomes. */

/**
 * @typedef {{version: string, weight: number}} Target
 * @typedef {{percent: number, minutes: number}} Step
 * @typedef {{version: string, sample: number, keep_texts: boolean}} Shadow
 * @typedef {{targets: Target[], sticky: string, isGuarded: boolean, guard: any, steps: Step[], shadow: Shadow | null,
 *   isByHand: boolean}} Draft `isByHand`: the schedule that runs is to end.
 */

/** @param {string} version */
export const numberOf = (version) => Number(version.slice(1));

/**
 * The release in force as a draft, without its schedule; `candidate` is added with a tenth of the traffic.
 * @param {any} release
 * @param {string | null} candidate
 * @returns {Draft}
 */
export function draftOf(release, candidate) {
  const targets = shares(release.targets);
  /** @type {Draft} */
  const draft = {
    targets,
    sticky: release.sticky,
    isGuarded: release.guard !== null,
    guard: release.guard,
    steps: [],
    shadow: release.shadow,
    isByHand: false,
  };
  return candidate === null ? draft : withVersion(draft, candidate, 10);
}

/**
 * Weights as whole percents whose sum is 100, the largest remainders rounded up.
 * @param {Target[]} targets
 * @returns {Target[]}
 */
export function shares(targets) {
  const sum = targets.reduce((all, one) => all + one.weight, 0) || 1;
  const exact = targets.map((one) => (one.weight / sum) * 100);
  const found = targets.map((one, place) => ({ version: one.version, weight: Math.floor(exact[place]) }));
  const left = 100 - found.reduce((all, one) => all + one.weight, 0);
  const order = exact.map((value, place) => [value % 1, place]).sort((a, b) => b[0] - a[0]);
  for (const [, place] of order.slice(0, left)) found[place].weight += 1;
  return found;
}

/**
 * One version's percent is set; the others keep their proportions in what is left.
 * @param {Target[]} targets
 * @param {string} version
 * @param {number} percent
 * @returns {Target[]}
 */
function setShare(targets, version, percent) {
  const others = targets.filter((one) => one.version !== version);
  if (others.length === 0) return [{ version, weight: 100 }];
  const sum = others.reduce((all, one) => all + one.weight, 0);
  const scaled = others.map((one) => ({
    version: one.version,
    weight: (sum === 0 ? 1 / others.length : one.weight / sum) * (100 - percent),
  }));
  return shares(targets.map((one) => scaled.find((other) => other.version === one.version) || { version, weight: percent }));
}

/**
 * A version of the draft gets traffic. It ends as a shadow: a shadow is a version without traffic.
 * @param {Draft} draft
 * @param {string} version
 * @param {number} percent
 * @returns {Draft}
 */
export function withVersion(draft, version, percent) {
  const known = draft.targets.some((one) => one.version === version);
  const targets = known ? draft.targets : [...draft.targets, { version, weight: 0 }];
  const shadow = draft.shadow?.version === version ? null : draft.shadow;
  return { ...draft, shadow, targets: setShare(targets, version, percent) };
}

/**
 * @param {Draft} draft
 * @param {string} version
 * @returns {Draft}
 */
export function withoutVersion(draft, version) {
  return { ...draft, targets: shares(draft.targets.filter((one) => one.version !== version)) };
}

/**
 * The shares while a draft is in force: beside a schedule, those of its first step.
 * @param {Draft} draft
 */
export function firstShares({ targets, steps }) {
  if (targets.length < 2 || steps.length === 0) return targets;
  const newest = targets.reduce((one, other) => (numberOf(other.version) > numberOf(one.version) ? other : one));
  return setShare(targets, newest.version, steps[0].percent);
}

/**
 * The body of `PUT …/release`. Weights that the draft did not change stay as they are in `release`, also between two percents.
 * @param {Draft} draft
 * @param {any} release
 */
export function bodyOf(draft, release) {
  const isKept = isEqual(draft.targets, shares(release.targets));
  /** @type {Record<string, any>} */
  const body = { targets: isKept ? release.targets : draft.targets, sticky: draft.sticky };
  if (draft.isGuarded && draft.targets.length > 1) body.guard = draft.guard || {};
  if (draft.steps.length > 0 && draft.targets.length > 1) {
    body.schedule = draft.steps.map((step) => ({
      weight: step.percent,
      for_seconds: Math.round(step.minutes * 60),
    }));
  }
  if (draft.shadow) body.shadow = draft.shadow;
  return body;
}

/** Whether a draft would change nothing of the release that it began with. @param {Draft} draft @param {any} release */
export const isUnchanged = (draft, release) => !draft.isByHand && isEqual(bodyOf(draft, release), bodyOf(draftOf(release, null), release));

/** Whether a schedule or guard runs, which each new release ends. @param {any} release */
export const isWatched = ({ run }) => run?.status === "running" || run?.status === "paused";

/** @param {any} one @param {any} other */
const isEqual = (one, other) => JSON.stringify(one) === JSON.stringify(other);
