/**
 * Files of weights that no server takes, in the words of the command line and the server: `loraplex.adapters.contents`, whose
 * sentences a test compares with these.
 */

const PICKLE =
  "a pickle, as torch.save writes it (.bin, .pt, .pth), which may run code when it is read and is never opened here; convert it to " +
  'safetensors where it was made: python -c "import torch; from safetensors.torch import save_file; save_file({k: v.contiguous() ' +
  "for k, v in torch.load('adapter_model.bin', map_location='cpu', weights_only=True).items()}, 'adapter_model.safetensors')\"";
const NPZ =
  'a NumPy archive (.npz); convert it to safetensors: python -c "import numpy; from safetensors.numpy import save_file; ' +
  "save_file(dict(numpy.load('adapters.npz')), 'adapters.safetensors')\"";
const GGUF =
  "a GGUF or GGML file of llama.cpp; upload the adapter that it was converted from: adapter_config.json and " +
  "adapter_model.safetensors of PEFT";
const INDEX =
  "the JSON index of a checkpoint in several files, without any weights; PEFT saves an adapter as one file: upload that " +
  "adapter_model.safetensors";

/** How the names of a trainer's other files begin. */
const NO_WEIGHTS = /^(training_args\.|optimizer\.|scheduler\.|rng_state|scaler\.|trainer_state)/;

/** @type {[RegExp, string][]} */
const KINDS = [
  [/\.safetensors\.index\.json$/, INDEX],
  [/.\.(bin|pt|pth|pkl|pickle|ckpt)$/i, PICKLE],
  [/.\.npz$/i, NPZ],
  [/.\.gguf$/i, GGUF],
];

/**
 * Why weights under one of these names are refused; "" where none is a file of weights. One that is named as an adapter goes first.
 * @param {string[]} names
 */
export function foreignWeights(names) {
  const found = names.flatMap((name) => {
    const kind = KINDS.find(([pattern]) => pattern.test(name) && (pattern === KINDS[0][0] || !NO_WEIGHTS.test(name)));
    return kind ? [{ name, what: kind[1] }] : [];
  });
  const one = found.find(({ name }) => name.startsWith("adapter")) ?? found[0];
  return one ? `not_safetensors: there is '${one.name}' and no adapter_model.safetensors. '${one.name}' is ${one.what}` : "";
}

/** What a file is by its first 512 bytes, as Latin-1; "" for another kind. @param {string} start */
export function foreignKind(start) {
  if (/^\x80[\x02-\x05]/.test(start)) return PICKLE;
  if (/^(GGUF|algg|tjgg|fmgg|lmgg)/.test(start)) return GGUF;
  if (!/^PK(\x03\x04|\x05\x06|\x07\x08)/.test(start)) return "";
  const member = start.slice(30, 30 + start.charCodeAt(26) + 256 * start.charCodeAt(27));
  if (/(data\.pkl|\/version|\/byteorder|\/\.format_version|\/\.data\/serialization_id)$/.test(member)) return PICKLE;
  return member.endsWith(".npy") ? NPZ : "";
}
