"""kill -9 of the server under load: who saw the end of an answer finds its row, once, with the counts that the answer
told; and every request that was accepted has a row."""

from __future__ import annotations

import json
import random
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from loraplex.control.db.database import Database
from loraplex.control.usage.records import CANCELLED, INTERRUPTED, Ended
from support.control.usage import rows_of
from support.servers.live_server import TINY_TORCH, LiveServer, sse_events, write_tiny_adapter

CLIENTS = 6


@dataclass
class Books:
    """What clients saw: the usage of answers whose end came, by our own id; and all ids that any answer named."""

    ended: dict[str, tuple[int, int]] = field(default_factory=dict)
    seen: set[str] = field(default_factory=set)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def note(self, answer_id: str, usage: dict[str, Any] | None) -> None:
        with self.lock:
            name = answer_id.partition("-")[2]
            self.seen.add(name)
            if usage is not None:
                self.ended[name] = (usage["prompt_tokens"], usage["completion_tokens"])


def ask(client: httpx.Client, chance: random.Random, books: Books) -> None:
    body = {
        "model": chance.choice(("tiny", "a")),
        "prompt": "x" * chance.randint(1, 60),
        "max_tokens": chance.choice((1, 5, 40, 200)),
        "n": chance.choice((1, 1, 2)),
        "ignore_eos": True,
    }
    if chance.random() < 0.4:
        answer = client.post("/v1/completions", json=body)
        if answer.status_code == 200:
            books.note(answer.json()["id"], answer.json()["usage"])
        return
    body |= {"stream": True, "stream_options": {"include_usage": True}}
    leaves_after = chance.choice((None, None, None, 0, 3))
    with client.stream("POST", "/v1/completions", json=body) as answer:
        if answer.status_code != 200:
            answer.read()
            return
        name, usage = "", None
        for number, event in enumerate(sse_events(answer.iter_lines())):
            if event == "[DONE]":
                books.note(name, usage)
                return
            assert isinstance(event, dict)
            name, usage = event.get("id", name), event.get("usage") or usage
            books.note(name, None)
            if number == leaves_after:
                return


def load(server: LiveServer, key: str, books: Books, stop: threading.Event, seed: int) -> None:
    chance = random.Random(seed)
    with server.client(key) as client:
        while not stop.is_set():
            try:
                ask(client, chance, books)
            except (httpx.HTTPError, json.JSONDecodeError):
                time.sleep(0.05)


def drill(server: LiveServer, key: str, *, kills: int, answers: int, seed: int) -> Books:
    """Kill and start again under load, at moments of chance some `answers` after a start; stopped at the end as an
    operator does."""
    chance, books, stop = random.Random(seed), Books(), threading.Event()
    threads = [
        threading.Thread(target=load, args=(server, key, books, stop, seed * 100 + number))
        for number in range(CLIENTS)
    ]
    for thread in threads:
        thread.start()
    try:
        for _ in range(kills):
            wanted = len(books.ended) + chance.randint(1, answers)
            server.wait(lambda wanted=wanted: len(books.ended) >= wanted)
            time.sleep(chance.uniform(0, 0.3))
            server.kill()
            server.start()
        wanted = len(books.ended) + answers
        server.wait(lambda: len(books.ended) >= wanted)
    finally:
        stop.set()
        for thread in threads:
            thread.join(60)
    assert server.stop() == 0
    return books


def check(books: Books, data_dir: Path) -> Counter[str]:
    """How many rows of each status there are."""
    database = Database(f"sqlite:///{data_dir / 'loraplex.db'}")
    rows: dict[str, Ended] = rows_of(database)
    database.close()
    told = {
        name: (rows[name].prompt_tokens, rows[name].completion_tokens) for name in books.ended if name in rows
    }
    assert told == books.ended
    assert {rows[name].status for name in books.ended} == {"length"}
    assert books.seen <= rows.keys()
    statuses = Counter(row.status for row in rows.values())
    assert set(statuses) <= {"length", CANCELLED, INTERRUPTED}
    assert list((data_dir / "usage").iterdir()) == [], "something was left untold"
    return statuses


@pytest.fixture
def served(tiny_model: Path, tmp_path: Path) -> Any:
    with LiveServer(tiny_model, tmp_path / "data", **TINY_TORCH) as server:
        server.create_tenant("acme")
        server.upload("acme", "a", write_tiny_adapter(tmp_path / "a"))
        yield server, server.create_key("acme")


@pytest.mark.slow
def test_kills_under_load(served: tuple[LiveServer, str]) -> None:
    server, key = served
    books = drill(server, key, kills=1, answers=12, seed=1)
    check(books, server.data_dir)


@pytest.mark.soak
def test_many_kills_under_load(served: tuple[LiveServer, str]) -> None:
    server, key = served
    books = drill(server, key, kills=10, answers=60, seed=7)
    statuses = check(books, server.data_dir)
    print(
        f"\n10 kills: {len(books.ended)} answers seen to their ends, rows {dict(statuses)}: none lost, none doubled"
    )
    assert statuses[INTERRUPTED] > 0
