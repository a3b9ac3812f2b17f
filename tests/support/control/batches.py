"""Batches without an engine: files of numbered requests, and answers that echo them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable
from typing import Any

from loraplex.control.batches.batches import Batches, BatchInfo
from loraplex.control.batches.files import Files
from loraplex.control.batches.work import Line, Result, Work
from loraplex.control.db.database import Database

CHAT = "/v1/chat/completions"


def request_line(number: int, **changes: Any) -> bytes:
    request = {"custom_id": f"r{number}", "method": "POST", "url": CHAT, "body": {"number": number}}
    return json.dumps(request | changes).encode() + b"\n"


def make_batch(
    database: Database, lines: Iterable[bytes], tenant: str = "acme", key: str = "key-acme"
) -> BatchInfo:
    upload = Files(database).begin(tenant, "in.jsonl")
    for line in lines:
        upload.add(line)
    return Batches(database).create(tenant, key, upload.finish().id, CHAT)


def written(database: Database, tenant: str, file_id: str | None) -> list[dict[str, Any]]:
    """The lines of an output or error file."""
    if file_id is None:
        return []
    files = Files(database)
    content = b"".join(files.content(files.get(tenant, file_id)))
    return [json.loads(line) for line in content.splitlines()]


class EchoAnswers:
    """Answers each line with itself, after a turn of the loop. `runs` counts how often each was answered."""

    def __init__(self) -> None:
        self.runs: dict[int, int] = {}

    async def answer(self, work: Work, line: Line) -> Result:
        await asyncio.sleep(0)
        self.runs[line.number] = self.runs.get(line.number, 0) + 1
        return Result(line.number, line.number % 10 == 0, line.data.strip() + b"\n")
