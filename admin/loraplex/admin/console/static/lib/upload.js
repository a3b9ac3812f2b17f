/** An adapter's files: what is wrong with them before they are sent, and the sending, with progress. */
import { ApiError, errorOf, headers, urlOf } from "./api.js";
import { foreignKind, foreignWeights } from "./foreign.js";

export const CONFIG = "adapter_config.json";
export const TENSORS = "adapter_model.safetensors";
const CHAT_FILES = ["chat_template.jinja", "tokenizer_config.json", "special_tokens_map.json", "generation_config.json"];
/** Parts of the form beside the two files, as docs/admin.md names them. */
const OTHER_TENSORS = "adapters.safetensors";
const MAX_CONFIG_BYTES = 1 << 20;
const START_BYTES = 512;

/**
 * @typedef {{files: Map<string, File>, faults: string[], leftOut: string[]}} Chosen `leftOut`: names of files that are not sent.
 * @typedef {{maxBytes: number | null, maxRank: number | null}} Caps
 * @typedef {{file: File, isOfFolder: boolean}} Dropped
 */

/**
 * What was dropped: files, and the files of folders, without those of folders in them. Reads the event before the first wait: its
 * items end with it. Throws if the browser cannot read one.
 * @param {DataTransfer | null} transfer
 * @returns {Promise<Dropped[]>}
 */
export async function droppedFiles(transfer) {
  const items = [...(transfer?.items ?? [])].filter((item) => item.kind === "file");
  const found = items.map((item) => {
    const entry = item.webkitGetAsEntry();
    const file = item.getAsFile();
    if (entry?.isDirectory) return filesOf(/** @type {FileSystemDirectoryEntry} */ (entry));
    return file ? [{ file, isOfFolder: false }] : [];
  });
  return (await Promise.all(found)).flat();
}

/** @param {FileSystemDirectoryEntry} folder @returns {Promise<Dropped[]>} */
async function filesOf(folder) {
  const reader = folder.createReader();
  /** @type {File[]} */
  const files = [];
  for (;;) {
    // Some at a time, and none at the end.
    const entries = await new Promise((resolve, reject) => reader.readEntries(resolve, reject));
    if (entries.length === 0) return files.map((file) => ({ file, isOfFolder: true }));
    for (const entry of entries.filter((/** @type {FileSystemEntry} */ one) => one.isFile)) {
      files.push(await new Promise((resolve, reject) => entry.file(resolve, reject)));
    }
  }
}

/**
 * The parts of an upload among the dropped files, and what is wrong with them before anything is sent. What else a folder has,
 * such as a README, is left out.
 * @param {Dropped[]} dropped
 * @param {Caps} caps
 * @returns {Promise<Chosen>}
 */
export async function choose(dropped, caps) {
  const files = new Map();
  const faults = [];
  const leftOut = [];
  const foreign = foreignWeights(dropped.map(({ file }) => file.name));
  for (const { file, isOfFolder } of dropped) {
    const isPart = [CONFIG, TENSORS, OTHER_TENSORS, ...CHAT_FILES].includes(file.name);
    const part = isPart ? file.name : isArchive(file.name) && !isOfFolder ? "archive" : null;
    if (part === null && (isOfFolder || foreignWeights([file.name]))) leftOut.push(file.name);
    else if (part === null) faults.push(`${file.name} is no part of an adapter.`);
    else if (files.has(part)) faults.push(`There is more than one ${part}: drop the files of one adapter.`);
    else files.set(part, file);
  }
  if (files.has("archive")) {
    if (files.size > 1) faults.push("An archive comes without other files.");
  } else {
    if (!files.has(CONFIG)) faults.push(`${CONFIG} is missing.`);
    if (!files.has(TENSORS) && !files.has(OTHER_TENSORS)) faults.push(foreign || `${TENSORS} is missing.`);
  }
  const bytes = [...files.values()].reduce((sum, file) => sum + file.size, 0);
  if (caps.maxBytes !== null && bytes > caps.maxBytes) {
    faults.push(`The files have ${bytes} bytes; the server takes at most ${caps.maxBytes}.`);
  }
  const config = files.get(CONFIG);
  if (config) faults.push(...(await configFaults(config, caps)));
  const tensors = files.get(TENSORS);
  if (tensors) faults.push(...(await tensorsFaults(tensors)));
  return { files, faults, leftOut };
}

/** @param {string} name */
function isArchive(name) {
  return /\.(tar|tar\.gz|tgz|zip)$/i.test(name);
}

/**
 * @param {File} config
 * @param {Caps} caps
 */
async function configFaults(config, caps) {
  if (config.size > MAX_CONFIG_BYTES) return [`${CONFIG} has ${config.size} bytes; at most ${MAX_CONFIG_BYTES} are read.`];
  let parsed;
  try {
    parsed = JSON.parse(await config.text());
  } catch {
    return [`${CONFIG} is not valid JSON.`];
  }
  const rank = parsed && parsed.r;
  if (caps.maxRank !== null && typeof rank === "number" && rank > caps.maxRank) {
    return [`${CONFIG} has rank ${rank}; the server takes at most ${caps.maxRank}.`];
  }
  return [];
}

/**
 * Safetensors begin with eight bytes of the header's length, then the header, which is JSON.
 * @param {File} file
 */
async function tensorsFaults(file) {
  const start = await file.slice(0, START_BYTES).arrayBuffer();
  const head = new DataView(start);
  const isSafetensors = start.byteLength > 8 && head.getBigUint64(0, true) <= BigInt(file.size - 8) && head.getUint8(8) === 0x7b;
  if (isSafetensors) return [];
  const kind = foreignKind(String.fromCharCode(...new Uint8Array(start)));
  return [kind ? `${TENSORS} is ${kind}` : `${TENSORS} does not begin as safetensors do.`];
}

/**
 * Sends the parts as one form. Throws ApiError.
 * @param {string} where Below /admin/v1/.
 * @param {Map<string, File>} files
 * @param {(sent: number, total: number) => void} onProgress
 * @param {AbortSignal} signal
 * @returns {Promise<{ status: number, body: any }>}
 */
export function send(where, files, onProgress, signal) {
  const form = new FormData();
  // The small files first: a fault in them is found before the tensors are sent.
  const parts = [...files].sort((a, b) => a[1].size - b[1].size);
  for (const [name, file] of parts) form.append(name, file, file.name);
  return new Promise((resolve, reject) => {
    const request = new XMLHttpRequest();
    request.open("POST", urlOf(where));
    for (const [name, value] of Object.entries(headers())) request.setRequestHeader(name, value);
    request.upload.onprogress = (event) => onProgress(event.loaded, event.total);
    request.onload = () => {
      const { status, responseText } = request;
      if (status >= 200 && status < 300) resolve({ status, body: JSON.parse(responseText) });
      else reject(errorOf(status, request.getResponseHeader("retry-after"), responseText));
    };
    request.onerror = () => reject(new ApiError(0, "offline", "The connection broke before the server answered."));
    request.onabort = () => reject(new DOMException("stopped", "AbortError"));
    signal.addEventListener("abort", () => request.abort());
    request.send(form);
  });
}
