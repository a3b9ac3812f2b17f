/** Numbers and times as text, in the viewer's language and zone. */

const whole = new Intl.NumberFormat();
const short = new Intl.NumberFormat(undefined, { notation: "compact", maximumFractionDigits: 1 });
const rounded = new Intl.NumberFormat(undefined, { maximumSignificantDigits: 3 });
const percents = new Intl.NumberFormat(undefined, { style: "percent", maximumFractionDigits: 1 });
const large = new Intl.NumberFormat(undefined, { notation: "scientific", maximumSignificantDigits: 3 });
const largePercents = new Intl.NumberFormat(undefined, { style: "percent", notation: "scientific", maximumSignificantDigits: 3 });
/** From here on a rounded number is written as 1.23E6. */
const LARGE = 1e6;
const moment = new Intl.DateTimeFormat(undefined, { dateStyle: "medium", timeStyle: "medium" });
const fullMoment = new Intl.DateTimeFormat(undefined, { dateStyle: "full", timeStyle: "long" });

/** All digits: what is compared with the API's. @param {number | null | undefined} value */
export const num = (value) => (value === null || value === undefined ? "–" : whole.format(value));

/** Three digits, whatever the size. @param {number | null | undefined} value */
export function figure(value) {
  if (value === null || value === undefined) return "–";
  return (Math.abs(value) < LARGE ? rounded : large).format(value);
}

/** For axes and tiles: 12.3K. @param {number} value */
export const compact = (value) => short.format(value);

/** @param {number | null | undefined} value A fraction. */
export function percent(value) {
  if (value === null || value === undefined) return "–";
  return (Math.abs(value) * 100 < LARGE ? percents : largePercents).format(value);
}

/** @param {number | null | undefined} value */
export function bytes(value) {
  if (value === null || value === undefined) return "–";
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let size = value;
  let unit = 0;
  while (size >= 1024 && unit < units.length - 1) {
    size /= 1024;
    unit += 1;
  }
  return `${new Intl.NumberFormat(undefined, { maximumFractionDigits: unit ? 1 : 0 }).format(size)} ${units[unit]}`;
}

/** @param {number | null | undefined} value */
export function seconds(value) {
  if (value === null || value === undefined) return "–";
  if (value === 0) return "0";
  if (value < 1e-3) return `${(value * 1e6).toFixed(0)} µs`;
  if (value < 1) return `${(value * 1e3).toFixed(value < 0.01 ? 2 : 0)} ms`;
  if (value < 120) return `${value.toFixed(value < 10 ? 1 : 0)} s`;
  if (value < 7200) return `${(value / 60).toFixed(0)} min`;
  if (value < 172_800) return `${(value / 3600).toFixed(0)} h`;
  return `${(value / 86_400).toFixed(0)} d`;
}

/** @param {string} at RFC 3339. */
export const dateTime = (at) => moment.format(new Date(at));
/** @param {string} at RFC 3339. */
export const fullDateTime = (at) => fullMoment.format(new Date(at));
