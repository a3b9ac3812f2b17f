"""What is computed for a request has the same bits whatever other requests are served with it (docs/determinism.md).

Every question is asked of an engine alone first. Then engines get them at random, beside each other: with all adapters,
in chunks, with prefix hits, preempted, one step ahead or not, on adapters that have to be evicted and loaded again. The
logits of every output token are compared, and so are log probabilities, embeddings and tokens.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from loraplex.adapters.admission.base_model import load_base_spec
from loraplex.engine.kv.cache import block_bytes
from loraplex.engine.kv.layers import CacheKind, block_needs, blocks_for
from loraplex.engine.kv.states import slot_bytes
from loraplex.kernels import numba_backend
from loraplex.kernels.attention import BLOCK_SIZE
from loraplex.kernels.attention.numba_attention import SPAN
from loraplex.kernels.layers.numba_quantise import QuantisedRows
from loraplex.kernels.linear import numba_dense, numba_int8
from loraplex.kernels.torch_backend import torch_ops
from support.adapters.tiny_adapters import ADAPTERS, BY_TOKEN, KINDS, save_adapters, with_gates
from support.engine.same_bits import Answer, Asked, PlantedDrafter, Question
from support.kernels import kv_write
from support.models.checkpoints import FAMILIES, VOCAB, save_tiny
from support.models.loading import plan_model
from support.models.quantised_formats import write_quantised

pytestmark = pytest.mark.usefixtures("one_torch_thread")

KV_DTYPES = {"auto": "float32"}
"""Of the tiny checkpoints, which are in float32."""
LONGEST = 1100
"""Tokens of a sequence: more than two spans of attention."""
CHOSEN = {name: (ADAPTERS | KINDS)[name] for name in ("all", "some", "many-ranks", "dora", "head")}
CHOSEN |= {
    name: BY_TOKEN[name] for name in ("embedding-rslora-and-layers", "rows-and-head", "other-rows-of-head")
}
CROSSING = 5
"""The number of the question whose answer goes on into a second span."""
GROWING = [Question(tuple(range(3 + n, 23 + n)), None, {"max_tokens": 80}) for n in range(4)]
"""They grow out of few blocks where they are asked together."""
INVOCATION = (1, 2)
EXPERT_STACKS = ["experts.gate_up_proj", "experts.down_proj"]
ON_EXPERTS: dict[str, dict[str, Any]] = {
    "experts": {"r": 4, "lora_alpha": 8, "target_modules": [], "target_parameters": EXPERT_STACKS},
    "down-and-attention": {
        "r": 20, "lora_alpha": 9, "target_modules": ["q_proj"], "target_parameters": EXPERT_STACKS[1:],
    },
}  # fmt: skip
"""Of mixtures whose routed experts adapters may change."""
CHOSEN |= {"activated": {**ADAPTERS["all"], "r": 6, "alora_invocation_tokens": list(INVOCATION)}}
FAMILIES_ASKED = {
    # Groups of three heads, as in SmolLM2, whose keys are transformed before they become codes; sums over more inputs
    # than a tile has rows.
    "llama": {
        "model_type": "llama", "hidden_size": 96, "num_attention_heads": 6, "head_dim": 16, "attention_bias": True,
        "max_position_embeddings": 2048,
    },
    # Windows, softcaps, norms of queries and keys in float32.
    "gemma2": FAMILIES["gemma2"] | {"sliding_window": 70, "max_position_embeddings": 2048},
}  # fmt: skip
OTHER_PLANS = {
    # Heads of two sizes, keys that are values.
    "gemma4": FAMILIES["gemma4"] | {"sliding_window": 70},
    # Inputs of layers' own, layers that read another's keys and values, wider feed-forwards there.
    "gemma4-e2b": FAMILIES["gemma4-e2b"] | {"sliding_window": 70},
    # Short convolutions, whose last rows lie in blocks.
    "lfm2": FAMILIES["lfm2"],
    # Delta nets, whose states are shared and kept as blocks are, and attention's heads that take more room.
    "qwen3_5": FAMILIES["qwen3_5-2"] | {"head_dim": 128},
    # Mamba-2 of several groups, and layers of one part.
    "nemotron_h": FAMILIES["nemotron_h"] | {"head_dim": 128},
    # Experts that a router chooses for each row.
    "qwen3_moe": FAMILIES["qwen3_moe"],
    "glm4_moe": FAMILIES["glm4_moe"] | {"head_dim": 128},
    # States and experts, and a shared expert behind a gate.
    "qwen3_next": FAMILIES["qwen3_next"] | {"head_dim": 128},
}
SETTINGS: dict[str, dict[str, Any]] = {
    "wide steps": {"max_num_batched_tokens": 700},
    "narrow steps, one ahead": {"max_num_batched_tokens": 23, "lookahead": 1},
    "few blocks": {"max_num_batched_tokens": 60, "kv_blocks": 16, "max_model_len": 250, "max_num_seqs": 8},
    "few adapters": {"max_num_batched_tokens": 90, "lookahead": 1, "adapter_memory": 1 << 19},
}

DRAFTS = {"drafted", "accepted", "rejected", "across blocks", "across spans"}
HAPPENED = {"preemptions", "prefix hits", "evictions"} | DRAFTS
"""What the engines of `SETTINGS` do on the way, together."""


@dataclass(frozen=True)
class Subject:
    base: Path
    adapters: dict[str, Path]
    family: dict[str, Any]
    caches: tuple[CacheKind, ...] = ()


@pytest.fixture(scope="module")
def subject(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Subject:
    family = FAMILIES_ASKED[request.param]
    root = tmp_path_factory.mktemp(request.param)
    base = save_tiny(root / "base", family)
    return Subject(base, save_adapters(base, root, CHOSEN), family)


@pytest.fixture(scope="module")
def subject_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Subject]:
    """Of `OTHER_PLANS`, each made once."""

    @cache
    def make(name: str) -> Subject:
        family = OTHER_PLANS[name] | {"max_position_embeddings": 2048}
        root = tmp_path_factory.mktemp(name)
        base = save_tiny(root / "base", family)
        chosen = with_gates(CHOSEN, family) | (ON_EXPERTS if load_base_spec(base).experts else {})
        caches = plan_model(base).shape.caches
        return Subject(base, save_adapters(base, root, chosen), family, caches)

    return make


@pytest.fixture(
    scope="module",
    params=["gptq int4, zeros", pytest.param("compressed int8, a scale a row", marks=pytest.mark.soak)],
)
def int8_subject(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Subject:
    """Linears of 4 bits in groups of 32, with zeros, or of 8 bits; the head stays as it is."""
    family = FAMILIES_ASKED["llama"] | {"intermediate_size": 96}
    root = tmp_path_factory.mktemp("int8")
    plain = save_tiny(root / "base", family)
    base, _ = write_quantised(plain, root, request.param)
    return Subject(base, save_adapters(plain, root, CHOSEN), family)


@pytest.fixture
def make_asked(tmp_path: Path) -> Iterator[Callable[..., Asked]]:
    made: list[Asked] = []

    def make(subject: Subject, dtype: str, *, kv_blocks: int = 2000, **settings: Any) -> Asked:
        served = getattr(torch, KV_DTYPES.get(dtype, dtype))
        if settings.get("kv_cache_dtype") == "int8":
            served = torch.int8
        if caches := subject.caches:  # of several sizes
            needs = block_needs(caches, 60)
            few = settings.get("max_model_len")  # where they are to be as few as the longest sequence needs
            kv_blocks = needs.of(few) if few else kv_blocks * needs.of(256) // blocks_for(256)
        else:
            heads, dim = subject.family.get("num_key_value_heads", 2), subject.family["head_dim"]
            caches = (CacheKind(heads, dim),) * 3
            if "sliding_window" in subject.family:
                kv_blocks = kv_blocks * 3 // 4  # some layers keep the window alone
        memory = kv_blocks * block_bytes(caches, served)
        if slot := slot_bytes(caches):
            memory += memory // 3 + settings.get("max_num_seqs", 12) * slot  # a quarter is for snapshots
        asked = Asked(
            subject.base,
            tmp_path / str(len(made)),
            subject.adapters,
            kernels="numba",
            dtype=dtype,
            kv_cache_memory=memory,
            **{
                "max_model_len": LONGEST,
                "adapter_memory": 8 << 20,
                "adapter_cpu_memory": 8 << 20,
                "max_num_seqs": 12,
                "num_threads": 1,
                **settings,
            },
        )
        made.append(asked)
        return asked

    yield make
    for asked in made:
        asked.close()


def questions(rng: random.Random, count: int, adapters: Collection[str]) -> list[Question]:
    """On all of these adapters and the base, some with a common beginning, of a few tokens to more than two spans of
    attention."""
    shared = tuple(rng.randrange(3, VOCAB) for _ in range(600))
    made = []
    for number in range(count):
        start = shared[: rng.choice([0, 0, 40, 150])]
        own, most = rng.choice([1, 2, 9, 30, 33, 120]), rng.choice([1, 4, 12, 50])
        if number % 6 == 5:
            start = shared[: rng.choice([500, 540, 600])] + shared[: rng.choice([0, 440])]
        if number == CROSSING:
            start, own, most = shared[:500], 2, 50
        options = [
            {"temperature": 1.0, "seed": number},
            {"temperature": 1.3, "seed": number, "top_p": 0.9, "repetition_penalty": 1.2},
            {"logprobs": 3},
            {"logprobs": 0, "prompt_logprobs": 2},
        ]
        adapter = rng.choice([None, *adapters])
        if adapter == "activated":
            start = (*start, *INVOCATION)
        made.append(
            Question(
                (*start, *(rng.randrange(3, VOCAB) for _ in range(min(own, LONGEST - 50 - len(start))))),
                adapter,
                {"max_tokens": most, **options[number % 4]},
                pooled=number % 9 == 8,
            )
        )
    return made


CASES = [
    ("llama", "none", "auto", "float32", 20),
    ("gemma2", "none", "auto", "bfloat16", 20),
    ("llama", "int8", "int8", "bfloat16", 20),
    *(
        pytest.param(family, quantise, kv, dtype, 2500, marks=[pytest.mark.soak, pytest.mark.timeout(3600)])
        for family in FAMILIES_ASKED
        for quantise, kv in (("none", "auto"), ("int8", "auto"), ("none", "int8"))
        for dtype in ("float32", "bfloat16")
    ),
]
"""The family, how linears are kept, and keys and values, the dtype, and the requests of each of four engines. The short
version has each kind once."""


@pytest.mark.parametrize(
    ("subject", "quantise", "kv_cache_dtype", "dtype", "count"), CASES, indirect=["subject"]
)
def test_bits_do_not_depend_on_neighbours(
    subject: Subject,
    make_asked: Callable[..., Asked],
    quantise: str,
    kv_cache_dtype: str,
    dtype: str,
    count: int,
) -> None:
    if not numba_dense.is_for(getattr(torch, dtype)):
        pytest.skip(f"on this processor a library multiplies in {dtype}")
    make = partial(make_asked, subject, dtype, quantise=quantise, kv_cache_dtype=kv_cache_dtype)
    differing, seen = compared(make, count, SETTINGS)
    assert differing == Counter(), f"of {count} each"
    assert seen == HAPPENED


@pytest.mark.parametrize(
    ("plan", "quantise", "kv_cache_dtype", "dtype", "count"),
    [
        ("gemma4-e2b", "int8", "int8", "bfloat16", 20),
        ("lfm2", "none", "auto", "float32", 20),
        ("qwen3_5", "none", "auto", "float32", 20),
        ("qwen3_moe", "none", "auto", "float32", 20),
        pytest.param("qwen3_next", "none", "auto", "float32", 20, marks=pytest.mark.soak),
        pytest.param("glm4_moe", "none", "auto", "bfloat16", 20, marks=pytest.mark.soak),
        *(
            pytest.param(plan, *kept, 2500, marks=[pytest.mark.soak, pytest.mark.timeout(3600)])
            for plan in OTHER_PLANS
            # Rows of short convolutions are kept in the model's dtype alone.
            for kept in (
                ("none", "auto", "float32"),
                ("none", "auto", "bfloat16"),
                ("int8", "auto" if plan == "lfm2" else "int8", "bfloat16"),
            )
        ),
    ],
)
def test_bits_of_other_plans_do_not_depend_on_neighbours(
    subject_of: Callable[[str], Subject],
    make_asked: Callable[..., Asked],
    plan: str,
    quantise: str,
    kv_cache_dtype: str,
    dtype: str,
    count: int,
) -> None:
    if not numba_dense.is_for(getattr(torch, dtype)):
        pytest.skip(f"on this processor a library multiplies in {dtype}")
    make = partial(make_asked, subject_of(plan), dtype, quantise=quantise, kv_cache_dtype=kv_cache_dtype)
    # With windows a long sequence takes hardly more blocks as it grows: shorter ones run out of them.
    few = SETTINGS["few blocks"] | {"max_model_len": 112}
    differing, seen = compared(make, count, SETTINGS | {"few blocks": few})
    assert differing == Counter(), f"of {count} each"
    assert seen == HAPPENED


@pytest.mark.parametrize(
    "count", [20, pytest.param(2500, marks=[pytest.mark.soak, pytest.mark.timeout(3600)])]
)
def test_bits_of_products_with_8_bit_activations_do_not_depend_on_neighbours(
    int8_subject: Subject, make_asked: Callable[..., Asked], count: int
) -> None:
    make = partial(make_asked, int8_subject, "auto")
    differing, seen = compared(make, count, SETTINGS)
    assert make().engine.built.info.activations == "int8"
    assert differing == Counter(), f"of {count} each"
    assert seen == HAPPENED


def compared(
    make: Callable[..., Asked], count: int, settings: dict[str, dict[str, Any]]
) -> tuple[Counter[str], set[str]]:
    """How many of `count` answers of each engine differ from that of a lone request, and what the engines did on the
    way."""
    lone = make(max_num_batched_tokens=2048)
    # Adapters on experts are asked for as often as all others.
    adapters = [name for name in lone.adapters for _ in range(5 if name in ON_EXPERTS else 1)]
    asked = questions(random.Random(count), min(30, count), adapters)
    expected = {
        question: lone.alone(str(number), question) for number, question in enumerate(asked + GROWING)
    }
    differing: Counter[str] = Counter()
    seen: Counter[str] = Counter()
    for name, given in settings.items():
        # With lookahead the token behind a draft would not be known.
        drafter = (
            None
            if "lookahead" in given
            else PlantedDrafter(random.Random(count), VOCAB, span=SPAN, block=BLOCK_SIZE)
        )
        crowd = make(drafter=drafter, **given)

        def check(question: Question, answer: Answer, name: str = name) -> None:
            differing[name] += answer != expected[question]

        rng = random.Random(
            f"{name} {count}"
        )  # how many steps an engine takes changes no other one's questions
        fitting = [q for q in asked if len(q.prompt) + 50 <= given.get("max_model_len", LONGEST)]
        # Random neighbours may leave no room for a draft where a span ends, and no two long answers may meet.
        scripted = GROWING if "max_model_len" in given else [asked[CROSSING]]
        # The first one's prefix is found.
        chosen = [scripted[0], *rng.choices(fitting, k=count - len(scripted) - 1)]
        if drafter is not None:
            drafter.plan({f"q{n}": expected[question].tokens for n, question in enumerate(scripted + chosen)})
        crowd.together(scripted, check)
        crowd.among_neighbours(chosen, rng, check, first=len(scripted))
        seen += Counter() if drafter is None else drafter.seen
        stats = crowd.engine.core.stats()
        seen["preemptions"] += stats.num_preemptions
        seen["prefix hits"] += stats.prefix_cache_hits
        seen["evictions"] += stats.device_evictions
    return +differing, set(+seen)


def a_scale_of_the_whole_step(
    heads: torch.Tensor, num_heads: int, cos: Any, sin: Any, cache: Any, batch: Any, **norms: Any
) -> None:
    """The planted mistake: rows of one step have a scale together. It rotates, and writes keys and values, as the
    engine does otherwise."""
    rows, _, dim = heads.shape
    kv_heads = cache.shape[3]
    alone = torch.zeros(-(-rows // 16), 16, 2, kv_heads, dim, dtype=heads.dtype)
    torch_ops().rotate_and_write(
        heads, num_heads, cos, sin, alone, SimpleNamespace(slots=torch.arange(rows)), **norms
    )

    def to_codes(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scales = (x.float().abs().amax((0, -1)) / 127).half()
        codes = (x.float() / scales.float()[..., None]).round().clamp(-127, 127).to(torch.int8)
        return codes, scales.expand(x.shape[:-1])

    with mock.patch.object(kv_write, "to_codes", to_codes):
        kv_write.write_for_numba(alone.flatten(0, 1)[:rows], cache, batch.slots)


@pytest.mark.parametrize("planted", [False, True])
@pytest.mark.parametrize("subject", ["llama"], indirect=True)
def test_a_scale_of_several_positions_would_show(
    subject: Subject, make_asked: Callable[..., Asked], planted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not numba_dense.is_for(torch.bfloat16):
        pytest.skip("on this processor a library multiplies in bfloat16")
    if planted:
        make = numba_backend.numba_ops
        monkeypatch.setattr(
            numba_backend,
            "numba_ops",
            lambda **options: replace(
                make(**options), rotate_and_write=a_scale_of_the_whole_step, record_layers=None
            ),
        )
    rng = random.Random(5)
    question = Question(tuple(rng.randrange(3, VOCAB) for _ in range(60)), None, {"max_tokens": 3})
    answers = [
        make_asked(subject, "bfloat16", kv_cache_dtype="int8", max_num_batched_tokens=tokens).alone(
            "a", question
        )
        for tokens in (2048, 23)
    ]
    assert (answers[0] == answers[1]) is not planted


@pytest.mark.parametrize("planted", [False, True])
def test_a_scale_of_a_steps_activations_would_show(
    int8_subject: Subject, make_asked: Callable[..., Asked], planted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = numba_int8.quantise_rows

    def of_the_step(x: torch.Tensor) -> QuantisedRows:
        """The planted mistake: codes of each row, by the scales of the step's largest numbers."""
        largest = right(x.abs().amax(0, keepdim=True))
        return QuantisedRows(right(x).codes, largest.groups.expand(len(x), -1, -1).contiguous())

    if planted:
        monkeypatch.setattr(numba_int8, "quantise_rows", of_the_step)
    rng = random.Random(5)
    question = Question(tuple(rng.randrange(3, VOCAB) for _ in range(60)), None, {"max_tokens": 3})
    answers = [
        make_asked(int8_subject, "auto", max_num_batched_tokens=tokens).alone("a", question)
        for tokens in (2048, 23)
    ]
    assert (answers[0] == answers[1]) is not planted
