/**
 * The address of what is shown, after `#`: a path, and after `?` what the page filters by. A link to it opens the same in another
 * tab, after the sign-in.
 */
import { computed, signal } from "./html.js";

const hash = signal(location.hash);
window.addEventListener("hashchange", () => (hash.value = location.hash));

/** @param {string} from */
const placeOf = (from) => from.replace(/^#\/?/, "").split("?")[0];

/** The parts of the path. */
export const place = computed(() => placeOf(hash.value));

/** What stands after `?`, as it stands there. */
export const rest = computed(() => hash.value.split("?")[1] ?? "");

/** What the page filters by: its values by their names. */
export const query = computed(() => Object.fromEntries(new URLSearchParams(rest.value)));

/** To another address, at once: the browser tells of it later. @param {string} address After `#/`. */
export function show(address) {
  location.hash = `#/${address}`;
  hash.value = location.hash;
}

/**
 * To another address in place of one, which Back passes over; nothing if a link has led elsewhere meanwhile.
 * @param {string} from The place that is left. @param {string} address After `#/`.
 */
export function replace(from, address) {
  if (placeOf(location.hash) === from) history.replaceState(null, "", `#/${address}`);
  hash.value = location.hash;
}

/**
 * Filter by another value. The address changes in its place: Back leaves the page.
 * @param {string} from The place of the page: a field that is removed with its page tells its text when the next one is there.
 * @param {string} name @param {string} value
 */
export function setQuery(from, name, value) {
  const all = new URLSearchParams({ ...query.value, [name]: value });
  if (!value) all.delete(name);
  replace(from, all.size ? `${from}?${all}` : from);
}
