/** What only the data port has: who can ask it from here, and what the others are told. */
import { html } from "./html.js";
import { caller, isOperator, mayCall, onDataPort } from "./store.js";
import { Page } from "./ui.js";

/** Requests go to this page's own port, with a key that may infer. */
export function canAsk() {
  return onDataPort && !isOperator.value && mayCall("inference");
}

/**
 * What to do where nothing can be asked.
 * @param {{ title: string, why: string, at: string }} props `why`: a sentence up to "in the console there"; `at`: the address.
 */
export function Elsewhere({ title, why, at }) {
  const told = caller.value?.data_url ?? "";
  const there = /^https?:/.test(told) ? `${told}/console${at}` : "";
  if (onDataPort) {
    return html`<${Page} title=${title}>
      <p class="error" data-testid="elsewhere">This key lacks the scope inference. Sign in with one that has it.</p>
    <//>`;
  }
  return html`<${Page} title=${title}>
    <p data-testid="elsewhere">${why} in the console there${there ? ":" : ", at /console."}
      ${there && html` <a href=${there} target="_blank" rel="noreferrer">${there.split("?")[0]}</a>.`}</p>
    <p>Sign in there with a tenant's key that has the scope inference. The admin token sends no prompts.</p>
    ${isOperator.value && !there && html`<p class="note">The start option <code>--public-url</code> puts a link here.</p>`}
  <//>`;
}
