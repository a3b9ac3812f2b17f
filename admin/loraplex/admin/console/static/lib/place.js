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

/** Filter by another value. The address changes in its place: Back leaves the page. @param {string} name @param {string} value */
export function setQuery(name, value) {
  const all = new URLSearchParams({ ...query.value, [name]: value });
  if (!value) all.delete(name);
  const [path] = hash.value.split("?");
  history.replaceState(null, "", all.size ? `${path}?${all}` : path);
  hash.value = location.hash;
}
