/** A release: which versions take the traffic, how they compare, and what was released before. */
import { api, path } from "../lib/api.js";
import { html, useEffect, useRef, useState } from "../lib/html.js";
import { usePoll } from "../lib/poll.js";
import { isOperator, mayCall } from "../lib/store.js";
import { Empty, ErrorBox, Loaded, Loading, Page, percent, Section, Table, Time, Words } from "../lib/ui.js";
import { bodyOf, draftOf, isUnchanged, isWatched, numberOf } from "../lib/release_plan.js";
import { AllAdapters } from "./adapter.js";
import { adapterHref, figuresHref, Released, RunBadge } from "./adapters.js";
import { Arms, Shadow } from "./release_arms.js";
import { Editor } from "./release_editor.js";
import { Guard, inWords } from "./release_guard.js";

const EVERY_MS = 3000;
const ROWS = 20;

/** @typedef {{ body: any, etag: string | null }} Read */

/** @param {{ tenant: string, name: string, candidate?: string }} props `candidate`: a version that the draft begins with. */
export default function Release({ tenant, name, candidate = "" }) {
  const adapter = path`tenants/${tenant}/adapters/${name}`;
  const live = usePoll((signal) => read(adapter, signal), [adapter], EVERY_MS);
  const [based, setBased] = useState(/** @type {Read | null} */ (null));
  const [draft, setDraft] = useState(/** @type {any} */ (null));
  const [error, setError] = useState(/** @type {any} */ (null));
  const [note, setNote] = useState("");
  const [isBusy, setBusy] = useState(false);
  const sending = useRef(false);
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
    // The second click of two comes before the button is off.
    if (sending.current) return;
    sending.current = true;
    setBusy(true);
    setNote("");
    try {
      const { body: found, etag } = await api.send(method, `${adapter}/release${rest}`, body, { etag: seen });
      take({ body: found, etag });
      setNote(saidOf(`${tenant}/${name}`, found));
    } catch (refused) {
      setError(refused);
    }
    sending.current = false;
    setBusy(false);
    live.reload();
  }

  /** A revision that changes nothing would be one step more for each rollback. @param {Read} began */
  function save(began) {
    if (isUnchanged(draft, began.body)) {
      setTouched(false);
      setNote(`Nothing is changed: revision ${began.body.revision} of ${tenant}/${name} stays in force.`);
    } else change("PUT", "", bodyOf(draft, began.body), began.etag);
  }

  const newest = live.data?.release;
  // An answer to a change may be newer than the last reading.
  const inForce = /** @type {Read} */ (based && newest && isNewer(based, newest) ? based : newest);
  const isStale = isTouched && based !== null && inForce && isNewer(inForce, based);
  return html`<${Page} title=${`Release of ${tenant}/${name}`} actions=${html`<a class="button" href=${adapterHref(tenant, name)}>Adapter</a>
      ${isOperator.value && html`<a class="button" data-testid="see-figures" href=${figuresHref({ tenant })}>Figures of ${tenant}</a>`}`}>
    <${Loaded} poll=${live} onward=${html`<${AllAdapters} tenant=${tenant} />`}>
      ${(/** @type {any} */ found) => html`
        ${isStale && html`<${Conflict} live=${inForce} based=${based} onTake=${() => take(inForce)}
          onKeep=${() => (setBased(inForce), setError(null))} />`}
        ${error && !(isStale && error.status === 412) && html`<${ErrorBox} error=${error} />`}
        <p role="status" class="note" data-testid="release-note">${note}</p>
        <${Words} of=${["hold", "evidence", "sticky", "step"]} />
        <${Now} tenant=${tenant} name=${name} release=${inForce.body} isBusy=${isBusy} isFirst=${found.history.length < 2}
          act=${(/** @type {string} */ rest, /** @type {any} */ body) => change(rest ? "POST" : "PUT", rest, body, inForce.etag)} />
        <${Guard} comparison=${found.comparison} run=${inForce.body.run} isGiven=${inForce.body.guard !== null} />
        ${isCompared(found) && html`<${Arms} found=${found.comparison} />`}
        ${draft && based
          ? html`<${Editor} draft=${draft} release=${based.body} versions=${found.versions} isBusy=${isBusy || isStale}
              onChange=${(/** @type {any} */ next) => (setTouched(true), setDraft(next))}
              onSave=${() => save(based)} />`
          : html`<${Loading} />`}
        ${!isCompared(found) && html`<${Arms} found=${found.comparison} />`}
        <${Shadow} shadow=${found.comparison.shadow} />
        <${History} rows=${found.history} />
      `}
    <//>
  <//>`;
}

