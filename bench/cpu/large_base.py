"""A random checkpoint of Llama-3.1-8B's shapes in 8-bit codes, served: does it answer, and is its memory as planned?

    PYTHONPATH=tests python -m bench.cpu.large_base MODEL WORK [--format int8] [--layers 32]

MODEL is a directory whose tokenizer is used. The checkpoint is written into WORK unless it is there: in the format
int8, codes of compressed-tensors' int-quantized in groups of 64, embedding and head in bfloat16 (9 GB); in q4_k_m, a
GGUF file of llama.cpp's mix of that name (5 GB). Prints the seconds until the server is ready, an answer's, and the
resident memory of its processes beside what `loraplex plan` says.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

import gguf
import ml_dtypes
import numpy as np
import psutil
from numpy.typing import NDArray
from safetensors.numpy import save_file

from loraplex.app.plan.shapes import SHAPES
from support.models.gguf import blocks
from support.servers.live_server import LiveServer, checked
from support.servers.run_here import run_here

GROUP = 64
READY_S = 900.0
SIZES = {"kv_cache_memory": "1GiB", "adapter_memory": "328MiB", "adapter_cpu_memory": "512MiB"}
GGUF_NAMES = {
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}  # fmt: skip
FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
QUANTISED = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {
                "num_bits": 8, "type": "int", "symmetric": True, "dynamic": False, "strategy": "group",
                "group_size": GROUP,
            },
            "input_activations": None,
        }
    },
    "ignore": ["lm_head"],
    "quantization_status": "compressed",
}  # fmt: skip


def linears(config: dict[str, Any]) -> dict[str, tuple[int, int]]:
    """[out, in] of a layer's linears."""
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    kv = hidden // config["num_attention_heads"] * config["num_key_value_heads"]
    attention = {"q": (hidden, hidden), "k": (kv, hidden), "v": (kv, hidden), "o": (hidden, hidden)}
    mlp = {"gate": (inner, hidden), "up": (inner, hidden), "down": (hidden, inner)}
    return {
        **{f"self_attn.{name}_proj": shape for name, shape in attention.items()},
        **{f"mlp.{name}_proj": shape for name, shape in mlp.items()},
    }


