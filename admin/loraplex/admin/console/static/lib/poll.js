/** Repeated reading: it stops while the tab is hidden, and waits longer after each error. */
import { useEffect, useRef, useState } from "./html.js";

const LONGEST_MS = 30_000;

/**
 * @template T
 * @typedef {{ data: T | null, error: any, loading: boolean, reload: () => void }} Poll
 * `data` is the last that was read, also while there is an `error`.
 */

/**
 * Reads with `load` now, when `keys` change, and every `everyMs` (0: once).
 * @template T
 * @param {(signal: AbortSignal) => Promise<T>} load
 * @param {any[]} keys
 * @param {number} [everyMs]
 * @returns {Poll<T>}
 */
export function usePoll(load, keys, everyMs = 0) {
  const [state, setState] = useState(
    /** @type {{ data: T | null, error: any, loading: boolean }} */ ({ data: null, error: null, loading: true }),
  );
  const again = useRef(() => {});
  useEffect(() => {
    const stop = new AbortController();
    /** @type {number | undefined} */
    let timer;
    let failures = 0;
    let running = false;
    setState({ data: null, error: null, loading: true });

    async function run() {
      window.clearTimeout(timer);
      if (running || stop.signal.aborted) return;
      running = true;
      let waitMs = everyMs;
      try {
        const data = await load(stop.signal);
        failures = 0;
        if (!stop.signal.aborted) setState({ data, error: null, loading: false });
      } catch (/** @type {any} */ error) {
        if (stop.signal.aborted) return;
        setState((before) => ({ ...before, error, loading: false }));
        if (isFinal(error)) waitMs = 0;
        else {
          const backoff = Math.min(LONGEST_MS, Math.max(everyMs, 1000) * 2 ** failures++);
          waitMs = Math.max(backoff, 1000 * (error.retryAfter ?? 0));
        }
      } finally {
        running = false;
      }
      if (waitMs && !stop.signal.aborted && !document.hidden) timer = window.setTimeout(run, waitMs);
    }

    function onVisible() {
      if (document.hidden) window.clearTimeout(timer);
      else if (everyMs || failures) run();
    }

    again.current = run;
    document.addEventListener("visibilitychange", onVisible);
    window.addEventListener("online", onVisible);
    run();
    return () => {
      stop.abort();
      window.clearTimeout(timer);
      document.removeEventListener("visibilitychange", onVisible);
      window.removeEventListener("online", onVisible);
    };
  }, keys);
  return { ...state, reload: () => again.current() };
}

/** Whether asking again changes nothing: the request itself was refused. @param {any} error */
function isFinal(error) {
  return error.status >= 400 && error.status < 500 && error.status !== 408 && error.status !== 429;
}
