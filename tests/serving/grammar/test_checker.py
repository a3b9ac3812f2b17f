"""Grammars are checked in a process of their own, whatever they cost there."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator, Awaitable
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
import pytest_asyncio

from loraplex.engine.ipc.framing import MAX_FRAME_BYTES
from loraplex.serving.errors import GrammarRefused, GrammarsUnavailable, GrammarTimeSpent
from loraplex.serving.forks.messages import JobDone
from loraplex.serving.forks.process import ForkProcess
from loraplex.serving.grammar import builders
from loraplex.serving.grammar.checker import (
    CPU_SHARE,
    GrammarChecker,
    GrammarLimits,
)
from loraplex.serving.grammar.messages import Check
from support.models.byte_tokenizer import EOS_ID, write_byte_tokenizer
from support.models.matching import takes

MAX_WAITING = 32
SLOW = {"type": "string", "allOf": [{"pattern": f"x{chr(97 + i) * 2}"} for i in range(22)]}
"""Each further pattern doubles the time that it takes to build: minutes."""


def slow(number: int) -> str:
    return builders.json_schema({**SLOW, "title": str(number)})


def wide(names: int) -> str:
    """Takes some 10 MB to build, with 900 names."""
    names_of = [f"p{number}" for number in range(names)]
    properties = {name: {"type": "integer", "minimum": len(name)} for name in names_of}
    return builders.json_schema({"type": "object", "properties": properties, "required": names_of})


class Watched:
    """A checker with what it has told of itself. `now` is its clock."""

    def __init__(self, model: Path, limits: GrammarLimits | None = None) -> None:
        self.outcomes: list[str] = []
        self.lines: list[tuple[str, Any]] = []
        self.now = 0.0
        self.checker = GrammarChecker(
            str(model),
            eos_ids=(EOS_ID,),
            limits=limits,
            on_check=lambda outcome, seconds: self.outcomes.append(outcome),
            log=lambda event, **fields: self.lines.append((event, fields["reason"])),
            clock=lambda: self.now,
        )

    @property
    def pid(self) -> int:
        assert self.checker.pool.process is not None
        return self.checker.pool.process.pid

    @property
    def forks(self) -> set[int]:
        """The processes that check."""
        return {fork.pid for fork in psutil.Process(self.pid).children()}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_byte_tokenizer(tmp_path_factory.mktemp("model"))


@pytest_asyncio.fixture
async def watched(model: Path) -> AsyncIterator[Watched]:
    made = Watched(model, GrammarLimits(cpu_s=0.2, max_waiting=MAX_WAITING, burst_s=0.5))
    yield made
    await made.checker.close()


async def reason_of(check: Awaitable[Any]) -> str:
    with pytest.raises(GrammarRefused) as caught:
        await check
    return caught.value.message


async def test_grammars_are_accepted_or_refused_with_the_librarys_reason(watched: Watched) -> None:
    check = watched.checker.check
    await check("a", builders.json_object())
    await check("a", builders.regex("[a-z]+"))
    await check("a", builders.choice(["yes", "no"]))
    assert "not" in await reason_of(check("a", builders.json_schema({"not": {"type": "integer"}})))
    assert "look-around" in await reason_of(check("a", builders.regex("(?=a)b")))
    assert "lexer error" in await reason_of(check("a", builders.lark('start: "a')))
    assert "no start rule" in await reason_of(check("a", builders.lark('a: "a"')))
    assert watched.outcomes == ["accepted"] * 3 + ["refused"] * 4


@pytest.mark.parametrize(
    "schema",
    [{"$ref": "#"}, {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}],
)
async def test_schema_that_only_refers_to_itself_is_refused(watched: Watched, schema: Any) -> None:
    assert "no text fits" in await reason_of(watched.checker.check("a", builders.json_schema(schema)))


async def test_recursive_schema_that_can_end_is_accepted(watched: Watched) -> None:
    tree = {"type": "object", "properties": {"child": {"$ref": "#"}, "name": {"type": "string"}}}
    await watched.checker.check("a", builders.json_schema(tree))


async def test_second_check_of_a_tenant_is_answered_from_the_cache(watched: Watched) -> None:
    refused = builders.json_schema({"not": {"type": "integer"}})
    for _ in range(3):
        await watched.checker.check("a", builders.json_object())
        assert "not" in await reason_of(watched.checker.check("a", refused))
    assert watched.outcomes == ["accepted", "refused"]
    await watched.checker.check("b", builders.json_object())  # tells nobody what others have asked
    assert len(watched.outcomes) == 3


async def test_equal_grammars_at_once_are_checked_once_and_outlive_a_caller(watched: Watched) -> None:
    checks = [asyncio.create_task(watched.checker.check("a", builders.json_object())) for _ in range(5)]
    await asyncio.sleep(0)
    checks[0].cancel()
    ended = await asyncio.gather(*checks, return_exceptions=True)
    assert isinstance(ended[0], asyncio.CancelledError)
    assert ended[1:] == [None] * 4
    assert watched.outcomes == ["accepted"]


async def test_grammar_that_takes_too_long_to_build_is_refused_and_the_process_stays(
    watched: Watched,
) -> None:
    await watched.checker.check("a", builders.json_object())
    pid = watched.pid
    assert "more than 0.2 s of processing time" in await reason_of(watched.checker.check("a", slow(1)))
    await watched.checker.check("a", builders.regex("b"))
    assert watched.pid == pid
    assert watched.outcomes == ["accepted", "too_costly", "accepted"]


async def test_grammar_whose_first_masks_are_slow_is_refused(watched: Watched) -> None:
    rules = 'start: s s s s s s\ns: s s s | "a"? | ("b" s)*'
    many = "start: " + " | ".join(f"r{i}" for i in range(900))
    many += "".join(f'\nr{i}: "x"* r{(i * 7 + 1) % 900}? "y{i}"' for i in range(900))
    await watched.checker.check("a", builders.lark(rules))
    assert await reason_of(watched.checker.check("a", builders.lark(many)))


@pytest.mark.parametrize("before", ["", "/[ab]/", f'/[ab]/ "{"x" * 2000}" /[cd]{{3}}/ "{"y" * 2000}" /[ef]/'])
async def test_grammar_that_dictates_too_long_a_text_is_refused(watched: Watched, before: str) -> None:
    """Also behind tokens that are sampled, and texts that are short enough."""
    check = watched.checker.check
    reason = await reason_of(check("a", builders.lark(f'start: {before} "{"c" * 9000}"')))
    assert "dictates 9000 bytes at one place, and may dictate 8192" in reason
    await check("a", builders.lark(f'start: {before} "{"c" * 2000}"'))


async def test_grammar_that_takes_too_much_memory_is_refused(model: Path) -> None:
    watched = Watched(model, GrammarLimits(cpu_s=20, memory=16 << 20))
    try:
        assert "more than 16 MiB of memory" in await reason_of(watched.checker.check("a", slow(1)))
        await watched.checker.check("a", builders.json_object())
    finally:
        await watched.checker.close()


async def test_slow_grammars_of_one_tenant_do_not_hold_up_another(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[str] = []
    check = ForkProcess.run

    async def note(process: ForkProcess, body: bytes, *, owner: str = "", weight: int = 1) -> JobDone:
        begun.append(msgspec.msgpack.decode(body, type=Check).text)
        return await check(process, body, owner=owner, weight=weight)

    monkeypatch.setattr(ForkProcess, "run", note)
    hostile = [asyncio.create_task(watched.checker.check("hostile", slow(number))) for number in range(4)]
    await asyncio.sleep(0)
    await watched.checker.check("other", builders.json_object())
    # It is begun beside the first one, whatever of both ends sooner on a busy machine.
    assert begun[:2] == [slow(0), builders.json_object()]
    ended = await asyncio.gather(*hostile, return_exceptions=True)
    assert all(isinstance(error, GrammarRefused | GrammarTimeSpent) for error in ended)
    assert watched.outcomes.count("accepted") == 1


async def test_tenant_that_has_spent_its_time_is_told_when_to_come_again(watched: Watched) -> None:
    number = 0
    with pytest.raises(GrammarTimeSpent) as caught:
        for number in range(100):
            await reason_of(watched.checker.check("hostile", slow(number)))
    assert number >= 2
    assert caught.value.is_own
    with pytest.raises(GrammarTimeSpent):
        await watched.checker.check("hostile", builders.json_object())
    await watched.checker.check("other", builders.json_object())
    watched.now += caught.value.retry_after_s - 0.5
    with pytest.raises(GrammarTimeSpent):
        await watched.checker.check("hostile", builders.json_object())
    watched.now += 1.0
    await watched.checker.check("hostile", builders.json_object())
    assert caught.value.retry_after_s < 0.5 / CPU_SHARE


async def test_many_cheap_grammars_spend_a_tenants_time_too(watched: Watched) -> None:
    with pytest.raises(GrammarTimeSpent):
        for number in range(500):
            await watched.checker.check("hostile", builders.choice([f"{number}-{i:x}" for i in range(2000)]))


async def test_known_grammars_serve_a_tenant_that_has_spent_its_time(watched: Watched) -> None:
    await watched.checker.check("hostile", builders.json_object())
    with pytest.raises(GrammarTimeSpent):
        for number in range(100):
            await reason_of(watched.checker.check("hostile", slow(number)))
    await watched.checker.check("hostile", builders.json_object())


async def test_one_tenant_cannot_fill_the_queue(watched: Watched) -> None:
    flood = [
        asyncio.create_task(watched.checker.check("flood", builders.choice([f"c{number}"])))
        for number in range(MAX_WAITING)
    ]
    await asyncio.sleep(0.01)
    await watched.checker.check("other", builders.json_object())
    ended = await asyncio.gather(*flood, return_exceptions=True)
    rejected = [error for error in ended if isinstance(error, GrammarsUnavailable)]
    assert len(rejected) == MAX_WAITING // 2
    assert all(error.is_own for error in rejected)


async def test_lost_process_fails_what_waits_and_is_started_again(model: Path) -> None:
    watched = Watched(model, GrammarLimits(cpu_s=20))  # it is lost before a slow one has its end
    try:
        watched.now = 100.0
        await watched.checker.check("a", builders.json_object())
        waiting = asyncio.create_task(watched.checker.check("a", slow(1)))
        while not watched.checker.pool.process.num_waiting:  # type: ignore[union-attr]
            await asyncio.sleep(0)
        os.kill(watched.pid, signal.SIGKILL)
        with pytest.raises(GrammarsUnavailable, match="try again"):
            await waiting
        await watched.checker.check("a", builders.regex("a"))
        assert watched.lines == [("grammar_process_failed", "the process was lost; starting another")]
    finally:
        await watched.checker.close()


async def test_one_fork_serves_many_checks_but_none_that_has_kept_memory(model: Path) -> None:
    watched = Watched(model, GrammarLimits(cpu_s=20, memory=64 << 20))
    try:
        forks = set()
        for number in range(60):
            await watched.checker.check("a", builders.json_schema({"title": str(number)}))
            forks |= watched.forks
        assert len(forks) == 1
        await watched.checker.check("a", wide(900))
        await watched.checker.check("a", builders.json_object())
        assert watched.forks.isdisjoint(forks)
    finally:
        await watched.checker.close()


async def test_fork_that_ends_while_it_is_idle_is_not_missed(watched: Watched) -> None:
    for text in "abc":
        await watched.checker.check("a", builders.regex(text))
        for fork in map(psutil.Process, watched.forks):
            fork.kill()
            with contextlib.suppress(psutil.NoSuchProcess):  # it may be gone between the two questions
                while fork.is_running() and fork.status() != psutil.STATUS_ZOMBIE:
                    await asyncio.sleep(0.001)
    assert watched.outcomes == ["accepted"] * 3


async def test_a_job_that_no_frame_holds_is_refused_and_the_process_stays(watched: Watched) -> None:
    await watched.checker.check("a", wide(3))
    process = watched.checker.pool.process
    assert process is not None
    done = await process.run(bytes(MAX_FRAME_BYTES))
    assert (done.outcome, done.body) == ("too_large", b"")
    assert process.alive
    await watched.checker.check("a", wide(4))


async def test_process_ends_with_its_server(watched: Watched) -> None:
    await watched.checker.check("a", builders.json_object())
    process = watched.checker.pool.process
    assert process is not None
    process._writer.close()
    async with asyncio.timeout(10):
        await asyncio.shield(process._child.exited)


async def test_tokenizer_that_the_library_does_not_take_is_told(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    watched = Watched(tmp_path)
    try:
        watched.checker.start()
        assert "tokenizer cannot be used" in await reason_of(
            watched.checker.check("a", builders.json_object())
        )
        assert watched.lines[0][0] == "grammar_process_failed"
    finally:
        await watched.checker.close()


async def test_gbnf_becomes_lark(watched: Watched) -> None:
    convert = watched.checker.lark_of_gbnf
    grammar = await convert("a", 'root ::= "a" number ("," number)*\nnumber ::= [0-9]+')
    assert takes(grammar, "a1,23")
    assert not takes(grammar, "a1,")
    assert await convert("a", 'root ::= "a" number ("," number)*\nnumber ::= [0-9]+') == grammar
    assert "'foo' not found" in await reason_of(convert("a", "root ::= foo"))
    assert "Expected" in await reason_of(convert("a", 'root ::= ("a"'))
    assert "of nesting" in await reason_of(convert("a", "root ::= " + "(" * 20_000 + '"a"' + ")" * 20_000))
