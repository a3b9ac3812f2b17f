/**
 * The one place that names the vendored libraries. `html` makes elements of a template: values are text or attributes,
 * never markup.
 */
import { h, render } from "../vendor/preact.js";
import htm from "../vendor/htm.js";

export { render };
export { useEffect, useId, useRef, useState } from "../vendor/hooks.js";
export { computed, signal } from "../vendor/signals.js";

export const html = htm.bind(h);
