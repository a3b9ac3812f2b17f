/** One adapter: its versions, where they are, their pins and reports. */
import { api, path } from "../lib/api.js";
import { download } from "../lib/download.js";
import { html, useState } from "../lib/html.js";
import { usePoll } from "../lib/poll.js";
import { isOperator, mayCall } from "../lib/store.js";
import { Badge, bytes, Empty, ErrorBox, Loaded, Page, seconds, Section, Table, Time, Words } from "../lib/ui.js";
import { adapterHref, figuresHref, Released, releaseHref } from "./adapters.js";
import { Pooled } from "./classes.js";
import { Report } from "./report.js";
import { requestsHref } from "./requests.js";
import { Tags } from "./tags.js";

const EVERY_MS = 5000;
const MAX_VERSIONS = 500;

/** @type {Record<string, "good" | "busy" | "bad" | "off">} */
const KINDS = { ready: "good", validating: "busy", rejected: "bad", corrupt: "bad", incompatible: "off", deleted: "off", retired: "off", lost: "bad" };

/** @param {{ tenant: string, name: string }} props */
export default function Adapter({ tenant, name }) {
  const [shown, setShown] = useState(/** @type {string | null} */ (null));
  const [error, setError] = useState(/** @type {any} */ (null));
  const poll = usePoll((signal) => read(tenant, name, signal), [tenant, name], EVERY_MS);

  /** @param {() => Promise<any>} act */
  async function run(act) {
    setError(null);
    try {
      await act();
    } catch (found) {
      setError(found);
    }
    poll.reload();
  }

  return html`<${Page} title=${`Adapter ${tenant}/${name}`} actions=${html`<${Links} tenant=${tenant} name=${name} />`}>
    ${error && html`<${ErrorBox} error=${error} />`}
    <${Loaded} poll=${poll} onward=${html`<${AllAdapters} tenant=${tenant} />`}>
      ${(/** @type {any} */ found) => html`
        <p>Traffic: <${Released} release=${found.adapter.release} /></p>
        <${Tags} tenant=${tenant} name=${name} tags=${found.adapter.tags} onSaved=${poll.reload} />
        <${Versions} tenant=${tenant} name=${name} versions=${found.versions} cache=${found.cache} run=${run} onReport=${setShown} />
        <${Reported} version=${chosen(found.versions, shown)} />
      `}
    <//>
  <//>`;
}

/** A way on from an adapter that is not there. @param {{ tenant: string }} props */
export const AllAdapters = ({ tenant }) =>
  html`<p><a href=${"#/" + path`tenants/${tenant}/adapters`} data-testid="all-adapters">All adapters of ${tenant}</a></p>`;

/** @param {string} tenant @param {string} name @param {AbortSignal} signal */
async function read(tenant, name, signal) {
  const options = { signal };
  const [adapter, versions, cache] = await Promise.all([
    api.get(path`tenants/${tenant}/adapters/${name}`, {}, options),
    api.list(path`tenants/${tenant}/adapters/${name}/versions`, {}, { signal, most: MAX_VERSIONS }),
    isOperator.value ? residency(tenant, name, signal) : Promise.resolve(null),
  ]);
  return { adapter, versions: versions.reverse(), cache };
}

/**
 * Rows of the cache by version; none while the engine is away.
 * @param {string} tenant @param {string} name @param {AbortSignal} signal
 */
async function residency(tenant, name, signal) {
  try {
    const rows = await api.list("cache", { tenant, adapter: name }, { signal, most: MAX_VERSIONS });
    return new Map(rows.map((row) => [row.version, row]));
  } catch {
    return null;
  }
}

/** The version whose report is shown: the chosen one, else the newest. @param {any[]} versions @param {string | null} shown */
function chosen(versions, shown) {
  return versions.find((one) => one.version === shown) ?? versions.find((one) => !["deleted", "retired", "lost"].includes(one.state)) ?? null;
}

/** @param {{ tenant: string, name: string }} props */
function Links({ tenant, name }) {
  const here = adapterHref(tenant, name);
  const write = mayCall("adapters:write");
  return html`<a class="button" data-testid="nav-release" href=${releaseHref(tenant, name)}>Release</a>
    ${isOperator.value && html`<a class="button" data-testid="see-figures" href=${figuresHref({ tenant, adapter: name })}>Figures</a>`}
    ${write && html`<a class="button" href="${here}/upload">Upload a version</a>`}
    ${mayCall("usage:read") && html`<a class="button" data-testid="nav-adapter-requests" href=${requestsHref({ tenant, adapter: name })}>Requests</a>`}
    <a class="button" href=${"#/" + path`tenants/${tenant}/playground/${name}`}>Playground</a>`;
}

