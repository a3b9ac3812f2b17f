/** What the pages share: who is signed in, the tenant that was shown last, the theme. */
import { api, ApiError, onSecretRefused, setSecret } from "./api.js";
import { computed, signal } from "./html.js";

/**
 * @typedef {{ id: string, name: string | null, scopes: string[], state: string, expires_at: string | null }} OwnKey
 * @typedef {{ kind: "admin" | "key", tenant: string | null, key: any, base: any, max_upload_bytes: number, data_url: string | null }} Caller
 */

/** Whose secret this tab has; null before the sign-in. */
export const caller = signal(/** @type {Caller | null} */ (null));

/** Why the last session ended. */
export const endedBy = signal("");

export const isOperator = computed(() => caller.value?.kind === "admin");

/** Whether the data plane is on this page's port, so that a prompt can be sent. */
export const onDataPort = /\/console$/.test(new URL(document.baseURI).pathname);

/** The tenant that the menu leads to: a key's own, or the one that the operator looked at last. */
export const tenant = signal("");

/** @param {string} scope */
export function mayCall(scope) {
  return isOperator.value || Boolean(caller.value?.key?.scopes.includes(scope));
}

/**
 * Ask whose secret it is, and keep it in this tab's memory. Throws ApiError.
 * @param {string} secret
 */
export async function signIn(secret) {
  setSecret(secret.trim());
  try {
    const found = await api.get("caller");
    tenant.value = found.tenant ?? tenant.value;
    endedBy.value = "";
    caller.value = found;
  } catch (error) {
    setSecret("");
    throw error;
  }
}

/** An event of the window before the secret is forgotten: the last time to send something with it. */
export const LEAVING = "leaving";

/** @param {string} [reason] */
export function signOut(reason = "") {
  window.dispatchEvent(new Event(LEAVING));
  setSecret("");
  caller.value = null;
  tenant.value = "";
  endedBy.value = reason;
}

onSecretRefused.current = (/** @type {ApiError} */ error) => {
  if (caller.value) signOut(`Signed out: ${error.message}`);
};

/** The ids of the tenants that the caller may choose, at most 2,000. @param {AbortSignal} [signal] */
export async function tenantIds(signal) {
  if (!isOperator.value) return [tenant.value];
  return (await api.list("tenants", {}, { signal })).map((row) => row.id);
}

/** @typedef {"auto" | "light" | "dark"} Theme */

export const theme = signal(/** @type {Theme} */ ("auto"));

/** @param {Theme} chosen */
export function setTheme(chosen) {
  theme.value = chosen;
  document.documentElement.dataset.theme = chosen;
}
