/** Repeated reading: it stops while the tab is hidden, and waits longer after each error. */
import { useEffect, useRef, useState } from "./html.js";

const LONGEST_MS = 30_000;

/**
 * @template T
 * @typedef {{ data: T | null, error: any, reload: () => void }} Poll
 * `data` is the last that was read, also while there is an `error`.
 */

/**
 * Reads with `load` now, when `keys` change, and every `everyMs` (0: once). What was read for other keys, or was asked for before
 * `reload`, is not shown however late it comes.
 * @template T
 * @param {(signal: AbortSignal) => Promise<T>} load
 * @param {(string | number | null)[]} keys
 * @param {number} [everyMs]
 * @returns {Poll<T>}
 */
export function usePoll(load, keys, everyMs = 0) {
  const of = JSON.stringify(keys);
  const [state, setState] = useState(/** @type {{ of: string, data: T | null, error: any }} */ ({ of, data: null, error: null }));
  const again = useRef(() => {});
  useEffect(() => {
    let stop = new AbortController();
    /** @type {number | undefined} */
    let timer;
    let failures = 0;

    async function run() {
      window.clearTimeout(timer);
      stop.abort();
      stop = new AbortController();
      const { signal } = stop;
      let waitMs = everyMs;
      try {
        const data = await load(signal);
        if (signal.aborted) return;
        failures = 0;
        setState({ of, data, error: null });
      } catch (/** @type {any} */ error) {
        if (signal.aborted) return;
        setState((before) => ({ of, data: before.of === of ? before.data : null, error }));
        if (isFinal(error)) waitMs = 0;
        else {
          const backoff = Math.min(LONGEST_MS, Math.max(everyMs, 1000) * 2 ** failures++);
          waitMs = Math.max(backoff, 1000 * (error.retryAfter ?? 0));
        }
      }
      if (waitMs && !document.hidden) timer = window.setTimeout(run, waitMs);
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
      again.current = () => {};
      stop.abort();
      window.clearTimeout(timer);
      document.removeEventListener("visibilitychange", onVisible);
      window.removeEventListener("online", onVisible);
    };
  }, [of]);
  const { data, error } = state.of === of ? state : { data: null, error: null };
  return { data, error, reload: () => again.current() };
}

/** Whether asking again changes nothing: the request itself was refused. @param {any} error */
function isFinal(error) {
  return error.status >= 400 && error.status < 500 && error.status !== 408 && error.status !== 429;
}
