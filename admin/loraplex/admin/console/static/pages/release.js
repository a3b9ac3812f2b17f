/** A release: which versions take the traffic, how they compare, and what was released before. */
import { api, path } from "../lib/api.js";
import { html, useEffect, useState } from "../lib/html.js";
import { usePoll } from "../lib/poll.js";
import { mayCall, ofTenant } from "../lib/store.js";
import { Empty, ErrorBox, Loaded, Loading, Page, Section, Table, Time } from "../lib/ui.js";
import { draftOf, numberOf } from "../lib/release_plan.js";
import { adapterHref, Released, RunBadge } from "./adapters.js";
import { Arms, Guard, Shadow } from "./release_arms.js";
import { Editor } from "./release_editor.js";

const EVERY_MS = 3000;
const ROWS = 20;

/** @typedef {{ body: any, etag: string | null }} Read */

/** @param {{ name: string, candidate?: string }} props `candidate`: a version that the draft begins with. */
export default function Release({ name, candidate = "" }) {
  const where = ofTenant(path`/adapters/${name}/release`);
  const live = usePoll((signal) => read(name, signal), [name], EVERY_MS);
  const [based, setBased] = useState(/** @type {Read | null} */ (null));
  const [draft, setDraft] = useState(/** @type {any} */ (null));
  const [error, setError] = useState(/** @type {any} */ (null));
  const [note, setNote] = useState("");
  const [isBusy, setBusy] = useState(false);
  const [isTouched, setTouched] = useState(candidate !== "");

  /** What is in force becomes the draft. @param {Read} found @param {string} [added] */
  function take(found, added = "") {
    setBased(found);
    setDraft(draftOf(found.body, added || null));
    setError(null);
    setTouched(added !== "");
  }

  useEffect(() => {
    // A draft that nobody changed follows the release, which a schedule changes too.
    if (!live.data || (based && (isTouched || isNewer(based, live.data.release)))) return;
    take(live.data.release, based ? "" : candidate);
  }, [live.data]);

  /**
   * A change that takes place only while the revision that the user saw is in force.
   * @param {"PUT" | "POST"} method @param {string} rest @param {any} body @param {string | null | undefined} seen Its ETag.
   */
  async function change(method, rest, body, seen) {
    setBusy(true);
    setNote("");
    try {
      const { body: found, etag } = await api.send(method, where + rest, body, { etag: seen });
      take({ body: found, etag });
      setNote(saidOf(found));
    } catch (refused) {
      setError(refused);
    }
    setBusy(false);
    live.reload();
  }

  const newest = live.data?.release;
  // An answer to a change may be newer than the last reading.
  const inForce = /** @type {Read} */ (based && newest && isNewer(based, newest) ? based : newest);
  const isStale = isTouched && based !== null && inForce && isNewer(inForce, based);
  return html`<${Page} title=${`Release of ${name}`} actions=${html`<a class="button" href=${adapterHref(name)}>Adapter</a>`}>
    <${Loaded} poll=${live}>
      ${(/** @type {any} */ found) => html`
        ${isStale && html`<${Conflict} live=${inForce} based=${based} onTake=${() => take(inForce)}
          onKeep=${() => (setBased(inForce), setError(null))} />`}
        ${error && !(isStale && error.status === 412) && html`<${ErrorBox} error=${error} />`}
        <p role="status" class="note">${note}</p>
        <${Now} release=${inForce.body} isBusy=${isBusy} isFirst=${found.history.length < 2}
          act=${(/** @type {string} */ rest, /** @type {any} */ body) => change("POST", rest, body, inForce.etag)} />
        ${draft && based
          ? html`<${Editor} draft=${draft} release=${based.body} versions=${found.versions} isBusy=${isBusy || isStale}
              onChange=${(/** @type {any} */ next) => (setTouched(true), setDraft(next))}
              onSave=${(/** @type {any} */ body) => change("PUT", "", body, based.etag)} />`
          : html`<${Loading} />`}
        <${Arms} found=${found.comparison} />
        <${Guard} guard=${found.comparison.guard} run=${inForce.body.run} isGiven=${inForce.body.guard !== null} />
        <${Shadow} shadow=${found.comparison.shadow} />
        <${History} rows=${found.history} />
      `}
    <//>
  <//>`;
}

/** @param {Read} one @param {Read} other */
const isNewer = (one, other) => one.body.revision > other.body.revision;

/** @param {string} name @param {AbortSignal} signal */
async function read(name, signal) {
  const of = (/** @type {string} */ rest) => ofTenant(path`/adapters/${name}` + rest);
  const options = { signal };
  const [release, comparison, history, versions] = await Promise.all([
    api.read(of("/release"), {}, options),
    api.get(of("/release/comparison"), {}, options),
    api.get(of("/release/history"), { limit: ROWS }, options),
    api.list(of("/versions"), {}, options),
  ]);
  const ready = versions.filter((one) => one.state === "ready").map((one) => one.version);
  return { release, comparison, history: history.data, versions: ready.sort((a, b) => numberOf(b) - numberOf(a)) };
}

