"""The time of a push by stage, from the upload to the first token, beside the least that it could take; and pushes at a
fixed rate for minutes.

    PYTHONPATH=tests:. python -m bench.push MODEL [--pushes 8] [--streams 0] [--threads 1]
    PYTHONPATH=tests:. python -m bench.push MODEL --rate 10 --minutes 10 --streams 16

MODEL is the directory of SmolLM2-135M-Instruct. A real server with its engine gets adapters of rank 16 on all seven
linears, each with values of its own, one after the other: in turns an upload of a name, and a push of other values to
a series, whose numbers are checked for the first version alone. An upload has three stages that a client sees: the
upload until its answer (`?wait=false`), the check of its numbers, and the first token of a request for the new version.
A push to a series has two. `--streams` completions are streamed beside it. For each stage the table has
seconds of the wall, median and 99th percentile, and medians of the processor's, in the server and in the engine (with
streams the engine's are theirs too): others may use the machine beside the bench, and only the wall has their time in
it.

The second table has the parts of the server's work on the same files, called here in one thread, in seconds of that
thread and of the wall. The floor is the bytes hashed once, copied once, and the first token of a version that is on the
device.

With `--rate` it is the soak of `soak`.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from bench.push.client import SCOPES, Pushes, write_adapter
from bench.push.parts import Parts
from bench.push.soak import Soak, percentile
from bench.push.streams import Streams, tokens_per_s
from loraplex.adapters.store.files import CONFIG_NAME, TENSORS_NAME
from support.servers.live_server import SMALL, LiveServer

QUIET_S = 10.0
"""Seconds for which streams are measured before the pushes."""


def print_table(columns: str, rows: dict[str, Sequence[float]]) -> None:
    print(f"\n| {columns} |\n|{'---|' * (columns.count('|') + 1)}")
    for name, values in rows.items():
        print(f"| {name} | {' | '.join(f'{value:.3f}' for value in values)} |")


def medians(found: Sequence[tuple[float, ...]]) -> list[float]:
    return [statistics.median(each) for each in zip(*found, strict=True)]


def push_in_turns(server: LiveServer, work: Path, num_pushes: int, num_streams: int) -> None:
    """Uploads and pushes to a series in turns, and the table of them."""
    uploads = [write_adapter(work / str(seed), seed) for seed in range(num_pushes + 1)]
    sizes = {len(files[TENSORS_NAME]) for files in uploads}
    server.create_tenant("acme")
    key = server.create_key("acme", scopes=SCOPES)
    pushes = Pushes(server, key)
    pushes.begin_series(uploads[0][CONFIG_NAME])

    def push(number: int) -> None:
        pushes.push(uploads[number])
        pushes.push_to_series(write_adapter(work / f"lane{number}", 1000 + number)[TENSORS_NAME])

    push(0)  # the first ones fill caches, and the series' is checked
    pushes.spans.clear()
    pushes.loads.clear()
    with Streams(lambda: server.client(key), ["run@v1"], num_streams) as streams:
        before = tokens_per_s(streams, QUIET_S) if num_streams else 0.0
        tokens, began = streams.tokens, time.monotonic()
        for number in range(1, num_pushes + 1):
            push(number)
        beside = (streams.tokens - tokens) / (time.monotonic() - began)
    print(f"{platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, bytes {sizes}")
    if num_streams:
        print(
            f"{num_streams} streams: {before:.1f} tokens a second without pushes, {beside:.1f} beside them, in turns."
        )
    walls = {name: [span[0] for span in found] for name, found in pushes.spans.items()}
    print_table(
        "stage | wall p50 s | wall p99 s | server s | engine s",
        {
            name: [statistics.median(walls[name]), percentile(walls[name], 0.99), *medians(found)[1:]]
            for name, found in pushes.spans.items()
        },
    )
    loads = ", ".join(f"{stage} {statistics.median(found):.3f}" for stage, found in pushes.loads.items())
    print(f"\nThe engine's load by stage, seconds of the wall: {loads}.")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model", type=lambda given: Path(given).resolve())
    parser.add_argument("--pushes", type=int, default=8)
    parser.add_argument("--streams", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rate", type=float, help="pushes a second of a soak")
    parser.add_argument("--minutes", type=float, default=10.0, help="of a soak")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        work = Path(scratch)
        with LiveServer(arguments.model, work / "data", threads=arguments.threads, **SMALL) as server:
            if arguments.rate:
                Soak(server, work).run(arguments.rate, 60 * arguments.minutes, arguments.streams)
                return
            push_in_turns(server, work, arguments.pushes, arguments.streams)
        parts = Parts(arguments.model, work)
        for number in range(arguments.pushes + 1):
            parts.take(write_adapter(work / str(number), number))
    print_table(
        "part | thread s | wall s | most thread s",
        {name: [*medians(found), max(span[0] for span in found)] for name, found in parts.spans.items()},
    )


if __name__ == "__main__":
    main()
