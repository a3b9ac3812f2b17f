/** Limits of tenants and keys, by the names that the API gives them. */
import { bytes, num } from "./format.js";

export const LIMITS = /** @type {Record<string, string>} */ ({
  requests_per_minute: "Requests per minute",
  tokens_per_minute: "Tokens per minute",
  max_concurrency: "Requests at a time",
  max_sequences: "Sequences that run and wait",
  max_output_tokens: "Tokens of one answer",
  max_adapters: "Adapters",
  max_adapter_bytes: "Bytes of adapters",
  device_bytes_reserved: "Device memory, reserved",
  device_bytes_max: "Device memory",
  host_bytes_max: "Host memory",
});

/** @param {string} name @param {number} value */
export const limitShown = (name, value) => (name.includes("_bytes") ? bytes(value) : num(value));

/** @param {any} budget Of a tenant or a key. */
export const budgetName = (budget) => `Tokens of this ${budget.period === "forever" ? "account" : budget.period}`;

/** A key's limits and its budget, each as a line. @param {any} key @returns {string[]} */
export function limitLines({ limits, budget }) {
  const set = Object.keys(LIMITS).filter((name) => limits[name] !== null);
  const lines = set.map((name) => `${LIMITS[name]}: ${limitShown(name, limits[name])}`);
  return budget ? [...lines, `${budgetName(budget)}: ${num(budget.spent)} of ${num(budget.limit)}`] : lines;
}
