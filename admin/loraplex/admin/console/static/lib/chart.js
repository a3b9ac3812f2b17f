/** Charts of uPlot, in the page's colours, with their numbers as a table for screen readers where a page has none. */
import uPlot from "../vendor/uplot.js";
import { html, useEffect, useRef } from "./html.js";
import { compact } from "./format.js";
import { theme } from "./store.js";

/** @typedef {{ name: string, values: (number | null)[] }} Series */

const clock = new Intl.DateTimeFormat(undefined, { timeStyle: "medium" });
const day = new Intl.DateTimeFormat(undefined, { month: "short", day: "numeric", timeZone: "UTC" });
/** Seconds between two labels of the time. */
const STEPS = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 1800, 3600];
const DAY_S = 86_400;
const DAY_STEPS = [1, 2, 3, 7, 14, 30].map((days) => days * DAY_S);
/** A bar's part of its day, and its most pixels. @type {[number, number]} */
const BAR = [0.8, 40];
/** Part of the height that stays free above the highest value. */
const HEADROOM = 0.05;

/** The legend has the last values while no point is pointed at. @param {uPlot} chart */
function showLast(chart) {
  if (chart.cursor.idx === null || chart.cursor.idx === undefined) chart.setLegend({ idx: chart.data[0].length - 1 }, false);
}

/** Room for the whole of the first and the last bar. @type {(chart: uPlot, first: number, last: number) => [number, number]} */
const wholeDays = (_, first, last) => [first - DAY_S / 2, last + DAY_S / 2];

/**
 * The heights of stacked bars: each series stands on those after it, which are drawn over it.
 * @param {Series[]} series
 */
function stacked(series) {
  const heights = series.map((one) => [...one.values]);
  for (let i = heights.length - 2; i >= 0; i -= 1) heights[i] = heights[i].map((value, at) => (value ?? 0) + (heights[i + 1][at] ?? 0));
  return heights;
}

/**
 * Series over time, by day as stacked bars; the page shows the same numbers as text.
 * @param {{ label: string, times: number[], series: Series[], height?: number, byDay?: boolean,
 *   show?: (value: number) => string }} props `times` in seconds since 1970, ascending; `byDay`: each begins a day of UTC.
 */
export function Chart({ label, times, series, height = 180, byDay = false, show = compact }) {
  const place = useRef(/** @type {HTMLElement | null} */ (null));
  const chart = useRef(/** @type {uPlot | null} */ (null));
  const shape = JSON.stringify([series.map((one) => one.name), byDay, height, theme.value]);
  /** @returns {uPlot.AlignedData} */
  const data = () => [times, ...(byDay ? stacked(series) : series.map((one) => one.values))];
  const given = useRef(series);
  given.current = series;

  useEffect(() => {
    const into = place.current;
    if (!into) return undefined;
    const style = getComputedStyle(into);
    const color = (/** @type {number} */ i) => style.getPropertyValue(`--series-${(i % 6) + 1}`).trim();
    const moment = (/** @type {number} */ at) => (byDay ? day : clock).format(at * 1000);
    const axis = { stroke: style.color, grid: { stroke: style.getPropertyValue("--line").trim(), width: 1 } };
    const made = new uPlot(
      {
        width: into.clientWidth,
        height,
        series: [
          { label: byDay ? "Day" : "Time", value: (/** @type {uPlot} */ _, /** @type {number | null} */ at) => (at === null ? "" : moment(at)) },
          ...series.map((one, i) => ({
            label: one.name,
            ...(byDay ? { fill: color(i), width: 0, paths: uPlot.paths.bars?.({ size: BAR }) } : { stroke: color(i), width: 2 }),
            points: { show: false },
            value: (/** @type {uPlot} */ _, /** @type {any} */ __, /** @type {any} */ ___, /** @type {number | null} */ at) => {
              const value = at === null ? null : given.current[i].values[at];
              return value === null || value === undefined ? "–" : show(value);
            },
          })),
        ],
        axes: [{ ...axis, space: 100, incrs: byDay ? DAY_STEPS : STEPS, values: (/** @type {uPlot} */ _, /** @type {number[]} */ at) => at.map(moment) }, { ...axis, size: 60, values: (/** @type {uPlot} */ _, /** @type {number[]} */ at) => at.map(show) }],
        scales: { ...(byDay ? { x: { range: wholeDays } } : {}), y: { range: (/** @type {uPlot} */ _, /** @type {number} */ __, /** @type {number} */ top) => [0, (top || 1) * (1 + HEADROOM)] } },
        legend: { show: true },
        cursor: { drag: { x: false, y: false } },
        hooks: { ready: [showLast], setCursor: [showLast] },
        ...(byDay ? { tzDate: (/** @type {number} */ at) => uPlot.tzDate(new Date(at * 1000), "Etc/UTC") } : {}),
      },
      data(),
      into,
    );
    chart.current = made;
    const watch = new ResizeObserver(() => made.setSize({ width: into.clientWidth, height }));
    watch.observe(into);
    return () => {
      watch.disconnect();
      made.destroy();
      chart.current = null;
    };
  }, [shape]);
  useEffect(() => {
    chart.current?.setData(data());
    if (chart.current) showLast(chart.current);
  }, [times, series]);
  return html`<div class="chart" role="img" aria-label=${label} ref=${place}></div>`;
}
