/** Upload: an adapter's files by drag and drop, with progress, and the server's report. */
import { ApiError, path } from "../lib/api.js";
import { bytes } from "../lib/format.js";
import { html, useEffect, useRef, useState } from "../lib/html.js";
import { caller, mayCall } from "../lib/store.js";
import { ErrorBox, Field, Page, Section } from "../lib/ui.js";
import { choose, CONFIG, droppedFiles, send, TENSORS } from "../lib/upload.js";
import { adapterHref } from "./adapters.js";
import { Report } from "./report.js";

const NAME = /^[a-z0-9][a-z0-9._-]{0,62}$/;

/** @param {{ tenant: string, name?: string }} props `name`: of the adapter whose next version it is; else it is asked. */
export default function Upload({ tenant, name: given = "" }) {
  const [name, setName] = useState(given);
  const [chosen, setChosen] = useState(/** @type {import("../lib/upload.js").Chosen | null} */ (null));
  const [sending, setSending] = useState(/** @type {{ sent: number, total: number } | null} */ (null));
  const [made, setMade] = useState(/** @type {any} */ (null));
  const [error, setError] = useState(/** @type {any} */ (null));
  const stop = useRef(/** @type {AbortController | null} */ (null));
  const newest = useRef(/** @type {Promise<any> | null} */ (null));
  useEffect(() => {
    // What was chosen is for another tenant too; what became of it is not.
    stop.current?.abort();
    setMade(null);
    setError(null);
  }, [tenant]);

  /** @param {Promise<import("../lib/upload.js").Dropped[]>} files */
  async function onFiles(files) {
    newest.current = files;
    setMade(null);
    setError(null);
    const base = caller.value?.base;
    const caps = { maxBytes: caller.value?.max_upload_bytes ?? null, maxRank: base?.max_adapter_rank ?? null };
    try {
      const found = await choose(await files, caps);
      if (newest.current === files) setChosen(found);
    } catch (/** @type {any} */ refused) {
      if (newest.current !== files) return;
      setChosen(null);
      setError(new ApiError(0, "unreadable", `The browser cannot read a file: ${refused.message}`));
    }
  }

  /** @param {Event} event */
  async function onSubmit(event) {
    event.preventDefault();
    if (!chosen) return;
    stop.current = new AbortController();
    setMade(null);
    setError(null);
    setSending({ sent: 0, total: 1 });
    try {
      const where = path`tenants/${tenant}/adapters/${name}/versions`;
      const answer = await send(where, chosen.files, (sent, total) => setSending({ sent, total }), stop.current.signal);
      setMade(answer.body);
      setChosen(null);
    } catch (found) {
      if (found instanceof ApiError) setError(found);
    } finally {
      setSending(null);
    }
  }

  const may = mayCall("adapters:write");
  const isReady = may && chosen !== null && chosen.faults.length === 0 && NAME.test(name) && sending === null;
  return html`<${Page} title=${given ? `Upload a version of ${tenant}/${given}` : `Upload an adapter for ${tenant}`}>
    ${may ? null : html`<p class="error" role="alert">This key lacks the scope adapters:write.</p>`}
    <form class="upload" onSubmit=${onSubmit}>
      <div class="form">
        <${Field} label="Adapter" hint=${NAME.test(name) || !name ? "" : "1 to 63 of a-z, 0-9, '.', '_' and '-', a letter or digit first."}>
          <input data-testid="adapter-name" value=${name} readonly=${given !== ""} maxlength="63" spellcheck=${false}
            autocomplete="off" onInput=${(/** @type {any} */ event) => setName(event.target.value)} />
        <//>
      </div>
      <${DropZone} onFiles=${onFiles} isBusy=${sending !== null} />
      ${chosen ? html`<${Files} chosen=${chosen} />` : null}
      <p class="actions">
        <button class="primary" data-testid="upload-send" disabled=${!isReady}>Upload</button>
        ${sending ? html`<button type="button" onClick=${() => stop.current?.abort()}>Stop</button>` : null}
      </p>
    </form>
    <div aria-live="polite">${sending ? html`<${Progress} ...${sending} />` : null}</div>
    ${error ? html`<${ErrorBox} error=${error} /><${Refused} problem=${error.body} />` : null}
    ${made ? html`<${Made} tenant=${tenant} version=${made} />` : null}
  <//>`;
}

