/** Charts of uPlot, in the page's colours, with their numbers as a table for screen readers where a page has none. */
import uPlot from "../vendor/uplot.js";
import { html, useEffect, useRef } from "./html.js";
import { compact } from "./format.js";
import { theme } from "./store.js";

/** @typedef {{ name: string, values: (number | null)[] }} Series */

/**
 * Series over time; the page shows the same numbers as text.
 * @param {{ label: string, times: number[], series: Series[], height?: number, bars?: boolean,
 *   show?: (value: number) => string }} props `times` in seconds since 1970, ascending.
 */
export function Chart({ label, times, series, height = 180, bars = false, show = compact }) {
  const place = useRef(/** @type {HTMLElement | null} */ (null));
  const chart = useRef(/** @type {uPlot | null} */ (null));
  const shape = JSON.stringify([series.map((one) => one.name), bars, height, theme.value]);
  /** @returns {uPlot.AlignedData} */
  const data = () => [times, ...series.map((one) => one.values)];

  useEffect(() => {
    const into = place.current;
    if (!into) return undefined;
    const style = getComputedStyle(into);
    const color = (/** @type {number} */ i) => style.getPropertyValue(`--series-${(i % 6) + 1}`).trim();
    const axis = { stroke: style.color, grid: { stroke: style.getPropertyValue("--line").trim(), width: 1 } };
    const made = new uPlot(
      {
        width: into.clientWidth,
        height,
        series: [
          {},
          ...series.map((one, i) => ({
            label: one.name,
            stroke: color(i),
            fill: bars ? color(i) : undefined,
            width: bars ? 0 : 2,
            points: { show: false },
            paths: bars ? uPlot.paths.bars?.({ size: [0.7, 40] }) : undefined,
            value: (/** @type {uPlot} */ _, /** @type {number | null} */ value) => (value === null ? "–" : show(value)),
          })),
        ],
        axes: [axis, { ...axis, size: 60, values: (/** @type {uPlot} */ _, /** @type {number[]} */ at) => at.map(show) }],
        scales: { y: { range: (/** @type {uPlot} */ _, /** @type {number} */ __, /** @type {number} */ top) => [0, top || 1] } },
        legend: { show: true },
        cursor: { drag: { x: false, y: false } },
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
  useEffect(() => chart.current?.setData(data()), [times, series]);
  return html`<div class="chart" role="img" aria-label=${label} ref=${place}></div>`;
}
