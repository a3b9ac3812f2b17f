/** Adapters: all of a tenant's by name, with a search. */
import { api, path } from "../lib/api.js";
import { html, useState } from "../lib/html.js";
import { usePoll } from "../lib/poll.js";
import { mayCall, ofTenant, tenant } from "../lib/store.js";
import { TenantPicker } from "../lib/tenant_picker.js";
import { Badge, Empty, Field, Loaded, num, Page, Pager, Table, Time } from "../lib/ui.js";

const ROWS = 50;
const NAME_PART = /^[a-z0-9._-]{0,63}$/;

const COLUMNS = [
  { title: "Adapter", cell: (/** @type {any} */ row) => html`<a href=${adapterHref(row.name)}>${row.name}</a>` },
  { title: "Released", cell: (/** @type {any} */ row) => html`<${Released} release=${row.release} />` },
  { title: "Newest", cell: (/** @type {any} */ row) => row.latest_version },
  { title: "Versions", number: true, cell: (/** @type {any} */ row) => num(row.num_versions) },
  { title: "Created", cell: (/** @type {any} */ row) => html`<${Time} at=${row.created_at} />` },
];

/** @param {string} name */
export const adapterHref = (name) => "#" + path`/adapters/${name}`;

/** What takes the traffic of a name. @param {{ release: any }} props */
export function Released({ release }) {
  if (!release || release.targets.length === 0) return html`<span class="note">nothing</span>`;
  const sum = release.targets.reduce((/** @type {number} */ all, /** @type {any} */ one) => all + one.weight, 0);
  const parts = release.targets.map((/** @type {any} */ one) => `${one.version} ${Math.round((100 * one.weight) / (sum || 1))}%`);
  return html`${parts.join(", ")} ${release.run && html`<${RunBadge} run=${release.run} />`}`;
}

/** @param {{ run: any }} props */
export function RunBadge({ run }) {
  const kind = { running: "busy", paused: "off", promoted: "good", rolled_back: "bad" }[/** @type {string} */ (run.status)];
  return html`<${Badge} kind=${kind ?? "off"}>${run.status.replace("_", " ")}<//>`;
}

export default function Adapters() {
  const [search, setSearch] = useState("");
  const [cursor, setCursor] = useState(/** @type {string | null} */ (null));
  const part = search.trim().toLowerCase();
  const isPart = NAME_PART.test(part);
  const asked = isPart && tenant.value;
  const poll = usePoll(
    (signal) => (asked ? api.get(ofTenant("/adapters"), { search: part, cursor, limit: ROWS }, { signal }) : nothing()),
    [tenant.value, part, cursor],
  );
  const upload = mayCall("adapters:write") && html`<a class="button" data-testid="nav-upload" href="#/upload">Upload</a>`;
  return html`<${Page} title="Adapters" actions=${upload}>
    <div class="form">
      <${TenantPicker} />
      <${Field} label="Search" hint=${isPart ? "" : "Names have a-z, 0-9, '.', '_' and '-'."}>
        <input type="search" data-testid="adapter-search" value=${search} maxlength="63" spellcheck=${false} autocomplete="off"
          onInput=${(/** @type {any} */ event) => (setCursor(null), setSearch(event.target.value))} />
      <//>
    </div>
    ${tenant.value
      ? html`<${Loaded} poll=${poll}>
          ${(/** @type {any} */ page) => html`<${Table} caption="Adapters" columns=${COLUMNS} rows=${page.data} testid="adapter-row"
              keyOf=${(/** @type {any} */ row) => row.name} empty=${part ? "No name has this part." : "No adapters yet."} />
            <${Pager} what="adapters" first=${cursor === null} next=${page.next_cursor}
              onFirst=${() => setCursor(null)} onNext=${() => setCursor(page.next_cursor)} />`}
        <//>`
      : html`<${Empty}>Choose a tenant.<//>`}
  <//>`;
}

/** @returns {Promise<{ data: any[], next_cursor: string | null }>} */
const nothing = async () => ({ data: [], next_cursor: null });
