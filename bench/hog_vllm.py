"""A short chat beside four prompts of 6,000 tokens, on Loraplex and on vLLM's CPU build: one machine, one client.

    PYTHONPATH=tests python -m bench.hog_vllm WORKDIR [--setup] [--requests 60] [--rounds 1] [--only 0,2]
        [--out FILE.json]

WORKDIR is that of `bench.beside_vllm`, and `--setup` makes it. vLLM gets bfloat16 and all cores, and in turn each of
the settings below: as it is, with the chat at the better priority in steps of several sizes, and with a cap on the
tokens of one prompt in a step, so that four prompts leave room for the chat's. Ends with 1 unless the chat's median
first token, and the median of its longest gaps, are at most a quarter of those of vLLM's best setting for each.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, replace
from itertools import count
from pathlib import Path

from bench.beside_vllm import peer, place, set_up
from bench.hogs.figures import Spread, hog_table
from bench.hogs.mixes import EIGHT
from bench.hogs.servers import in_turns, make_target, serving
from bench.hogs.tenants import Seen, Target, beside, chat

OURS = "loraplex"
PRIORITY = "--scheduling-policy priority"
PEERS = (
    "",
    f"{PRIORITY} --max-num-batched-tokens 2048",
    f"{PRIORITY} --max-num-batched-tokens 512",
    f"{PRIORITY} --max-num-batched-tokens 256",
    f"{PRIORITY} --max-num-batched-tokens 512 --long-prefill-token-threshold 96",
    f"{PRIORITY} --max-num-batched-tokens 256 --long-prefill-token-threshold 40",
)
AIM = 0.25
SETTLE_S, LIMIT_S = 5.0, 60.0
WINDOW_S = 40.0
"""The prompts that end are counted for so long at least."""
TOKENS, ALONE = 16, 20


@contextmanager
def server_of(side: str, work: Path) -> Iterator[Target]:
    """`side` is OURS or vLLM's options."""
    if side == OURS:
        with serving((work / "smollm2-hf").resolve(), "") as server:
            yield make_target(server, 1)
        return
    with peer(work, 0, options=["--max-model-len", "8192", *side.split()]) as (port, key):
        yield Target(f"http://127.0.0.1:{port}", "base", (key, key))


def measure_side(side: str, work: Path, requests: int) -> tuple[dict[str, Seen], float]:
    """Measure what the chat waits alone and beside the prompts, and how many of these end in a minute."""
    # vLLM refuses a priority where its policy has none.
    has_priorities = PRIORITY in side
    mix = EIGHT["long"]
    if has_priorities:
        mix = replace(mix, body=mix.body | {"priority": 10})
    fields = {"priority": 0} if has_priorities else {}
    turns = count()
    with server_of(side, work) as target:

        def ask(number: int) -> Seen:
            return chat(target, number, turns, tokens=TOKENS, limit_s=LIMIT_S, **fields)

        ask(3)
        told = {"alone": ask(ALONE)}
        with beside(target, mix, SETTLE_S) as ended:
            before, began = ended(), time.perf_counter()
            told["long"] = ask(requests)
            time.sleep(max(0.0, WINDOW_S - (time.perf_counter() - began)))
            rate = (ended() - before) / (time.perf_counter() - began) * 60
    return told, rate


def quarter(seen: Mapping[str, Mapping[str, Seen]]) -> dict[str, float]:
    """Our median over that of the peer's best setting, for the first token and the gap."""
    told = {}
    for what in ("waits", "gaps"):
        medians = {side: Spread.of(getattr(of["long"], what)).median for side, of in seen.items()}
        told[what] = medians.pop(OURS) / min(medians.values())
    return told


def main() -> None:
    parser = argparse.ArgumentParser(description="A short chat beside long prompts, here and on vLLM.")
    parser.add_argument("workdir", type=Path)
    parser.add_argument("--setup", action="store_true", help="make WORKDIR first")
    parser.add_argument("--requests", type=int, default=60, help="of the chat beside the prompts, at most")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--only", default="", help="of vLLM's settings, by their numbers from 0")
    parser.add_argument("--out", type=Path, help="write all figures as JSON")
    arguments = parser.parse_args()
    work = arguments.workdir.resolve()
    if arguments.setup:
        set_up(work)
    peers = [PEERS[int(number)] for number in arguments.only.split(",")] if arguments.only else PEERS
    where = place()
    seen: dict[str, dict[str, Seen]] = {side: {"alone": Seen(), "long": Seen()} for side in (OURS, *peers)}
    rates: dict[str, list[float]] = {side: [] for side in seen}
    for turn in in_turns(list(seen), arguments.rounds):
        for side in turn:
            told, rate = measure_side(side, work, arguments.requests)
            for name, of in told.items():
                seen[side][name].add(of)
            rates[side].append(rate)
            print(
                f"{hog_table({side: told}, {})}\n{rate:.1f} long prompts a minute",
                file=sys.stderr,
                flush=True,
            )
    named = {side if side == OURS else f"vLLM `{side}`": of for side, of in seen.items()}
    print(hog_table(named, {"alone": "nobody", "long": EIGHT["long"].title}))
    print("\n| server | long prompts a minute |\n|---|---|")
    for name, of_rounds in zip(named, rates.values(), strict=True):
        print(f"| {name} | {', '.join(f'{rate:.1f}' for rate in of_rounds)} |")
    ratios = quarter(seen)
    print(f"\nOurs over vLLM's best: first token {ratios['waits']:.2f}, gap {ratios['gaps']:.2f}; {where}")
    if arguments.out:
        told_all = {side: {name: asdict(part) for name, part in of.items()} for side, of in seen.items()}
        arguments.out.write_text(
            json.dumps({"where": where, "seen": told_all, "rates": rates}, indent=1) + "\n"
        )
    sys.exit(0 if max(ratios.values()) <= AIM else 1)


if __name__ == "__main__":
    main()
