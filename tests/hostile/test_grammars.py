"""Schemas, patterns and grammars made to cost much, or to break what reads them, over HTTP."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import httpx
import psutil
import pytest

from loraplex.serving.forks.messages import JobDone
from loraplex.serving.forks.process import ForkProcess
from loraplex.serving.grammar.checker import GrammarChecker, GrammarLimits
from support.http.data_plane import BASE, DataPlane, running_data_plane
from support.models.byte_tokenizer import write_byte_tokenizer
from support.waiting import eventually

KEY, OTHER = {"Authorization": "Bearer lpx_acme"}, {"Authorization": "Bearer lpx_rival"}
LIMITS = GrammarLimits(cpu_s=0.3, memory=256 << 20, burst_s=60)
MAX_BYTES_GROWN = 64 << 20


def nested(word: str, levels: int) -> Any:
    schema: Any = {"type": "string"}
    for _ in range(levels):
        schema = {word: {"a": schema} if word == "properties" else schema}
    return schema


def by_schema(schema: Any) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}}


def lark(text: str) -> dict[str, Any]:
    return {"structured_outputs": {"grammar": text}}


HOSTILE: dict[str, dict[str, Any]] = {
    "22 patterns at once": by_schema(
        {"allOf": [{"pattern": f"x{chr(97 + i) * 2}"} for i in range(22)], "type": "string"}
    ),
    "overlapping patterns": by_schema(
        {"allOf": [{"pattern": f"^(a|b)*{'ab' * i}"} for i in range(20)], "type": "string"}
    ),
    "64 KiB of an enum": by_schema({"enum": [f"{i:08x}" for i in range(5800)]}),
    "an enum of long texts": by_schema({"enum": ["é" * 15_000 + str(i) for i in range(2)]}),
    "2,000 properties": by_schema(
        {"properties": {f"p{i}": {"pattern": f"^{i}"} for i in range(2000)}, "type": "object"}
    ),
    "1,200 objects to choose from": by_schema({"anyOf": [{"required": [f"k{i}"]} for i in range(1200)]}),
    "a product of choices": by_schema(
        {
            "allOf": [
                {"anyOf": [{"properties": {f"a{i}{j}": {"const": j}}} for j in range(6)]} for i in range(12)
            ]
        }
    ),
    "a large multiple": by_schema({"type": "integer", "multipleOf": 9_999_991}),
    "a tiny multiple": by_schema({"type": "number", "multipleOf": 1e-300}),
    "wide bounds": by_schema({"type": "number", "minimum": 1e-300, "maximum": 1e300}),
    "a long string": by_schema({"type": "string", "minLength": 1_000_000, "maxLength": 2_000_000}),
    "a long array": by_schema({"type": "array", "minItems": 1 << 62}),
    "64 levels": by_schema(nested("items", 63)),
    "a schema of itself": by_schema({"$ref": "#"}),
    "a cycle of references": by_schema(
        {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}
    ),
    "references that double": by_schema(
        {
            "$defs": {f"d{i}": {"allOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 2} for i in range(40)}
            | {"d40": {}},
            "$ref": "#/$defs/d0",
        }
    ),
    "a file": by_schema({"$ref": "file:///etc/passwd"}),
    "another server": by_schema({"$ref": "http://127.0.0.1:1/x"}),
    "an id elsewhere": by_schema({"$id": "http://127.0.0.1:1/x", "$ref": "y"}),
    "words as numbers": by_schema({"minLength": "a", "type": "string"}),
    "numbers beyond all": by_schema({"minLength": 10**4000, "type": "string"}),
    "negative lengths": by_schema({"minLength": -5, "type": "string"}),
    "control characters": by_schema({"properties": {"\x00\x1b[31m": {"const": "\x00"}}, "type": "object"}),
    "unicode": by_schema({"type": "string", "pattern": r"^\p{L}{1,2000}[𝒜-𝓏]*(?i:ßſK)$"}),
    "a pattern in a pattern": {"structured_outputs": {"regex": "((a{100}){100}){100}"}},
    "a catastrophic pattern": {"structured_outputs": {"regex": "(a|a)*(a+)+(.*a.{30}){30}b"}},
    "a deep pattern": {"structured_outputs": {"regex": "(" * 4000 + "a" + ")" * 4000}},
    "many states": {"structured_outputs": {"regex": "(.|\n)*a(.|\n){24}"}},
    "a long dictated text": {"structured_outputs": {"regex": "a{16000}b"}},
    "a long dictated text in a rule": lark('start: A{16000}\nA: "ab"'),
    "a long constant": by_schema({"const": "xy z" * 4000}),
    "constants that multiply": by_schema(
        {
            "$defs": {"a": {"const": "x" * 500}, "b": {"items": {"$ref": "#/$defs/a"}, "minItems": 60}},
            "type": "array",
            "items": {"$ref": "#/$defs/b"},
            "minItems": 60,
        }
    ),
    "4,096 choices": {"structured_outputs": {"choice": [f"{i:012x}" for i in range(4096)]}},
    "an endless rule": lark("start: start"),
    "an ambiguous rule": lark('start: s s s s\ns: s s s | "a"? | ("b" s)*'),
    "a million times": lark('start: ("a" | "b"){1000000}'),
    "many rules": lark(
        "start: r0\n" + "\n".join(f'r{i}: "x"* r{(i * 7 + 1) % 1500} | "y{i}"' for i in range(1500))
    ),
    "deep brackets": lark("start: " + "(" * 30_000 + '"a"' + ")" * 30_000),
    "deep GBNF": lark("root ::= " + "(" * 30_000 + '"a"' + ")" * 30_000),
    "GBNF without an end": lark("root ::= root"),
    "a schema in Lark": lark('start: %json {"$ref": "file:///etc/passwd"}'),
    "no rule": lark("%%%"),
}


@pytest.fixture(scope="module")
def plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DataPlane]:
    model = write_byte_tokenizer(tmp_path_factory.mktemp("model"))
    checker = GrammarChecker(str(model), limits=LIMITS)
    with running_data_plane(model, grammars=checker) as running:
        ask(running, KEY, {"response_format": {"type": "json_object"}})
        yield running
        running.server.call(checker.close)


def ask(plane: DataPlane, key: dict[str, str], fields: dict[str, Any]) -> httpx.Response:
    body = {"model": BASE, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2, **fields}
    return plane.http.post(
        f"{plane.url}/v1/chat/completions", content=json.dumps(body), headers=KEY | key, timeout=120
    )


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_schema_is_answered_within_its_costs(plane: DataPlane, name: str) -> None:
    """With 200, where it can be built in time, or a 400 that names the field; and the next request is served."""
    checker = plane.services.grammars
    assert isinstance(checker, GrammarChecker)
    process = psutil.Process(checker.pool.process.pid)  # type: ignore[union-attr]
    before = process.memory_info().rss
    answer = ask(plane, KEY, HOSTILE[name])
    assert answer.status_code in (200, 400), answer.text
    if answer.status_code == 400:
        error = answer.json()["error"]
        assert error["code"] == "invalid_value"
        assert error["param"].startswith(tuple(HOSTILE[name]))
        assert len(answer.content) < 2000
        assert error["message"].isprintable()
    assert process.is_running(), "the process has built it itself"
    assert process.memory_info().rss < before + MAX_BYTES_GROWN
    assert ask(plane, OTHER, {"structured_outputs": {"regex": "a+"}}).status_code == 200


def test_no_fork_is_left(plane: DataPlane) -> None:
    checker = plane.services.grammars
    assert isinstance(checker, GrammarChecker)
    process = psutil.Process(checker.pool.process.pid)  # type: ignore[union-attr]
    ask(
        plane,
        KEY,
        by_schema(
            {**HOSTILE["22 patterns at once"]["response_format"]["json_schema"]["schema"], "title": "x"}
        ),
    )
    eventually(lambda: not process.children())


def test_client_that_goes_away_leaves_nothing_behind(
    plane: DataPlane, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = HOSTILE["22 patterns at once"]["response_format"]["json_schema"]["schema"]
    checker = plane.services.grammars
    assert isinstance(checker, GrammarChecker)
    check, all_left = ForkProcess.run, asyncio.Event()

    async def slower(process: ForkProcess, body: bytes, *, owner: str = "", weight: int = 1) -> JobDone:
        done = await check(process, body, owner=owner, weight=weight)
        if b"left " in body:  # a busy machine may hold up the client for longer than the check takes
            await all_left.wait()
        return done

    monkeypatch.setattr(ForkProcess, "run", slower)

    async def leave() -> None:
        async with httpx.AsyncClient(timeout=120) as client:
            for number in range(6):
                body = {"model": BASE, "messages": [{"role": "user", "content": "hi"}]}
                body |= by_schema({**slow, "title": f"left {number}"})
                url = f"{plane.url}/v1/chat/completions"
                asking = asyncio.create_task(client.post(url, json=body, headers=KEY))
                await asyncio.to_thread(eventually, lambda number=number: len(checker._checks) == number + 1)
                asking.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await asking

    asyncio.run(leave())
    eventually(lambda: plane.drain.in_flight == 0)
    plane.on_loop(all_left.set)
    assert ask(plane, OTHER, {"structured_outputs": {"regex": "b+"}}).status_code == 200
    plane.settle_all(60)
