/** Files that are saved. A link would send no secret, so the browser reads the whole file first, onto its disk if it is large. */
import { api, ApiError, urlOf } from "./api.js";
import { bytes } from "./format.js";
import { isOperator } from "./store.js";

const MAX_DOWNLOAD_BYTES = 1 << 30;
/** How long a browser may take to begin to save what it has read. */
const REVOKE_MS = 60_000;

/**
 * Throws ApiError.
 * @param {string} where @param {string} file @param {number} size In bytes.
 */
export async function download(where, file, size) {
  if (size > MAX_DOWNLOAD_BYTES) {
    const most = `${bytes(size)} are more than the ${bytes(MAX_DOWNLOAD_BYTES)} that the page reads.`;
    throw new ApiError(0, "too_large", `${most} Use curl: ${curlOf(where, file)}`);
  }
  const answer = await api.request("GET", where);
  let content;
  try {
    content = await answer.blob();
  } catch {
    throw new ApiError(0, "cut_off", "The download broke off: the server or the connection ended, or the disk is full.");
  }
  save(content, file);
}

/** Save what the page has. @param {Blob} content @param {string} file */
export function save(content, file) {
  const url = URL.createObjectURL(content);
  const link = document.createElement("a");
  link.href = url;
  link.download = file;
  link.click();
  window.setTimeout(() => URL.revokeObjectURL(url), REVOKE_MS);
}

/** @param {string} where @param {string} file */
function curlOf(where, file) {
  const secret = isOperator.value ? "LORAPLEX_ADMIN_TOKEN" : "LORAPLEX_API_KEY";
  return `curl -f -H "Authorization: Bearer $${secret}" -o ${file} ${urlOf(where)}`;
}