/** @param {Read} one @param {Read} other */
const isNewer = (one, other) => one.body.revision > other.body.revision;

/** Whether there are two versions to compare. @param {any} found */
const isCompared = (found) => found.comparison.arms.length > 1;

/** @param {string} adapter Its path. @param {AbortSignal} signal */
async function read(adapter, signal) {
  const options = { signal };
  const [release, comparison, history, versions] = await Promise.all([
    api.read(`${adapter}/release`, {}, options),
    api.get(`${adapter}/release/comparison`, {}, options),
    api.get(`${adapter}/release/history`, { limit: ROWS }, options),
    api.list(`${adapter}/versions`, {}, options),
  ]);
  const ready = versions.filter((one) => one.state === "ready").map((one) => one.version);
  return { release, comparison, history: history.data, versions: ready.sort((a, b) => numberOf(b) - numberOf(a)) };
}

/** @param {string} of @param {any} found */
function saidOf(of, found) {
  const skipped = (found.skipped ?? []).map((/** @type {any} */ one) => ` Revision ${one.revision} was skipped: ${one.reason}.`);
  return `Revision ${found.revision} of ${of} is in force.${skipped.join("")}`;
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
 * @param {{ tenant: string, name: string, release: any, isBusy: boolean, isFirst: boolean,
 *   act: (rest: string, body?: any) => void }} props `isFirst`: none was in force before; `act` without `rest` puts a release.
 */
function Now({ tenant, name, release, isBusy, isFirst, act }) {
  const { run, targets, schedule, shadow } = release;
  const may = mayCall("adapters:write");
  const of = `${tenant}/${name}`;
  const newest = [...targets].sort((a, b) => numberOf(b.version) - numberOf(a.version))[0];
  /** @param {string} testid @param {string} text @param {string} rest @param {any} [body] */
  const button = (testid, text, rest, body) => html`<button type="button" data-testid="release-${testid}" disabled=${isBusy}
    onClick=${(/** @type {MouseEvent} */ event) => isOneClick(event) && act(rest, body)}>${text}</button>`;
  return html`<${Section} title="In force" note=${html`Revision ${release.revision} since <${Time} at=${release.created_at} />.`}>
    <p data-testid="released"><${Released} release=${{ ...release, shadow: null }} /></p>
    ${shadow &&
    html`<p data-testid="released-shadow">Shadow: ${shadow.version} answers ${percent(shadow.sample)} of the requests too, and nobody gets
      its answers. ${shadow.keep_texts ? "Prompts and answers are kept." : "No texts are kept."}</p>`}
    ${run && html`<p class="note" data-testid="run-words">${stateOf(release)}</p>`}
    ${run?.reason && html`<p class="bad">${inWords(run.reason)}</p>`}
    ${schedule && html`<${Steps} schedule=${schedule} run=${run} />`}
    ${may &&
    html`<p class="actions">
      <button type="button" class="danger" data-testid="release-rollback" disabled=${isBusy || isFirst}
        title=${isFirst ? "There is no release before this one." : "To the release before."}
        onClick=${(/** @type {MouseEvent} */ event) => isOneClick(event) && act("/rollback")}>
        Roll back ${of}
      </button>
      ${targets.length > 1 && button("promote", `Promote ${newest.version} of ${of}`, "/promote", { version: newest.version })}
      ${run?.status === "running" && button("pause", "Pause", "/pause")}
      ${run?.status === "paused" && button("resume", "Resume", "/resume")}
      ${shadow && button("shadow-end", `End the shadow ${shadow.version}${alsoEnds(release)}`, "", withoutShadow(release))}
      ${shadow &&
      html`<a class="button" data-testid="shadow-canary" href=${adapterHref(tenant, name) + path`/release/${shadow.version}`}>
        Release ${shadow.version} to a tenth, which ends the shadow</a>`}
    </p>`}
  <//>`;
}

/** Where a watched release stands, and what may follow. @param {any} release */
function stateOf({ run, schedule, targets }) {
  const { candidate, control } = run;
  if (run.status === "promoted") return `All traffic goes to ${candidate}.`;
  if (run.status === "rolled_back") {
    const left = targets.some((/** @type {any} */ one) => one.version === candidate && one.weight > 0);
    return left ? `It went back: ${candidate} gets what the release before gave it.` : `It went back: ${candidate} gets no traffic any more.`;
  }
  if (run.status === "paused") return "Paused: each version keeps its share, and nothing is decided. Resume begins the step again, without the evidence from before.";
  if (schedule) return `Goes on by itself: each step gives ${candidate} more of the traffic than the one before. Pause keeps the shares as they are.`;
  return `The guard watches ${candidate} beside ${control}. Pause keeps the shares as they are, and the guard does not look.`;
}

/** Whether a click is not the second of a double click, which came when the first had changed what the button does. @param {MouseEvent} event */
const isOneClick = (event) => event.detail < 2;

/** @param {any} release */
function alsoEnds(release) {
  if (!isWatched(release)) return "";
  return release.schedule ? " and the schedule" : "; the guard begins anew";
}

/** The same release without its shadow. @param {any} release */
const withoutShadow = (release) => bodyOf({ ...draftOf(release, null), shadow: null }, release);

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

/** What made a revision. @param {any} row */
function howOf(row) {
  if (row.origin === "rollback") return row.restores ? `back to revision ${row.restores}` : "back";
  if (row.origin === "step") return `a step of revision ${row.began}`;
  /** @type {Record<string, string>} */
  const words = { set: "set", promote: "promoted", upload: "first upload", delete: "last version deleted" };
  return words[row.origin] ?? row.origin ?? "unknown";
}

/** Why the server made a revision by itself. @param {any} row @param {any[]} rows */
function reasonOf(row, rows) {
  if (row.reason) return inWords(row.reason);
  if (row.origin !== "step") return "";
  const isGuarded = rows.find((one) => one.revision === row.began)?.guard;
  return isGuarded ? "Its time was over, and the guard found nothing worse." : "Its time was over.";
}

/** @param {{ rows: any[] }} props */
function History({ rows }) {
  if (rows.length === 0) return html`<${Empty}>Nothing was released.<//>`;
  const columns = [
    { title: "Release", cell: (/** @type {any} */ row) => `Revision ${row.revision}` },
    { title: "Since", cell: (/** @type {any} */ row) => html`<${Time} at=${row.created_at} />` },
    { title: "By", cell: (/** @type {any} */ row) => (row.actor === "key" ? `key ${row.actor_key_id}` : row.actor) },
    { title: "How", cell: howOf },
    { title: "Traffic", cell: (/** @type {any} */ row) => html`<${Released} release=${{ ...row, run: null }} />` },
    { title: "State", cell: (/** @type {any} */ row) => row.run && html`<${RunBadge} run=${row.run} />` },
    { title: "Why", cell: (/** @type {any} */ row) => reasonOf(row, rows) },
  ];
  return html`<${Section} title="History">
    <${Table} caption="Releases, the newest first" columns=${columns} rows=${rows} keyOf=${(/** @type {any} */ row) => String(row.revision)}
      testid="release-row" cards />
  <//>`;
}
