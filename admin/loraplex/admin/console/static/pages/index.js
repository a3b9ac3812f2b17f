/**
 * The pages by their place after `#/`. A part that begins with `:` is a parameter, which the page gets by its name.
 *
 * @typedef {{ at: string, load: () => Promise<{ default: (params: any) => any }>, nav?: string, testid?: string,
 *   who?: "operator" | "key", scope?: string, under?: string, keeps?: boolean }} PageEntry
 * `nav`: its name in the menu; `who`: whose menu has it (all by default; what is "operator" is a key's not at all); `scope`: what a key needs for it; `under`: the page of
 * the menu that it belongs to, if that is not the part after the tenant; `keeps`: what was entered stays for another tenant.
 */
import { path } from "../lib/api.js";

/** @type {PageEntry[]} */
export const pages = [
  { at: "now", nav: "Now", testid: "nav-now", who: "operator", load: () => import("./now.js") },
  { at: "needs", nav: "Needs you", testid: "nav-needs", who: "operator", load: () => import("./needs.js") },
  { at: "tenants/:tenant", nav: "Tenant", testid: "nav-tenants", scope: "usage:read", load: () => import("./tenant.js") },
  { at: "all-tenants", who: "operator", under: "tenants", load: () => import("./all_tenants.js") },
  { at: "tenants/:tenant/adapters", nav: "Adapters", testid: "nav-adapters", who: "key", scope: "adapters:read", load: () => import("./adapters.js") },
  { at: "all-adapters", nav: "Adapters", testid: "nav-adapters", who: "operator", under: "adapters", load: () => import("./all_adapters.js") },
  { at: "tenants/:tenant/adapters/:name", load: () => import("./adapter.js") },
  { at: "tenants/:tenant/adapters/:name/upload", load: () => import("./upload.js") },
  { at: "tenants/:tenant/adapters/:name/release", load: () => import("./release.js") },
  { at: "tenants/:tenant/adapters/:name/release/:candidate", load: () => import("./release.js") },
  { at: "tenants/:tenant/upload", under: "adapters", keeps: true, load: () => import("./upload.js") },
  { at: "tenants/:tenant/playground", nav: "Playground", testid: "nav-playground", scope: "inference", load: () => import("./playground.js") },
  { at: "tenants/:tenant/playground/:adapter", load: () => import("./playground.js") },
  { at: "playground", load: () => import("./playground.js") },
  { at: "tenants/:tenant/batches", nav: "Batches", testid: "nav-batches", who: "key", scope: "inference", load: () => import("./batches.js") },
  { at: "all-batches", nav: "Batches", testid: "nav-batches", who: "operator", under: "batches", load: () => import("./batches.js") },
  { at: "requests", nav: "Requests", testid: "nav-requests", scope: "usage:read", load: () => import("./requests.js") },
  { at: "audit", nav: "Audit", testid: "nav-audit", who: "operator", load: () => import("./audit.js") },
];

/** The part of a place that names its page of the menu: the one after the tenant, if there is one. @param {PageEntry} page */
export const menuPart = ({ at, under }) => under ?? at.split("/")[2] ?? at.split("/")[0];

/**
 * The page of a place with its parameters.
 * @param {string} place After `#/`.
 * @returns {{ page: PageEntry, params: Record<string, string> } | null}
 */
export function pageAt(place) {
  const given = place.split("/").map(decode);
  for (const page of pages) {
    const parts = page.at.split("/");
    if (parts.length !== given.length) continue;
    /** @type {Record<string, string>} */
    const params = {};
    const fits = parts.every((part, i) => {
      if (!part.startsWith(":")) return part === given[i];
      params[part.slice(1)] = given[i];
      return given[i] !== "";
    });
    if (fits) return { page, params };
  }
  return null;
}

/**
 * A tenant's place from one that names no tenant, such as `adapters/support`; null where that is no page.
 * @param {string} place @param {string} tenant
 */
export function ofTenant(place, tenant) {
  const found = path`tenants/${tenant}` + (place === "tenants" ? "" : `/${place}`);
  return pageAt(found) && found;
}

/**
 * The place for another tenant: of what only the one has, such as an adapter, the list that it is in.
 * @param {string} place @param {string} tenant
 */
export function forTenant(place, tenant) {
  const parts = pageAt(place)?.page.at.split("/").slice(2);
  if (!parts) return ofTenant(place, tenant) ?? "";
  const until = parts.findIndex((part) => part.startsWith(":"));
  return [path`tenants/${tenant}`, ...(until < 0 ? parts : parts.slice(0, until))].join("/");
}

/** @param {string} part */
function decode(part) {
  try {
    return decodeURIComponent(part);
  } catch {
    return part;
  }
}
