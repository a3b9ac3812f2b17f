"""One measurement, and its answer: JSON on the process's standard input and on its pipe."""

from __future__ import annotations

import msgspec


class BaseErrorTask(msgspec.Struct, frozen=True):
    """`trained_on`: a form of `trained_base`, of the checkpoint in `model_dir`, which is served with `quantise` and
    `max_model_len` (0: none was asked for). `prompts`: token ids. `cache_dir` and `plan_dir` are the engine's.
    `memory`: the most bytes that it may take; it takes half of the free ones at most."""

    model_dir: str
    quantise: str
    trained_on: str
    config_path: str
    tensors_path: str
    digest: str
    max_rank: int
    prompts: list[list[int]]
    max_model_len: int = 0
    cache_dir: str | None = None
    plan_dir: str | None = None
    memory: int = 1 << 62


class BaseErrorFigures(msgspec.Struct, frozen=True):
    """`kl`: the divergence of the served answers from those of the training, in nats a token; `top1`: the part of
    `tokens` whose most likely next token is the same. All are None where `reason` says why."""

    kl: float | None = None
    top1: float | None = None
    tokens: int | None = None
    reason: str | None = None