/** @param {any} found */
function saidOf(found) {
  const skipped = (found.skipped ?? []).map((/** @type {any} */ one) => ` Revision ${one.revision} was skipped: ${one.reason}.`);
  return `Revision ${found.revision} is in force.${skipped.join("")}`;
}

/**
 * Someone else changed the release meanwhile.
 * @param {{ live: Read, based: Read | null, onTake: () => void, onKeep: () => void }} props
 */
function Conflict({ live, based, onTake, onKeep }) {
  const { revision, actor, origin } = live.body;
  return html`<div class="error" role="alert" data-testid="conflict">
    <p>
      <strong>Someone else changed this meanwhile.</strong> Revision ${revision} is in force (${origin} by ${actor}:
      ${" "}<${Released} release=${live.body} />). Your draft began with revision ${based?.body.revision}. Nothing of it was saved.
    </p>
    <p class="actions">
      <button type="button" data-testid="conflict-take" onClick=${onTake}>Show revision ${revision}</button>
      <button type="button" data-testid="conflict-keep" onClick=${onKeep}>Keep my draft, to be saved over it</button>
    </p>
  </div>`;
}

/**
 * What is in force, and the changes of one button.
 * @param {{ release: any, isBusy: boolean, isFirst: boolean, act: (rest: string, body?: any) => void }} props `isFirst`: none was
 *   in force before.
 */
function Now({ release, isBusy, isFirst, act }) {
  const { run, targets, schedule } = release;
  const may = mayCall("adapters:write");
  const newest = [...targets].sort((a, b) => numberOf(b.version) - numberOf(a.version))[0];
  const button = (/** @type {string} */ name, /** @type {string} */ text, /** @type {any} */ body) =>
    html`<button type="button" data-testid="release-${name}" disabled=${isBusy} onClick=${() => act(`/${name}`, body)}>${text}</button>`;
  return html`<${Section} title="In force" note=${html`Revision ${release.revision} since <${Time} at=${release.created_at} />.`}>
    <p data-testid="released"><${Released} release=${release} /></p>
    ${run?.reason && html`<p class="bad">${run.reason}</p>`}
    ${schedule && html`<${Steps} schedule=${schedule} run=${run} />`}
    ${may &&
    html`<p class="actions">
      <button type="button" class="danger" data-testid="release-rollback" disabled=${isBusy || isFirst}
        title=${isFirst ? "There is no release before this one." : "To the release before."} onClick=${() => act("/rollback")}>
        Roll back
      </button>
      ${targets.length > 1 && button("promote", `Promote ${newest.version}`, { version: newest.version })}
      ${run?.status === "running" && button("pause", "Pause", undefined)}
      ${run?.status === "paused" && button("resume", "Resume", undefined)}
    </p>`}
  <//>`;
}

/** @param {{ schedule: any[], run: any }} props */
function Steps({ schedule, run }) {
  const at = run ? run.step : schedule.length;
  return html`<ol class="steps">
    ${[...schedule, { weight: 100, for_seconds: 0 }].map(
      (step, place) => html`<li class=${place < at ? "passed" : ""} aria-current=${place === at && run?.status !== "rolled_back" ? "step" : undefined}>
        ${step.weight}%${step.for_seconds ? ` for ${Math.round(step.for_seconds / 6) / 10} min` : ""}
      </li>`,
    )}
  </ol>`;
}

/** @param {{ rows: any[] }} props */
function History({ rows }) {
  if (rows.length === 0) return html`<${Empty}>Nothing was released.<//>`;
  const columns = [
    { title: "Revision", cell: (/** @type {any} */ row) => row.revision },
    { title: "Since", cell: (/** @type {any} */ row) => html`<${Time} at=${row.created_at} />` },
    { title: "By", cell: (/** @type {any} */ row) => (row.actor === "key" ? `key ${row.actor_key_id}` : row.actor) },
    { title: "How", cell: (/** @type {any} */ row) => `${row.origin ?? "unknown"}${row.restores ? ` to ${row.restores}` : ""}` },
    { title: "Traffic", cell: (/** @type {any} */ row) => html`<${Released} release=${{ ...row, run: null }} />` },
    { title: "State", cell: (/** @type {any} */ row) => row.run && html`<${RunBadge} run=${row.run} />` },
    { title: "Reason", cell: (/** @type {any} */ row) => row.reason },
  ];
  return html`<${Section} title="History">
    <${Table} caption="Releases, the newest first" columns=${columns} rows=${rows} keyOf=${(/** @type {any} */ row) => String(row.revision)}
      testid="release-row" />
  <//>`;
}