/**
 * @param {{ tenant: string, name: string, versions: any[], cache: Map<string, any> | null, run: (act: () => Promise<any>) => Promise<void>,
 *   onReport: (version: string) => void }} props
 */
function Versions({ tenant, name, versions, cache, run, onReport }) {
  const of = (/** @type {any} */ row) => cache?.get(row.version);
  const columns = [
    { title: "Version", cell: (/** @type {any} */ row) => html`<button type="button" class="link" onClick=${() => onReport(row.version)}>${row.version}</button>` },
    { title: "State", cell: (/** @type {any} */ row) => html`<${Badge} kind=${KINDS[row.state] ?? "off"}>${row.state}<//>` },
    { title: "Rank", number: true, cell: (/** @type {any} */ row) => row.rank },
    { title: "Size", number: true, cell: (/** @type {any} */ row) => bytes(row.bytes) },
    ...(cache
      ? [
          { title: "Where", cell: (/** @type {any} */ row) => html`<${Where} row=${of(row)} />` },
          { title: "Load", number: true, cell: (/** @type {any} */ row) => loadSeconds(of(row)) },
        ]
      : []),
    { title: "Created", cell: (/** @type {any} */ row) => html`<${Time} at=${row.created_at} />` },
    { title: "", cell: (/** @type {any} */ row) => html`<${Actions} tenant=${tenant} name=${name} version=${row} run=${run} />` },
  ];
  return html`<${Section} title="Versions" note=${cache ? "" : "Where a version is in memory: only operators see it."}>
    <${Words} of=${cache ? ["tier", "pin"] : ["pin"]} />
    <${Table} caption="Versions" columns=${columns} rows=${versions} keyOf=${(/** @type {any} */ row) => row.version}
      testid="version-row" empty="No versions." />
  <//>`;
}

/** @param {{ row: any }} props */
function Where({ row }) {
  if (!row) return html`<span class="note">–</span>`;
  const tier = row.residency[0];
  const kind = { device: "good", host: "busy", disk: "off" }[/** @type {string} */ (tier)];
  return html`<${Badge} kind=${kind}>${row.loading ? "loading" : tier}<//>
    ${row.replicas.length > 0 && html` <span class="note">${row.replicas.join(", ")}</span>`}
    ${row.error && html` <span class="bad">${row.error}</span>`}`;
}

/** The last load by stage: disk has the parts that follow it. @param {any} row */
function loadSeconds(row) {
  const stages = Object.entries(row?.load_seconds ?? {});
  if (stages.length === 0) return "–";
  const all = (row.load_seconds.disk ?? 0) + (row.load_seconds.copy ?? 0);
  return html`<span title=${stages.map(([stage, value]) => `${stage} ${seconds(value)}`).join(", ")}>${seconds(all)}</span>`;
}

/** @param {{ tenant: string, name: string, version: any, run: (act: () => Promise<any>) => Promise<void> }} props */
function Actions({ tenant, name, version, run }) {
  const [isLoading, setLoading] = useState(false);
  const where = path`tenants/${tenant}/adapters/${name}/versions/${version.version}`;
  const isLiving = !["deleted", "rejected", "retired", "lost"].includes(version.state);
  if (!isLiving) return null;
  const of = `${name}@${version.version}`;
  const pin = version.pinned ? "Unpin" : "Pin";
  async function onDownload() {
    setLoading(true);
    await run(() => download(`${where}/archive`, `${name}-${version.version}.tar`, version.bytes));
    setLoading(false);
  }
  return html`<span class="actions">
    ${mayCall("adapters:write") &&
    html`<button type="button" data-testid="pin" aria-label="${pin} ${of}"
      onClick=${() => run(() => api.send(version.pinned ? "DELETE" : "PUT", `${where}/pin`))}>
      ${pin}
    </button>`}
    <button type="button" data-testid="download" aria-label="Download ${of}"
      disabled=${isLoading} onClick=${onDownload}>
      ${isLoading ? "Loading…" : "Download"}
    </button>
  </span>`;
}

/** @param {{ version: any }} props */
function Reported({ version }) {
  if (!version) return html`<${Empty}>No version has a report.<//>`;
  return html`<${Section} title="Report of ${version.version}" note=${`SHA-256 ${version.digest}`}>
    <p>On ${version.targets.join(", ")}, for the base <code>${version.base_fingerprint.slice(0, 12)}</code>.</p>
    <${Pooled} head=${version.head} embedding=${version.embedding} />
    <${Report} report=${version.report} />
  <//>`;
}
