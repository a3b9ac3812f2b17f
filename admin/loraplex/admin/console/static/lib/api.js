/**
 * Requests to the server that this page came from, with the secret of the person who signed in. The secret is in a variable of
 * this module: it ends with the tab, and no cookie and no storage holds it. Every request is one that curl can make.
 *
 *   const tenants = await api.list("tenants");                       // GET /admin/v1/tenants, all pages
 *   const page = await api.get("audit", { limit: 50 });              // one page
 *   const { body, etag } = await api.read(path`tenants/${t}/adapters/${name}/release`);
 *   await api.send("PUT", path`…`, { targets }, { etag });           // If-Match: etag
 *   const answer = await api.request("POST", "/v1/chat/completions", { json: body });  // the data plane, as a Response
 *
 * A path without a leading slash is below /admin/v1/.
 */
import { signal } from "./html.js";

/** The folder of this page: `/` behind no proxy. */
const BASE = new URL(".", document.baseURI);

let secret = "";

/** Whether the last request found no server. */
export const offline = signal(false);

/** Called with each 401 that a request with the secret gets. @type {{ current: (error: ApiError) => void }} */
export const onSecretRefused = { current: () => {} };

/** @param {string} value Empty: none. */
export function setSecret(value) {
  secret = value;
}

/** What a refused request said. `status` is 0 and `code` "offline" where there was no answer. */
export class ApiError extends Error {
  /**
   * @param {number} status
   * @param {string} code
   * @param {string} message
   * @param {{ retryAfter?: number, param?: string | null, body?: any }} [more] `retryAfter` in seconds.
   */
  constructor(status, code, message, more = {}) {
    super(message);
    this.status = status;
    this.code = code;
    this.retryAfter = more.retryAfter ?? 0;
    this.param = more.param ?? null;
    /** The whole problem document, with an adapter's `report` where it was refused. @type {any} */
    this.body = more.body ?? null;
  }
}

/**
 * A path whose values are escaped, whatever they hold.
 * @param {TemplateStringsArray} parts
 * @param {...(string | number)} values
 */
export function path(parts, ...values) {
  return parts.reduce((whole, part, i) => whole + encodeURIComponent(values[i - 1]) + part);
}

/**
 * @param {string} where Below /admin/v1/, or with a leading slash below the page's folder.
 * @param {Record<string, any>} [params] The query, without what is null or undefined.
 */
export function urlOf(where, params = {}) {
  const url = new URL(where.startsWith("/") ? "." + where : "admin/v1/" + where, BASE);
  for (const [name, value] of Object.entries(params)) {
    if (value !== null && value !== undefined && value !== "") url.searchParams.set(name, String(value));
  }
  return url;
}

/** The headers that every request has, for what cannot use `request`. @returns {Record<string, string>} */
export function headers() {
  return secret ? { authorization: `Bearer ${secret}` } : {};
}

/**
 * An error from the status, the headers and the text of an answer, in the shape of either port.
 * @param {number} status
 * @param {string | null} retryAfter
 * @param {string} text
 */
export function errorOf(status, retryAfter, text) {
  /** @type {any} */
  let body = null;
  try {
    body = JSON.parse(text);
  } catch {
    /* A proxy's page: the status has to do. */
  }
  const found = body?.error ?? body ?? {};
  const message = found.detail ?? found.message ?? `The server answered with status ${status}.`;
  return new ApiError(status, found.code ?? found.type ?? "unknown", String(message), {
    retryAfter: Number(retryAfter) || 0,
    param: found.param,
    body,
  });
}

/**
 * Any request. Throws ApiError unless the status is 2xx.
 * @param {string} method
 * @param {string} where
 * @param {{ params?: Record<string, any>, json?: any, etag?: string | null, headers?: Record<string, string>,
 *   signal?: AbortSignal }} [options]
 * @returns {Promise<Response>}
 */
export async function request(method, where, options = {}) {
  const sent = secret;
  /** @type {Record<string, string>} */
  const given = { accept: "application/json", ...headers(), ...options.headers };
  if (options.json !== undefined) given["content-type"] = "application/json";
  if (options.etag) given["if-match"] = options.etag;
  let answer;
  try {
    answer = await fetch(urlOf(where, options.params), {
      method,
      headers: given,
      body: options.json === undefined ? undefined : JSON.stringify(options.json),
      signal: options.signal,
      credentials: "omit",
      cache: "no-store",
      redirect: "error",
      keepalive: method === "DELETE", // a page that is left may still send one
    });
  } catch (error) {
    if (options.signal?.aborted) throw error;
    offline.value = true;
    throw new ApiError(0, "offline", "The server does not answer. It is tried again.");
  }
  offline.value = false;
  if (!answer.ok) {
    const error = errorOf(answer.status, answer.headers.get("retry-after"), await answer.text());
    if (error.status === 401 && sent && sent === secret) onSecretRefused.current(error);
    throw error;
  }
  return answer;
}

/** @param {Response} answer @returns {Promise<any>} */
async function bodyOf(answer) {
  const text = await answer.text();
  return text ? JSON.parse(text) : null;
}

export const api = {
  request,
  /**
   * The body of an answer.
   * @param {string} where
   * @param {Record<string, any>} [params]
   * @param {{ signal?: AbortSignal }} [options]
   * @returns {Promise<any>}
   */
  async get(where, params, options) {
    return bodyOf(await request("GET", where, { params, ...options }));
  },
  /**
   * The body with its ETag.
   * @param {string} where
   * @param {Record<string, any>} [params]
   * @param {{ signal?: AbortSignal }} [options]
   * @returns {Promise<{ body: any, etag: string | null }>}
   */
  async read(where, params, options) {
    const answer = await request("GET", where, { params, ...options });
    return { body: await bodyOf(answer), etag: answer.headers.get("etag") };
  },
  /**
   * All pages of a list, up to `most` rows.
   * @param {string} where
   * @param {Record<string, any>} [params]
   * @param {{ signal?: AbortSignal, most?: number }} [options]
   * @returns {Promise<any[]>}
   */
  async list(where, params = {}, { signal, most = 2000 } = {}) {
    /** @type {any[]} */
    const rows = [];
    let cursor = null;
    do {
      const page = await api.get(where, { limit: 500, ...params, cursor }, { signal });
      rows.push(...page.data);
      cursor = page.next_cursor;
    } while (cursor !== null && rows.length < most);
    return rows;
  },
  /**
   * A change.
   * @param {"POST" | "PUT" | "PATCH" | "DELETE"} method
   * @param {string} where
   * @param {any} [json]
   * @param {{ etag?: string | null, params?: Record<string, any>, signal?: AbortSignal }} [options]
   * @returns {Promise<{ body: any, etag: string | null, status: number }>}
   */
  async send(method, where, json, options) {
    const answer = await request(method, where, { json, ...options });
    return { body: await bodyOf(answer), etag: answer.headers.get("etag"), status: answer.status };
  },
};
