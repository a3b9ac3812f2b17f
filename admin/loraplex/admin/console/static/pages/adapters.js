/** Adapters: all of a tenant's by name, with a search. */
import { api, path } from "../lib/api.js";
import { html, useState } from "../lib/html.js";
import { place, query, setQuery } from "../lib/place.js";
import { usePoll } from "../lib/poll.js";
import { mayCall } from "../lib/store.js";
import { Badge, Field, Loaded, num, Page, Pager, percent, Table, Time } from "../lib/ui.js";

const ROWS = 50;
const NAME_PART = /^[a-z0-9._-]{0,63}$/;

/** @param {string} tenant */
const columns = (tenant) => [
  { title: "Adapter", cell: (/** @type {any} */ row) => html`<a href=${adapterHref(tenant, row.name)}>${row.name}</a>` },
  { title: "Released", cell: (/** @type {any} */ row) => html`<${Released} release=${row.release} />` },
  { title: "Newest", cell: (/** @type {any} */ row) => row.latest_version },
  { title: "Versions", number: true, cell: (/** @type {any} */ row) => num(row.num_versions) },
  { title: "Created", cell: (/** @type {any} */ row) => html`<${Time} at=${row.created_at} />` },
];

/** @param {string} tenant @param {string} name */
export const adapterHref = (tenant, name) => "#/" + path`tenants/${tenant}/adapters/${name}`;

/** @param {string} tenant @param {string} name */
export const releaseHref = (tenant, name) => `${adapterHref(tenant, name)}/release`;

/** The address of the last minutes' figures, for operators. @param {Record<string, string>} chosen What Now filters by. */
export const figuresHref = (chosen) => `#/now?${new URLSearchParams(chosen)}`;

/** What takes the traffic of a name, and what answers unseen. @param {{ release: any }} props */
export function Released({ release }) {
  if (!release || release.targets.length === 0) return html`<span class="note">nothing</span>`;
  const sum = release.targets.reduce((/** @type {number} */ all, /** @type {any} */ one) => all + one.weight, 0);
  const parts = release.targets.map((/** @type {any} */ one) => `${one.version} ${Math.round((100 * one.weight) / (sum || 1))}%`);
  if (release.shadow) parts.push(`shadow ${release.shadow.version} of ${percent(release.shadow.sample)}`);
  return html`${parts.join(", ")} ${release.run && html`<${RunBadge} run=${release.run} />`}`;
}

/** @param {{ run: any }} props */
export function RunBadge({ run }) {
  const kind = { running: "busy", paused: "off", promoted: "good", rolled_back: "bad" }[/** @type {string} */ (run.status)];
  return html`<${Badge} kind=${kind ?? "off"}>${run.status.replace("_", " ")}<//>`;
}

/** @param {{ tenant: string }} props */
export default function Adapters({ tenant }) {
  const here = place.value;
  const search = query.value.search ?? "";
  const [cursor, setCursor] = useState(/** @type {string | null} */ (null));
  const part = search.trim().toLowerCase();
  const isPart = NAME_PART.test(part);
  const poll = usePoll(
    (signal) => (isPart ? api.get(path`tenants/${tenant}/adapters`, { search: part, cursor, limit: ROWS }, { signal }) : nothing()),
    [part, cursor],
  );
  const upload = mayCall("adapters:write") && html`<a class="button" data-testid="nav-upload" href=${"#/" + path`tenants/${tenant}/upload`}>Upload</a>`;
  return html`<${Page} title=${`Adapters of ${tenant}`} actions=${upload}>
    <div class="form">
      <${Field} label="Search" hint=${isPart ? "" : "Names have a-z, 0-9, '.', '_' and '-'."}>
        <input type="search" data-testid="adapter-search" value=${search} maxlength="63" spellcheck=${false} autocomplete="off"
          onInput=${(/** @type {any} */ event) => (setCursor(null), setQuery(here, "search", event.target.value))} />
      <//>
    </div>
    <${Loaded} poll=${poll}>
      ${(/** @type {any} */ page) => html`<${Table} caption="Adapters" columns=${columns(tenant)} rows=${page.data} testid="adapter-row"
          keyOf=${(/** @type {any} */ row) => row.name} empty=${part ? "No name has this part." : "No adapters yet."} />
        <${Pager} what="adapters" first=${cursor === null} next=${page.next_cursor}
          onFirst=${() => setCursor(null)} onNext=${() => setCursor(page.next_cursor)} />`}
    <//>
  <//>`;
}

/** @returns {Promise<{ data: any[], next_cursor: string | null }>} */
const nothing = async () => ({ data: [], next_cursor: null });