/** @param {{ onFiles: (files: Promise<import("../lib/upload.js").Dropped[]>) => void, isBusy: boolean }} props */
function DropZone({ onFiles, isBusy }) {
  const [isOver, setOver] = useState(false);
  useEffect(() => {
    // A file that misses the zone would else be opened in place of the page, and end the session.
    const stay = (/** @type {Event} */ event) => event.preventDefault();
    for (const event of ["dragover", "drop"]) window.addEventListener(event, stay);
    return () => {
      for (const event of ["dragover", "drop"]) window.removeEventListener(event, stay);
    };
  }, []);
  /** @param {DragEvent} event */
  function onDrop(event) {
    event.preventDefault();
    setOver(false);
    if (!isBusy) onFiles(droppedFiles(event.dataTransfer));
  }
  /** @param {any} event */
  function onChange({ target }) {
    const files = [...target.files].map((file) => ({ file, isOfFolder: false }));
    // Else the browser says nothing of a choice of the same files again, which may have been mended.
    target.value = "";
    onFiles(Promise.resolve(files));
  }
  return html`<label data-testid="drop-zone"
    class=${isOver ? "drop over" : "drop"}
    onDragOver=${(/** @type {Event} */ event) => (event.preventDefault(), setOver(true))}
    onDragLeave=${() => setOver(false)}
    onDrop=${onDrop}
  >
    <span>Drop <code>${CONFIG}</code> and <code>${TENSORS}</code> here, the folder that has them, or one archive of them. Or choose
      files:</span>
    <input type="file" multiple data-testid="upload" disabled=${isBusy} aria-label="Files of the adapter"
      onChange=${onChange} />
  </label>`;
}

/** @param {{ chosen: import("../lib/upload.js").Chosen }} props */
function Files({ chosen }) {
  return html`<ul class="checks" data-testid="chosen">
    ${[...chosen.files].map(([part, file]) => html`<li class="good"><b>${part}</b> <span>${file.name}, ${bytes(file.size)}</span></li>`)}
    ${chosen.faults.map((fault) => html`<li class="bad" role="alert">${fault}</li>`)}
    ${chosen.leftOut.length > 0 && html`<li class="note">Not sent: ${chosen.leftOut.join(", ")}</li>`}
  </ul>`;
}

/** @param {{ sent: number, total: number }} props */
function Progress({ sent, total }) {
  const isSent = sent >= total;
  return html`<div class="progress">
    <progress max=${total} value=${isSent ? undefined : sent} aria-label="Upload"></progress>
    <p>${isSent ? "All is sent. The server checks the adapter's numbers." : `${bytes(sent)} of ${bytes(total)} sent.`}</p>
  </div>`;
}

/** The report of a refused adapter. @param {{ problem: any }} props */
function Refused({ problem }) {
  if (!problem?.report) return null;
  return html`<${Section} title="Report"><${Report} report=${problem.report} isRefused=${true} /><//>`;
}

/** @param {{ tenant: string, version: any }} props */
function Made({ tenant, version }) {
  const ofAdapter = adapterHref(tenant, version.name);
  const isFirst = version.version === "v1";
  return html`<section class="card" data-testid="uploaded">
    <h2>${version.name}@${version.version} is ${version.state}</h2>
    <p>
      Of the tenant ${tenant}. Rank ${version.rank} on ${version.targets.join(", ")}, ${bytes(version.bytes)}.
      ${isFirst ? " The first version of a name serves at once." : " It takes no traffic until it is released."}
    </p>
    <p class="actions">
      ${isFirst
        ? null
        : html`<a class="button primary" data-testid="canary" href="${ofAdapter}/release/${version.version}">
            Release it to a tenth
          </a>`}
      <a class="button" href=${ofAdapter}>Show the adapter</a>
    </p>
    <${Report} report=${version.report} />
  </section>`;
}
