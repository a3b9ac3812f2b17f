/** Limits of tenants and keys, by the names that the API gives them. */
import { bytes, num } from "./format.js";

const NAMES = /** @type {Record<string, string>} */ ({
  max_concurrency: "Requests at a time",
  max_sequences: "Sequences that run and wait",
  max_output_tokens: "Tokens of one answer",
  max_adapters: "Adapters",
  max_adapter_bytes: "Bytes of adapters",
  device_bytes_reserved: "Device memory, reserved",
  device_bytes_max: "Device memory",
  host_bytes_max: "Host memory",
  file_days: "Days of files",
});
/** Those that a key may have too. */
export const KEY_LIMITS = [
  "requests_per_minute", "tokens_per_minute", "max_concurrency", "max_sequences", "max_output_tokens", "token_budget", "budget_period",
];
const BUDGET = ["token_budget", "budget_period"];

/** `requests_per_minute` is "Requests per minute". @param {string} name */
export const limitName = (name) => NAMES[name] ?? name[0].toUpperCase() + name.slice(1).replaceAll("_", " ");

/** Those that are set, the budget aside. @param {Record<string, any>} limits @returns {[string, number][]} */
export const setLimits = (limits) => Object.entries(limits).filter(([name, value]) => value !== null && !BUDGET.includes(name));

/** @param {string} name @param {number} value */
export const limitShown = (name, value) => (name.includes("_bytes") ? bytes(value) : num(value));

/** @param {any} budget Of a tenant or a key. */
export const budgetName = (budget) => `Tokens of this ${budget.period === "forever" ? "account" : budget.period}`;

/** A key's limits and its budget, each as a line. @param {any} key @returns {string[]} */
export function limitLines({ limits, budget }) {
  const lines = setLimits(limits).map(([name, value]) => `${limitName(name)}: ${limitShown(name, value)}`);
  return budget ? [...lines, `${budgetName(budget)}: ${num(budget.spent)} of ${num(budget.limit)}`] : lines;
}
