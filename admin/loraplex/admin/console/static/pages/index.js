/**
 * The pages by their place after `#/`. A part that begins with `:` is a parameter, which the page gets by its name.
 *
 * @typedef {{ at: string, load: () => Promise<{ default: (params: any) => any }>, nav?: string, testid?: string,
 *   who?: "operator", scope?: string, under?: string }} PageEntry
 * `nav`: its name in the menu; `who`: whose menu has it (all by default); `scope`: what a key needs for it; `under`: the page of the menu that it belongs to, if
 * that is not the first part of its place.
 */

/** @type {PageEntry[]} */
export const pages = [
  { at: "now", nav: "Now", testid: "nav-now", who: "operator", load: () => import("./now.js") },
  { at: "tenants", nav: "Tenant", testid: "nav-tenants", scope: "usage:read", load: () => import("./tenant.js") },
  { at: "adapters", nav: "Adapters", testid: "nav-adapters", scope: "adapters:read", load: () => import("./adapters.js") },
  { at: "adapters/:name", load: () => import("./adapter.js") },
  { at: "adapters/:name/upload", load: () => import("./upload.js") },
  { at: "adapters/:name/release", load: () => import("./release.js") },
  { at: "adapters/:name/release/:candidate", load: () => import("./release.js") },
  { at: "upload", under: "adapters", load: () => import("./upload.js") },
  { at: "playground", nav: "Playground", testid: "nav-playground", scope: "inference", load: () => import("./playground.js") },
  { at: "playground/:adapter", load: () => import("./playground.js") },
  { at: "audit", nav: "Audit", testid: "nav-audit", who: "operator", load: () => import("./audit.js") },
];

/**
 * The page of a place with its parameters.
 * @param {string} hash As `location.hash`.
 * @returns {{ page: PageEntry, params: Record<string, string> } | null}
 */
export function pageAt(hash) {
  const given = hash.replace(/^#\/?/, "").split("/").map(decode);
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

/** @param {string} part */
function decode(part) {
  try {
    return decodeURIComponent(part);
  } catch {
    return part;
  }
}
