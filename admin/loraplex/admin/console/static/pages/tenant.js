/** Tenant: limits and what is used of them, usage by day and adapter or key, keys, its end. */
import { api, path } from "../lib/api.js";
import { html } from "../lib/html.js";
import { budgetName, limitName, limitShown, setLimits } from "../lib/limits.js";
import { usePoll } from "../lib/poll.js";
import { caller, isOperator } from "../lib/store.js";
import * as ui from "../lib/ui.js";
import { Keys } from "./keys.js";
import { Suspend, Suspended } from "./suspension.js";
import { TenantEditor } from "./tenant_editor.js";
import { Removal } from "./tenant_removal.js";
import { Usage } from "./usage.js";

const EVERY_MS = 5000;

/** @param {{ tenant: string }} props */
export default function Tenant({ tenant: id }) {
  const poll = usePoll((signal) => readLimits(id, signal), [id], EVERY_MS);
  const all = isOperator.value && html`<a class="button" data-testid="all-tenants" href="#/all-tenants">All tenants</a>`;
  return html`<${ui.Page} title=${`Tenant ${id}`} actions=${all}>
    ${poll.data === null && poll.error?.status === 404
      ? html`<${ui.ErrorBox} error=${poll.error} /><p>Choose another tenant above.</p>`
      : html`<${Limits} poll=${poll} />
          <${Usage} id=${id} />
          ${isOperator.value ? html`<${Keys} id=${id} />
              ${poll.data && !poll.data.tenant.suspended_at && html`<${Suspend} tenant=${poll.data.tenant} onSaved=${poll.reload} />`}
              <${Removal} id=${id} />` : html`<${OwnKey} />`}`}
  <//>`;
}

/**
 * The tenant, and what is used of its limits as far as the caller may see it.
 * @param {string} id @param {AbortSignal} signal
 */
async function readLimits(id, signal) {
  const found = await api.get(path`tenants/${id}`, {}, { signal });
  /** @type {Record<string, number>} */
  const used = { max_adapters: found.stored.adapters, max_adapter_bytes: found.stored.bytes };
  if (isOperator.value) {
    const { stats } = await api.get("engine", {}, { signal });
    const sequences = stats?.tenants[id];
    if (stats) used.max_sequences = (sequences?.running ?? 0) + (sequences?.waiting ?? 0);
    const { device = 0, host = 0 } = stats?.tenant_bytes[id] ?? {};
    if (stats) Object.assign(used, { device_bytes_max: device, device_bytes_reserved: device, host_bytes_max: host });
  }
  return { tenant: found, used };
}

/** @param {{ poll: import("../lib/poll.js").Poll<any> }} props */
function Limits({ poll }) {
  return html`<${ui.Section} title="Limits">
    <${ui.Loaded} poll=${poll}>${(/** @type {any} */ { tenant: found, used }) => html`
      ${isOperator.value && found.suspended_at && html`<${Suspended} tenant=${found} onSaved=${poll.reload} />`}
      <${ui.Tiles}>
        <${ui.Tile} name="Name" value=${found.display_name ?? found.id} testid="tenant-name" />
        <${ui.Tile} name="Weight" value=${ui.num(found.weight)} note="of the engine while others wait" />
        <${ui.Tile} name="Since" value=${html`<${ui.Time} at=${found.created_at} />`} />
      <//>
      ${isOperator.value && html`<${TenantEditor} key=${found.id} tenant=${found} onSaved=${poll.reload} />`}
      <${Budget} budget=${found.budget} />
      <${ui.Words} of=${["reserve"]} />
      ${setLimits(found.limits).map(([name, limit]) => html`<${Limit} key=${name} name=${name} limit=${limit} used=${used[name]} />`)}
      ${Object.values(found.limits).every((value) => value === null) && html`<${ui.Empty}>No limit is set.<//>`}`}<//>
  <//>`;
}

/** @param {{ budget: any }} props Of a tenant or a key. */
export function Budget({ budget }) {
  if (!budget) return null;
  return html`<${ui.Bar} testid="budget" name=${budgetName(budget)}
    used=${budget.spent} held=${budget.held} limit=${budget.limit}
    note=${budget.ends_at && html`Begins again on <${ui.Time} at=${budget.ends_at} />.`} />`;
}

/** A bar where what is used is known, else the limit alone. @param {{ name: string, limit: number, used?: number }} props */
function Limit({ name, limit, used }) {
  const show = (/** @type {number} */ value) => limitShown(name, value);
  if (used === undefined) {
    return html`<div class="bar bar-text" data-testid=${name}><span>${limitName(name)}</span><span>at most ${show(limit)}</span></div>`;
  }
  return html`<${ui.Bar} testid=${name} name=${limitName(name)} used=${used} limit=${limit} show=${show} />`;
}

/** A key sees itself; an operator makes keys. */
function OwnKey() {
  const key = caller.value?.key;
  return html`<${ui.Section} title="This key" note="An operator makes, rotates and revokes keys.">
    <${ui.Tiles}>
      <${ui.Tile} name="Key" value=${key.name ?? key.id} note=${key.id} />
      <${ui.Tile} name="Scopes" value=${key.scopes.join(", ")} testid="own-scopes" />
      <${ui.Tile} name="Ends" value=${html`<${ui.Time} at=${key.expires_at} />`} />
      <${ui.Tile} name="Models" value=${key.models ? key.models.join(", ") : "all"} />
    <//>
    <${Budget} budget=${key.budget} />
  <//>`;
}
