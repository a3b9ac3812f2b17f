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
const DAY_STEPS = [1, 2, 3, 7, 14, 30].map((days) => days * 86_400);
/** Part of the height that stays free above the highest value. */
const HEADROOM = 0.05;

/** The legend has the last values while no point is pointed at. @param {uPlot} chart */
function showLast(chart) {
  if (chart.cursor.idx === null || chart.cursor.idx === undefined) chart.setLegend({ idx: chart.data[0].length - 1 }, false);
}

/**
 * Series over time; the page shows the same numbers as text.
 * @param {{ label: string, times: number[], series: Series[], height?: number, byDay?: boolean,
 *   show?: (value: number) => string }} props `times` in seconds since 1970, ascending; `byDay`: each begins a day of UTC.
 */
export function Chart({ label, times, series, height = 180, byDay = false, show = compact }) {
  const place = useRef(/** @type {HTMLElement | null} */ (null));
  const chart = useRef(/** @type {uPlot | null} */ (null));
  const shape = JSON.stringify([series.map((one) => one.name), byDay, height, theme.value]);
  /** @returns {uPlot.AlignedData} */
  const data = () => [times, ...series.map((one) => one.values)];

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
            stroke: color(i),
            width: 2,
            points: { show: false },
            value: (/** @type {uPlot} */ _, /** @type {number | null} */ value) => (value === null ? "–" : show(value)),
          })),
        ],
        axes: [{ ...axis, space: 100, incrs: byDay ? DAY_STEPS : STEPS, values: (/** @type {uPlot} */ _, /** @type {number[]} */ at) => at.map(moment) }, { ...axis, size: 60, values: (/** @type {uPlot} */ _, /** @type {number[]} */ at) => at.map(show) }],
        scales: { y: { range: (/** @type {uPlot} */ _, /** @type {number} */ __, /** @type {number} */ top) => [0, (top || 1) * (1 + HEADROOM)] } },
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