def write_checkpoint(model: Path, out: Path, layers: int) -> None:
    """One file a layer, each with values of its own."""
    out.mkdir(parents=True)
    config = SHAPES["llama-3.1-8b"] | {"num_hidden_layers": layers, "quantization_config": QUANTISED}
    (out / "config.json").write_text(json.dumps(config))
    for name in FILES:
        shutil.copy(model / name, out)
    rng = np.random.default_rng(0)
    hidden, vocab = config["hidden_size"], config["vocab_size"]
    ones = np.ones(hidden, ml_dtypes.bfloat16)
    places: dict[str, str] = {}

    def save(file: str, tensors: dict[str, NDArray[Any]]) -> None:
        save_file(tensors, out / file, {"format": "pt"})
        places.update(dict.fromkeys(tensors, file))

    for layer in range(layers):
        prefix = f"model.layers.{layer}."
        tensors: dict[str, NDArray[Any]] = {
            f"{prefix}input_layernorm.weight": ones,
            f"{prefix}post_attention_layernorm.weight": ones,
        }
        for name, (rows, inputs) in linears(config).items():
            codes = np.frombuffer(rng.bytes(rows * inputs), np.int8).reshape(rows, inputs)
            scales = np.full((rows, inputs // GROUP), 1 / (74 * inputs**0.5), ml_dtypes.bfloat16)
            tensors |= {f"{prefix}{name}.weight": codes, f"{prefix}{name}.weight_scale": scales}
        save(f"layer-{layer}.safetensors", tensors)
    for name in ("model.embed_tokens", "lm_head"):
        values = rng.standard_normal((vocab, hidden), np.float32) * np.float32(0.02)
        save(f"{name}.safetensors", {f"{name}.weight": values.astype(ml_dtypes.bfloat16)})
    save("norm.safetensors", {"model.norm.weight": ones})
    index = {"metadata": {"total_size": 0}, "weight_map": places}
    (out / "model.safetensors.index.json").write_text(json.dumps(index))


def write_gguf_folder(model: Path, out: Path, layers: int) -> None:
    """A GGUF file beside config and tokenizer. Tensors of one shape and type have the same values."""
    out.mkdir(parents=True)
    config = SHAPES["llama-3.1-8b"] | {"num_hidden_layers": layers}
    (out / "config.json").write_text(json.dumps(config))
    for name in FILES:
        shutil.copy(model / name, out)
    rng = np.random.default_rng(0)
    writer = gguf.GGUFWriter(out / "base.gguf", "llama", use_temp_file=True)
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    hidden, vocab = config["hidden_size"], config["vocab_size"]
    made: dict[tuple[int, int, str], NDArray[np.uint8]] = {}

    def add(name: str, rows: int, inputs: int, kind: str) -> None:
        if (rows, inputs, kind) not in made:
            made[rows, inputs, kind] = blocks(rng, rows, inputs, kind)
        writer.add_tensor(name, made[rows, inputs, kind], raw_dtype=gguf.GGMLQuantizationType[kind])

    add("token_embd.weight", vocab, hidden, "Q4_K")
    add("output.weight", vocab, hidden, "Q6_K")
    writer.add_tensor("output_norm.weight", np.ones(hidden, np.float32))
    for layer in range(layers):
        for norm in ("attn_norm", "ffn_norm"):
            writer.add_tensor(f"blk.{layer}.{norm}.weight", np.ones(hidden, np.float32))
        for name, (rows, inputs) in linears(config).items():
            # Every other layer has the more exact type where it pays most.
            is_finer = name in ("self_attn.v_proj", "mlp.down_proj") and layer % 2 == 0
            add(f"blk.{layer}.{GGUF_NAMES[name]}.weight", rows, inputs, "Q6_K" if is_finer else "Q4_K")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def resident(pid: int) -> int:
    """Bytes of a process and its children, shared pages divided among them."""
    process = psutil.Process(pid)
    return sum(each.memory_full_info().pss for each in (process, *process.children(recursive=True)))


def planned(path: Path) -> int:
    """Bytes of weights, processes and activations."""
    done = run_here(
        "plan", "--model", str(path), "--gpu", "cpu", "--gpu-memory", "23GiB", "--adapters", "4", "--json"
    )
    assert done.code == 0, done.stderr
    found = json.loads(done.stdout)
    print(f"planned: weights {found['weights'] / 1e9:.2f} GB")
    return int(found["weights"] + found["reserve"] + found["activations"])


WRITERS = {"int8": write_checkpoint, "q4_k_m": write_gguf_folder}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("work", type=Path)
    parser.add_argument("--format", choices=WRITERS, default="int8")
    parser.add_argument("--layers", type=int, default=32)
    options = parser.parse_args()
    path = options.work / f"{options.format}-{options.layers}"
    if not path.exists():
        WRITERS[options.format](options.model, path, options.layers)
    expected = planned(path)
    with tempfile.TemporaryDirectory() as data:
        server = LiveServer(path, Path(data) / "data", threads=2, max_num_seqs=16, **SIZES)
        try:
            serve(server, path.name, expected)
        finally:
            server.reap()


def serve(server: LiveServer, name: str, expected: int) -> None:
    began = time.perf_counter()
    server.start(wait=False)
    server.wait_ready(READY_S)
    print(f"ready after {time.perf_counter() - began:.0f} s, {resident(server.pid) / 1e9:.2f} GB resident")
    server.create_tenant("acme")
    began = time.perf_counter()
    body = {"model": name, "prompt": "one " * 20, "max_tokens": 16, "ignore_eos": True}
    with server.client(server.create_key("acme"), timeout=READY_S) as client:
        usage = checked(client.post("/v1/completions", json=body))["usage"]
    print(f"{usage}, {time.perf_counter() - began:.1f} s")
    found = resident(server.pid)
    print(f"{found / 1e9:.2f} GB resident, {expected / 1e9:.2f} GB planned: {found / expected:.3f}")


if __name__ == "__main__":
    main()
