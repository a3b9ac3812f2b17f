"""Conversations by versions' own chat templates, in a process that can be killed."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from loraplex.engine.ipc.loop import Log
from loraplex.serving.errors import (
    ServingError,
    TemplateError,
    TemplatesUnavailable,
    TemplateTimeSpent,
    TextTooLong,
)
from loraplex.serving.forks.messages import JobDone
from loraplex.serving.forks.pool import ForkPool, PoolLimits, PoolWords, wall_s
from loraplex.serving.templates.messages import (
    Body,
    Compared,
    Encoded,
    OtherTokenizer,
    RenderAnswer,
    RendererSetup,
    RenderJob,
    RenderRefused,
    Trial,
    Tried,
)

WORKER_COMMAND = (sys.executable, "-m", "loraplex.serving.templates.worker")
TOKEN_S = 2e-5
"""CPU time of a job for each token that the context has: some tokenizers take that for long prompts."""
TOKENIZER_WEIGHT = 3
"""A tokenizer of 150,000 tokens takes 1 s and 90 MB."""
CPU_SHARE = 0.25
"""Part of one core that a tenant's templates may take over time, beside `burst_s`."""


@dataclass(frozen=True, slots=True)
class TemplateLimits:
    """`cpu_s`: CPU time to render a conversation and to make its tokens, beside `TOKEN_S`; `memory`: bytes for it. The
    rest as `PoolLimits` has it."""

    cpu_s: float = 1.0
    memory: int = 256 << 20
    at_once: int = 4
    max_waiting: int = 512
    burst_s: float = 10.0


class TemplateRenderer:
    """A renderer of one event loop. `model_dir` has the base's tokenizer."""

    def __init__(
        self,
        model_dir: str,
        *,
        max_model_len: int,
        limits: TemplateLimits | None = None,
        command: Sequence[str] = WORKER_COMMAND,
        log: Log = lambda event, **fields: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._limits = limits = limits or TemplateLimits()
        self._cpu_s = limits.cpu_s + TOKEN_S * max_model_len
        self.pool = ForkPool(
            msgspec.msgpack.encode(RendererSetup(model_dir, max_model_len)),
            command,
            PoolLimits(
                self._cpu_s,
                wall_s(self._cpu_s),
                limits.memory,
                limits.at_once,
                limits.max_waiting,
                limits.burst_s,
                CPU_SHARE,
            ),
            PoolWords(
                many="Too many chat templates are being rendered",
                process="The process that renders chat templates",
                spent="The chat templates of your versions have taken too much processing time. Use simpler ones.",
                failed="template_process_failed",
                unavailable=TemplatesUnavailable,
                time_spent=TemplateTimeSpent,
                unsupported=lambda: TemplatesUnavailable(
                    "The process that renders chat templates cannot load the tokenizer; the log says why."
                ),
            ),
            log=log,
            clock=clock,
        )
        self._running: set[asyncio.Task[JobDone]] = set()

    def start(self) -> None:
        """Begin to start the process; the first conversation waits for it."""
        self.pool.start()

    async def close(self) -> None:
        for task in self._running:
            task.cancel()
        await self.pool.close()

    async def encode(self, tenant: str, conversation: RenderJob) -> Encoded:
        """Raises TemplateError and TextTooLong with the template's own words, TemplateTimeSpent,
        TemplatesUnavailable."""
        encoded = await self._answer(tenant, conversation, owner=f"{tenant} {conversation.digest}")
        assert isinstance(encoded, Encoded)
        return encoded

    async def try_out(self, tenant: str, trial: Trial) -> Tried:
        """Compile a version's templates and render a few conversations. Raises as `encode`."""
        tried = await self._answer(tenant, trial, owner=f"{tenant} {trial.own.digest}")
        assert isinstance(tried, Tried)
        return tried

    async def compare_tokenizer(self, tenant: str, path: str) -> str:
        """How the tokenizer.json at `path` differs from the one that serves; "" where it does not. Raises as
        `encode`."""
        job = OtherTokenizer(path)
        owner, what = f"{tenant} {path}", "the comparison"
        compared = await self._answer(tenant, job, owner=owner, what=what, weight=TOKENIZER_WEIGHT)
        assert isinstance(compared, Compared)
        return compared.difference

    async def _answer(
        self,
        tenant: str,
        body: Body,
        *,
        owner: str,
        what: str = "this version's chat template",
        weight: int = 1,
    ) -> RenderAnswer:
        # The checks of a tenant's uploads take no time from its chats.
        account = tenant if isinstance(body, RenderJob) else f"{tenant} uploads"
        packed = msgspec.msgpack.encode(body)
        job = self.pool.run(tenant, packed, owner=owner, weight=weight, account=account)
        task = asyncio.create_task(job)
        self._running.add(task)
        task.add_done_callback(self._ended)
        # A caller that goes away leaves it to its end, so that its tenant's turn ends with the work.
        done = await asyncio.shield(task)
        if done.outcome != "done":
            raise self._killed(done, what, weight)
        answer: RenderAnswer = msgspec.msgpack.decode(done.body, type=RenderAnswer)
        if isinstance(answer, RenderRefused):
            raise (TextTooLong if answer.is_length else TemplateError)(answer.reason)
        return answer

    def _ended(self, task: asyncio.Task[JobDone]) -> None:
        self._running.discard(task)
        if not task.cancelled():
            task.exception()  # its caller may have gone

    def _killed(self, done: JobDone, what: str, weight: int) -> ServingError:
        """A template has nothing to wait for: where it was only time that ran out, the machine was busy."""
        if done.outcome == "timed_out":
            return TemplatesUnavailable(f"The machine is too busy for {what}. Please try again.")
        limit = f"{self._limits.memory * weight >> 20} MiB of memory, or of nesting"
        if done.outcome == "too_slow":
            limit = f"{self._cpu_s * weight:.3g} s of processing time"
        return TemplateError(f"{what} takes more than {limit}")
