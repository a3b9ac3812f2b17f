"""Prompt tokens that Loraplex and vLLM's CPU build compute, where many adapters' prompts share one memory.

    PYTHONPATH=.:tests python -m bench.prefixes_beside_vllm WORKDIR [--requests 160] [--sides 0,1,2,3]

32 adapters (of four tenants where a server knows tenants), each with a prompt of 256 tokens of its own, are asked for
by Zipf(1.1), four at a time; each request has 16 tokens that no other has. Each prompt is asked for once before the
count begins. The memory for computed prompts is that of 4 prompts on the device, and that of 36 prompts behind it; a
side that has no memory behind gets all of it, or the first part, on the device. Both servers count in `usage` what
they found. The figures are counts: load on the machine does not change them. WORKDIR is that of `beside_vllm`.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path

import httpx

from bench.beside_vllm import NUM_ADAPTERS, ours, peer, push, set_up
from loraplex.kernels.attention import BLOCK_SIZE

PROMPT, OWN, EXPONENT, AT_A_TIME = 256, 16, 1.1, 4
DEVICE, BEHIND = 4, 36
TENANTS = 4
POSITION_BYTES = 30 * 2 * 3 * 64 * 2
"""Keys and values of a position of SmolLM2-135M in bfloat16."""


def room(prompts: int) -> int:
    """Blocks for this many prompts, and for the requests that run."""
    return (prompts * PROMPT + AT_A_TIME * (PROMPT + 10 * OWN)) // BLOCK_SIZE


def memory(blocks: int) -> str:
    return f"{blocks * BLOCK_SIZE * POSITION_BYTES}B"


Served = AbstractContextManager[tuple[int, Sequence[str]]]
"""The port, and keys: adapter N is asked for with the key at N modulo their count."""


@contextlib.contextmanager
def ours_with(work: Path, blocks: int, behind: int = 0) -> Iterator[tuple[int, Sequence[str]]]:
    options = ["--kv-cache-memory", memory(blocks), "--max-num-seqs", "8", "--kv-host-memory", memory(behind)]
    with ours(work, adapters=0, options=options) as (port, _):
        yield port, [push(work, f"t{n}", range(n, NUM_ADAPTERS, TENANTS)) for n in range(TENANTS)]


@contextlib.contextmanager
def peer_with(work: Path, blocks: int, *more: str) -> Iterator[tuple[int, Sequence[str]]]:
    # This build's attention takes multiples of 32 alone.
    options = ["--block-size", "32", "--num-gpu-blocks-override", str(blocks // 2), "--max-num-seqs", "8"]
    with peer(work, 8, options=[*options, "--enable-prompt-tokens-details", *more]) as (port, key):
        yield port, [key]


def sides() -> dict[str, Callable[[Path], Served]]:
    device, everything = room(DEVICE), room(DEVICE + BEHIND)
    behind = everything - device
    gib = behind * BLOCK_SIZE * POSITION_BYTES / (1 << 30)
    return {
        "Loraplex, host memory": lambda work: ours_with(work, device, behind),
        "Loraplex, the device alone": lambda work: ours_with(work, device),
        "vLLM, offloading": lambda work: peer_with(work, device, "--kv-offloading-size", f"{gib:.3f}"),
        "vLLM, the device alone": lambda work: peer_with(work, device),
        "vLLM, all of the memory on the device": lambda work: peer_with(work, everything),
    }


def counted(port: int, keys: Sequence[str], requests: int) -> tuple[int, int]:
    """Prompt tokens sent, and those that were computed."""
    rng = random.Random(1)
    prompts = [[rng.randrange(3, 40_000) for _ in range(PROMPT)] for _ in range(NUM_ADAPTERS)]
    weights = [1 / (rank + 1) ** EXPONENT for rank in range(NUM_ADAPTERS)]
    chosen = [*range(NUM_ADAPTERS), *rng.choices(range(NUM_ADAPTERS), weights, k=requests)]
    asked = [(number, prompts[number] + [rng.randrange(3, 40_000) for _ in range(OWN)]) for number in chosen]
    with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=600) as client:

        def ask(question: tuple[int, list[int]]) -> tuple[int, int]:
            number, prompt = question
            body = {"model": f"a{number}", "prompt": prompt, "max_tokens": 4, "temperature": 0}
            headers = {"authorization": f"Bearer {keys[number % len(keys)]}"}
            answer = client.post("/v1/completions", json=body, headers=headers)
            usage = answer.raise_for_status().json()["usage"]
            found = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
            return usage["prompt_tokens"], usage["prompt_tokens"] - found

        with ThreadPoolExecutor(AT_A_TIME) as pool:
            told = list(pool.map(ask, asked))[NUM_ADAPTERS:]
    return sum(sent for sent, _ in told), sum(computed for _, computed in told)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("workdir", type=Path)
    parser.add_argument("--requests", type=int, default=160)
    parser.add_argument("--sides", default="0,1,2,3,4", help="only these, by their numbers from 0")
    given = parser.parse_args()
    work = given.workdir.resolve()
    set_up(work)
    names = list(sides().items())
    print("| | prompt tokens computed | share | s |\n|---|---|---|---|")
    for name, side in (names[int(number)] for number in given.sides.split(",")):
        try:
            with side(work) as (port, keys):
                begun = time.monotonic()
                sent, computed = counted(port, keys, given.requests)
        except SystemExit as error:
            print(f"| {name} | {error} | | |", flush=True)
            continue
        seconds = time.monotonic() - begun
        print(f"| {name} | {computed:,} of {sent:,} | {computed / sent:.2f} | {seconds:.0f} |", flush=True)


if __name__ == "__main__":
    main()
