"""Loraplex over quantised weights beside vLLM's CPU build and llama.cpp: same machine, same files, one load generator.

    python -m bench.beside_quantised WORKDIR --w8a8 DIRECTORY --gguf FILE.gguf [--setup] [--rounds 3] [--out FILE.json]

`--setup` makes what `bench.beside_vllm` needs, and builds llama.cpp's server from the source that llama-cpp-python
carries, for this machine's own processor. `--w8a8` is a compressed-tensors checkpoint of the small real model
(`python -m bench.cpu.w8a8_checkpoint`), which Loraplex and vLLM serve; `--gguf` a file that Loraplex and llama.cpp
serve. llama.cpp gets a slot for each request. It applies one set of adapters to a batch, so only the base is asked
of it. vLLM does not start over the checkpoint with LoRA (0.32.0), so it serves adapters in float32, which is
faster than bfloat16 for it where a processor has AVX2 alone.
`bench.beside_vllm` tells what else it gets.

Each round starts each server once. The printed table shows medians of tokens a second over the rounds.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import statistics
import subprocess
import sys
import tarfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from bench.beside_vllm import POINTS, Point, Results, ours, peer, place, run_round, running, set_up

LLAMA_SOURCE = "0.3.36"
LLAMA_PORT, SLOTS, SLOT_POSITIONS = 18403, 16, 512
OURS_BF16, OURS_W8A8, OURS_GGUF = "loraplex bfloat16", "loraplex W8A8", "loraplex GGUF"
VLLM_W8A8, VLLM_BF16, VLLM_F32 = "vLLM W8A8", "vLLM bfloat16", "vLLM float32"
VLLM_LORA, LLAMA = "vLLM float32 with LoRA", "llama.cpp GGUF"
SIDES = (OURS_BF16, OURS_W8A8, VLLM_W8A8, VLLM_BF16, VLLM_F32, VLLM_LORA, OURS_GGUF, LLAMA)
BASE_ONLY = frozenset({VLLM_W8A8, VLLM_BF16, VLLM_F32, LLAMA})


def build_llama(work: Path) -> None:
    """WORKDIR/llama/bin/llama-server, where it is missing."""
    if (work / "llama/bin/llama-server").exists():
        return
    tools = work / "llama-tools"
    subprocess.run([sys.executable, "-m", "venv", tools], check=True)
    subprocess.run([tools / "bin/pip", "install", "-q", "cmake", "ninja"], check=True)
    name = f"llama-cpp-python=={LLAMA_SOURCE}"
    download = [tools / "bin/pip", "download", "-q", "--no-deps", "--no-binary", ":all:", name, "-d", work]
    subprocess.run(download, check=True)
    with tarfile.open(next(work.glob(f"llama_cpp_python-{LLAMA_SOURCE}*.tar.gz"))) as archive:
        archive.extractall(work, filter="data")
    source = next(work.glob(f"llama_cpp_python-{LLAMA_SOURCE}*/vendor/llama.cpp"))
    options = ["CMAKE_BUILD_TYPE=Release", "GGML_NATIVE=ON", "LLAMA_CURL=OFF", "LLAMA_OPENSSL=OFF"]
    options += ["LLAMA_BUILD_TESTS=OFF", "LLAMA_BUILD_EXAMPLES=OFF", "BUILD_SHARED_LIBS=OFF"]
    options += [f"CMAKE_MAKE_PROGRAM={tools / 'bin/ninja'}"]
    command = [tools / "bin/cmake", "-S", source, "-B", work / "llama", "-G", "Ninja"]
    subprocess.run([*command, *(f"-D{option}" for option in options)], check=True)
    subprocess.run([tools / "bin/ninja", "-C", work / "llama", "llama-server"], check=True)


@contextlib.contextmanager
def llama(work: Path, file: Path, threads: int) -> Iterator[tuple[int, str]]:
    """llama.cpp's server; (port, key)."""
    command = [str(work / "llama/bin/llama-server"), "-m", str(file), "--alias", "base", "--offline"]
    command += ["--host", "127.0.0.1", "--port", str(LLAMA_PORT), "--no-webui", "--threads", str(threads)]
    command += ["--threads-http", str(4 * SLOTS)]
    command += ["--parallel", str(SLOTS), "--ctx-size", str(SLOTS * SLOT_POSITIONS)]
    with running(command, {}, f"http://127.0.0.1:{LLAMA_PORT}/health", work / "llama.log"):
        yield LLAMA_PORT, "none"


def table(points: Sequence[Point], sides: Sequence[str], results: Results) -> str:
    """Tokens a second: a row a point, a column a side."""
    lines = [f"| tokens/s | {' | '.join(sides)} |", "|---" * (len(sides) + 1) + "|"]
    for point in points:
        cells = []
        for side in sides:
            runs = [run["output_tokens_per_s"] for run in results[side].get(point.name, ())]
            cells.append(f"{statistics.median(runs):.1f} ({min(runs):.1f}–{max(runs):.1f})" if runs else "")
        lines.append(f"| {point.name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description="Loraplex over quantised weights beside vLLM and llama.cpp.")
    parser.add_argument("workdir", type=Path)
    parser.add_argument("--w8a8", type=Path, required=True, help="a compressed-tensors W8A8 checkpoint")
    parser.add_argument("--gguf", type=Path, required=True, help="a GGUF file of the same model")
    parser.add_argument("--setup", action="store_true", help="make WORKDIR first")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--points", default="0,1,2", help="by their numbers in bench.beside_vllm")
    parser.add_argument(
        "--sides", default="", help=f"only these, by their numbers from 0: {', '.join(SIDES)}"
    )
    parser.add_argument("--threads", type=int, default=2, help="llama.cpp's")
    parser.add_argument("--out", type=Path, help="write all runs as JSON")
    arguments = parser.parse_args()
    work = arguments.workdir.resolve()
    if arguments.setup:
        set_up(work)
        build_llama(work)
    w8a8, gguf = arguments.w8a8.resolve(), arguments.gguf.resolve()
    servers = {
        OURS_BF16: functools.partial(ours, work),
        OURS_W8A8: functools.partial(ours, work, model=w8a8),
        VLLM_W8A8: functools.partial(peer, work, 0, model=w8a8),
        VLLM_BF16: functools.partial(peer, work, 0),
        VLLM_F32: functools.partial(peer, work, 0, dtype="float32"),
        VLLM_LORA: functools.partial(peer, work, 16, dtype="float32"),
        OURS_GGUF: functools.partial(ours, work, model=gguf),
        LLAMA: functools.partial(llama, work, gguf, arguments.threads),
    }
    chosen = [SIDES[int(number)] for number in arguments.sides.split(",")] if arguments.sides else SIDES
    points = [POINTS[int(number)] for number in arguments.points.split(",")]
    where = place()
    print(where, flush=True)
    results: Results = {side: {point.name: [] for point in points} for side in chosen}
    for number in range(arguments.rounds):
        for side in chosen:
            done = run_round(work, points, {side: servers[side]}, BASE_ONLY)
            for name, runs in done[side].items():
                results[side][name] += runs
            if arguments.out:
                arguments.out.write_text(json.dumps({"where": where, "results": results}, indent=1) + "\n")
        print(f"round {number + 1} of {arguments.rounds}\n{table(points, chosen, results)}", flush=True)
    print(f"\nMedians (least and most) of {arguments.rounds} rounds; {where} at the start.")


if __name__ == "__main__":
    main()
