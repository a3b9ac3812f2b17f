/**
 * Links to the playground: prompt, system prompt, settings and columns as an address. Anyone can send a link, so each value is
 * checked, and what is wrong is said. A link fills fields in and sends nothing.
 */
import { path } from "./api.js";
import { DEFAULTS } from "./conversation.js";
import { num } from "./format.js";

/** Characters of a link after `?`. */
const MAX_LINK = 16_000;
export const MAX_COLUMNS = 4;
const MAX_MODEL = 512;
const MAX_PROBLEMS = 6;
export const TOOL_CHOICES = ["auto", "required", "none"];

/** @typedef {import("./conversation.js").Ask} Ask */
/** @typedef {{ ask: Ask, models: string[], problems: string[] }} Linked */

const text = (/** @type {string} */ value) => value;
const flag = (/** @type {string} */ value) => (value === "true" ? true : undefined);
const choice = (/** @type {string} */ value) => (TOOL_CHOICES.includes(value) ? value : undefined);

/** @param {number} least @param {number} most @param {RegExp} form */
const number = (least, most, form) => (/** @type {string} */ value) =>
  form.test(value) && Number(value) >= least && Number(value) <= most ? Number(value) : undefined;

const WHOLE = /^-?\d{1,16}$/;

/**
 * The names in the address, the fields, what reads them (undefined: wrong), and what would be right.
 * @type {[string, keyof Ask, (value: string) => any, string][]}
 */
const FIELDS = [
  ["prompt", "prompt", text, ""],
  ["system", "system", text, ""],
  ["seed", "seed", number(-Number.MAX_SAFE_INTEGER, Number.MAX_SAFE_INTEGER, WHOLE), "a whole number"],
  ["temperature", "temperature", number(0, 2, /^\d(\.\d{1,16})?$/), "a number from 0 to 2"],
  ["max_tokens", "maxTokens", number(1, Number.MAX_SAFE_INTEGER, WHOLE), "a whole number of at least 1"],
  ["schema", "schema", text, ""],
  ["tools", "tools", text, ""],
  ["tool_choice", "toolChoice", choice, TOOL_CHOICES.join(", ")],
  ["one_call", "oneCall", flag, "true"],
  ["logprobs", "logprobs", flag, "true"],
];

/**
 * The address that fills the playground in, or why there is none.
 * @param {string} tenant @param {Ask} ask @param {string[]} models
 * @returns {{ link: string, problem: string }}
 */
export function linkOf(tenant, ask, models) {
  const params = new URLSearchParams();
  for (const [name, field] of FIELDS) if (ask[field] !== DEFAULTS[field]) params.set(name, String(ask[field]));
  for (const model of models) params.append("model", model);
  const { length } = String(params);
  if (length > MAX_LINK) {
    const most = `A link has at most ${num(MAX_LINK)} characters, and this one would have ${num(length)}.`;
    return { link: "", problem: `${most} Shorten the prompt, the schema or the tools.` };
  }
  return { link: `${location.href.split("#")[0]}#/${path`tenants/${tenant}/playground`}?${params}`, problem: "" };
}

/**
 * What a link asks for. `models` is empty where it names none that can be one.
 * @param {string} link What stands after `?`.
 * @returns {Linked}
 */
export function readLink(link) {
  if (link.length > MAX_LINK) {
    const most = `The link has ${num(link.length)} characters; ${num(MAX_LINK)} are read at most.`;
    return { ask: DEFAULTS, models: [], problems: [`${most} Nothing of it is used.`] };
  }
  const given = new URLSearchParams(link);
  const ask = { ...DEFAULTS };
  /** @type {string[]} */
  const problems = [];
  for (const [name, field, read, need] of FIELDS) {
    const values = given.getAll(name);
    if (values.length > 1) problems.push(`${name} is given ${num(values.length)} times. The default is used.`);
    if (values.length !== 1) continue;
    const value = read(values[0]);
    if (value === undefined) problems.push(`${name} is ${quoted(values[0])}, and must be ${need}. The default is used.`);
    else Object.assign(ask, { [field]: value });
  }
  const known = ["model", ...FIELDS.map(([name]) => name)];
  for (const name of new Set(given.keys())) if (!known.includes(name)) problems.push(`The playground has no setting ${quoted(name)}.`);
  const named = given.getAll("model");
  const models = named.filter((model) => model && model.length <= MAX_MODEL);
  if (models.length < named.length) problems.push(`A model's name has 1 to ${MAX_MODEL} characters. Others are left out.`);
  if (models.length > MAX_COLUMNS) problems.push(`There are at most ${MAX_COLUMNS} columns. The first ${MAX_COLUMNS} are used.`);
  return { ask, models: models.slice(0, MAX_COLUMNS), problems: shortened(problems) };
}

/** @param {string} value */
const quoted = (value) => `"${value.length > 40 ? `${value.slice(0, 40)}…` : value}"`;

/** @param {string[]} problems */
const shortened = (problems) =>
  problems.length > MAX_PROBLEMS
    ? [...problems.slice(0, MAX_PROBLEMS), `And ${num(problems.length - MAX_PROBLEMS)} more.`]
    : problems;
