/**
 * The address of what is shown, after `#`: a path, and after `?` what the page filters by. A link to it opens the same in another
 * tab, after the sign-in.
 */
import { computed, signal } from "./html.js";

const hash = signal(location.hash);
window.addEventListener("hashchange", () => (hash.value = location.hash));

/** The parts of the path. */
export const place = computed(() => hash.value.replace(/^#\/?/, "").split("?")[0]);

/** What the page filters by: its values by their names. */
export const query = computed(() => Object.fromEntries(new URLSearchParams(hash.value.split("?")[1] ?? "")));

/**
 * To another address, at once: the browser tells of it later.
 * @param {string} address After `#/`. @param {boolean} [isInPlace] Back passes over the address that was shown.
 */
export function show(address, isInPlace = false) {
  if (isInPlace) history.replaceState(null, "", `#/${address}`);
  else location.hash = `#/${address}`;
  hash.value = location.hash;
}

/** Filter by another value. The address changes in its place: Back leaves the page. @param {string} name @param {string} value */
export function setQuery(name, value) {
  const all = new URLSearchParams({ ...query.value, [name]: value });
  if (!value) all.delete(name);
  show(all.size ? `${place.value}?${all}` : place.value, true);
}
