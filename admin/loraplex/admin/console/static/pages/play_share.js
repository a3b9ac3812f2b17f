/** The playground as a link: what is typed, the settings and the columns. */
import { html, useId, useState } from "../lib/html.js";
import { linkOf } from "../lib/play_link.js";
import { Field } from "../lib/ui.js";

/** @param {{ tenant: string, ask: import("../lib/conversation.js").Ask, models: string[] }} props */
export function Share({ tenant, ask, models }) {
  const [isOpen, setOpen] = useState(false);
  const id = useId();
  return html`<p class="actions">
      <button type="button" data-testid="play-share" aria-expanded=${isOpen} aria-controls=${id} onClick=${() => setOpen(!isOpen)}>Share as a link</button>
    </p>
    <div id=${id}>${isOpen && html`<${Link} tenant=${tenant} ask=${ask} models=${models} />`}</div>`;
}

/** @param {{ tenant: string, ask: import("../lib/conversation.js").Ask, models: string[] }} props */
function Link({ tenant, ask, models }) {
  const [copied, setCopied] = useState("");
  const { link, problem } = linkOf(tenant, ask, models);
  if (problem) return html`<p class="error" role="alert" data-testid="play-link-problem">${problem}</p>`;
  return html`<${Field} label="Link" hint="It holds the prompt (after a turn, the last one), the system prompt, the settings and the columns; neither your secret
      nor any answer. Who opens it signs in with a key of ${tenant}, and nothing is sent before they click.">
      <input data-testid="play-link" readonly value=${link} onFocus=${(/** @type {any} */ event) => event.target.select()} />
    <//>
    ${navigator.clipboard &&
    html`<p><button type="button" data-testid="play-copy" onClick=${() => navigator.clipboard.writeText(link).then(() => setCopied(link), () => setCopied(""))}>
      ${copied === link ? "Copied" : "Copy"}</button></p>`}`;
}
