/** What the playground asks for beside the prompt: sampling, system prompt, a form of the answer, tools. */
import { typedJson } from "../lib/conversation.js";
import { html, useId, useState } from "../lib/html.js";
import { TOOL_CHOICES } from "../lib/play_link.js";
import { Field, NumberInput } from "../lib/ui.js";

/** @typedef {import("../lib/conversation.js").Ask} Ask */

const SCHEMA = `{"type": "object", "properties": {"city": {"type": "string", "maxLength": 30}}, "required": ["city"], "additionalProperties": false}`;
const TOOLS = `[{"type": "function", "function": {"name": "get_weather", "parameters": ${SCHEMA}}}]`;

/** @param {{ ask: Ask, onChange: (ask: Ask) => void }} props */
export function Settings({ ask, onChange }) {
  /** @param {keyof Ask} field */
  const set = (field) => (/** @type {any} */ value) => onChange({ ...ask, [field]: value });
  return html`<${Field} label="System prompt">
      <textarea data-testid="play-system" rows="2" value=${ask.system} onInput=${(/** @type {any} */ event) => set("system")(event.target.value)}></textarea>
    <//>
    <div class="form">
      <${Field} label="Seed"><${NumberInput} value=${ask.seed} testid="play-seed" onNumber=${set("seed")} /><//>
      <${Field} label="Temperature">
        <${NumberInput} min=${0} max=${2} step=${0.1} value=${ask.temperature} testid="play-temperature" onNumber=${set("temperature")} />
      <//>
      <${Field} label="Most tokens"><${NumberInput} min=${1} value=${ask.maxTokens} testid="play-max-tokens" onNumber=${set("maxTokens")} /><//>
      <${Check} label="Log probabilities of tokens" testid="play-ask-logprobs" checked=${ask.logprobs} onCheck=${set("logprobs")} />
    </div>
    <${Json} title="Form of the answer" label="JSON schema" name="schema" example=${SCHEMA} value=${ask.schema} onText=${set("schema")} />
    <${Json} title="Tools" label="Functions that the model may call" name="tools" example=${TOOLS} value=${ask.tools} onText=${set("tools")}>
      <div class="form">
        <${Field} label="Choice">
          <select data-testid="play-tool-choice" value=${ask.toolChoice} onChange=${(/** @type {any} */ event) => set("toolChoice")(event.target.value)}>
            ${TOOL_CHOICES.map((choice) => html`<option value=${choice}>${choice}</option>`)}
          </select>
        <//>
        <${Check} label="At most one call" testid="play-one-call" checked=${ask.oneCall} onCheck=${set("oneCall")} />
      </div>
    <//>`;
}

/** @param {{ label: string, testid: string, checked: boolean, onCheck: (checked: boolean) => void }} props */
const Check = ({ label, testid, checked, onCheck }) => html`<label class="check">
  <input type="checkbox" data-testid=${testid} checked=${checked} onChange=${(/** @type {any} */ event) => onCheck(event.target.checked)} /> ${label}
</label>`;

/**
 * JSON that is typed, folded away until someone needs it.
 * @param {{ title: string, label: string, name: string, example: string, value: string, onText: (text: string) => void, children?: any }} props
 */
function Json({ title, label, name, example, value, onText, children }) {
  const [isOpen] = useState(Boolean(value));
  const id = useId();
  const { problem } = typedJson(value);
  return html`<details open=${isOpen}>
    <summary data-testid="play-${name}-part">${title}</summary>
    <${Field} label=${label}>
      <textarea data-testid="play-${name}" rows="5" spellcheck=${false} placeholder=${example} value=${value} aria-invalid=${Boolean(problem)}
        aria-describedby=${id} onInput=${(/** @type {any} */ event) => onText(event.target.value)}></textarea>
    <//>
    <p class="bad" id=${id} role="status" data-testid="play-${name}-problem">${problem}</p>
    <p><button type="button" data-testid="play-${name}-example" disabled=${Boolean(value)} onClick=${() => onText(example)}>Take the example</button></p>
    ${children}
  </details>`;
}
