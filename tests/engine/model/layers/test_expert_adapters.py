"""LoRA on routed experts, from the files that PEFT saves to answers, beside attention, shared experts and the base."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from loraplex.adapters.admission.base_model import load_base_spec
from loraplex.engine.kv.cache import block_bytes
from loraplex.engine.logprobs import join_scores
from support.adapters.whole_reads import check_numbers
from support.engine.local_engine import LocalEngine
from support.engine.repeater import Repeater
from support.kernels.recurrent import INTERPRETED
from support.models.checkpoints import FAMILIES, VOCAB, save_tiny, save_tiny_with_vision
from support.models.expert_adapters import pairs, write
from support.models.loading import outline_model
from support.models.quantised import dequantised
from support.models.quantised_formats import write_mxfp4, write_quantised

pytestmark = pytest.mark.usefixtures("one_torch_thread")

SEES = "gemma4-moe that sees"
MIXTURES = (
    "qwen3_moe", "olmoe", "mixtral", "glm4_moe", "qwen3_5_moe", "qwen3_next", "qwen2_moe", "gpt_oss", "granitemoe",
    "granitemoeshared", "granite4-tiny", "gemma4-moe", SEES,
)  # fmt: skip
BOTH = ["experts.gate_up_proj", "experts.down_proj"]
SEVEN = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
TOKENS = 20
ROOM = 512 << 10
"""Bytes of the device for two small adapters."""
Logits = Callable[[list[int]], torch.Tensor]


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("bases")
    found = {family: save_tiny(root / family, FAMILIES[family]) for family in MIXTURES[:-1]}
    return found | {SEES: save_tiny_with_vision(root / SEES, "gemma4", FAMILIES["gemma4-moe"])}


def of_transformers(base: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32, attn_implementation="eager").eval()


def logits_of(model: Any) -> Logits:
    def logits(tokens: list[int]) -> torch.Tensor:
        with torch.no_grad():
            found: torch.Tensor = model(torch.tensor([tokens])).logits[0]
        return found

    return logits


def save_trained(base: Path, out: Path, seed: int, **config: Any) -> Logits:
    """An adapter as PEFT makes and saves it, of random values."""
    model = get_peft_model(of_transformers(base), LoraConfig(lora_alpha=8, **config))
    generator = torch.Generator().manual_seed(seed)
    size = 0.15 if config["r"] < 32 else 0.06
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if ".lora_" in name:
                weight.copy_(size * torch.randn(weight.shape, generator=generator))
    model.save_pretrained(out)
    return logits_of(model.eval())


def save_pairs(base: Path, out: Path, rank: int, **config: Any) -> Logits:
    """A pair an expert."""
    return logits_of(merge_pairs(base, out, rank, **config))


def merge_pairs(base: Path, out: Path, rank: int, **config: Any) -> Any:
    """Save a pair an expert; the model with their products in its weights."""
    experts = load_base_spec(base).experts
    shape = next(iter(experts.values()))
    leaves = ("w1", "w3", "w2") if "block_sparse_moe" in shape.module_path else tuple(SEVEN[-3:])
    tensors = {name: 0.15 * array for name, array in pairs(experts, rank, leaves).items()}
    write(out, tensors, r=rank, target_modules=rf".*\.experts\.\d+\.({'|'.join(leaves)})", **config)
    scaling = 8 / rank ** (0.5 if config.get("use_rslora") else 1)
    model = of_transformers(base)
    for name, weight in model.named_parameters():
        place = re.search(r"layers\.(\d+)\..*experts\.(gate_up|down)_proj$", name)
        if place is None:
            continue
        inner = shape.inner_size
        halves = slice(0, inner), slice(inner, None)
        gate, up = (slice(0, None, 2), slice(1, None, 2)) if shape.in_turns else halves
        parts = zip(leaves, (gate, up, slice(None)), strict=True)
        for leaf, rows in list(parts)[2:] if place[2] == "down" else list(parts)[:2]:
            for expert in range(shape.count):
                path = f"{experts[int(place[1])].module_path}.{expert}.{leaf}"
                a, b = (torch.from_numpy(tensors[f"{path}.lora_{side}.weight"]) for side in "AB")
                into = weight.data[expert].T if shape.in_turns else weight.data[expert]
                into[rows] += scaling * b @ a
    return model


def save_all(base: Path, root: Path) -> dict[str, Logits]:
    """Adapters of every form, by the names of their folders."""
    both: dict[str, Any] = {"target_parameters": BOTH}
    with_attention = {"target_modules": ["q_proj", "o_proj"], **both}
    if "qwen3_next" in base.name:
        with_attention["target_modules"] = ["q_proj", "in_proj_qkvz"]
    if base.name == SEES:
        with_attention["target_modules"] = r".*\.language_model\..*\.(q|o)_proj"
    if base.name.startswith(("gpt_oss", "granite")):
        with_attention["target_parameters"] = [*BOTH, "router.weight"]
    return {
        "one rank": save_trained(base, root / "one rank", 1, r=1, target_modules=[], **both),
        "three, rsLoRA": save_trained(
            base, root / "three, rsLoRA", 2, r=3, use_rslora=True, **with_attention
        ),
        "eight, down": save_trained(
            base, root / "eight, down", 3, r=8, target_modules=[], target_parameters=BOTH[1:]
        ),
        "32": save_trained(base, root / "32", 4, r=32, **with_attention),
        "64 and 128": save_trained(base, root / "64 and 128", 5, r=64, target_modules=[],
                                   rank_pattern={r".*\.gate_up_proj": 128}, **both),
        "pairs": save_pairs(base, root / "pairs", 2),
        "pairs, rsLoRA": save_pairs(base, root / "pairs, rsLoRA", 12, use_rslora=True),
    }  # fmt: skip


def engine_of(base: Path, work: Path, **settings: Any) -> LocalEngine:
    return LocalEngine(base, work, **({
        "dtype": "float32", "kv_cache_memory": 16 << 20, "adapter_memory": 24 << 20, "max_model_len": 80,
        "max_num_batched_tokens": 48, "max_adapter_rank": 64,
    } | settings))  # fmt: skip


def prompt_of(name: str, length: int = 21) -> list[int]:
    name = name.partition(" at ")[0]
    return [3 + (7 + len(name)) * number % (VOCAB - 3) for number in range(length)]


def check_answers(
    engine: LocalEngine, logits: dict[str, Logits], length: int = 21, count: int = TOKENS
) -> None:
    for name, expected in logits.items():
        prompt, tokens = prompt_of(name, length), engine.tokens(name)
        want = expected(prompt + tokens[:-1])[len(prompt) - 1 :]
        assert len(tokens) == count
        assert tokens == want.argmax(-1).tolist(), name
        found = join_scores([e.scores for e in engine.events[name] if e.scores is not None]).output
        assert found is not None
        values = torch.frombuffer(bytearray(found.values), dtype=torch.float32).view(count, -1)[:, 0]
        chosen = want.log_softmax(-1)[range(count), tokens]
        assert (values - chosen).abs().max() <= 2.5e-4 * want.abs().max(), name


@pytest.mark.parametrize(
    "family", [MIXTURES[0], *(pytest.param(f, marks=pytest.mark.slow) for f in MIXTURES[1:])]
)
def test_every_form_answers_as_peft_does(family: str, bases: dict[str, Path], tmp_path: Path) -> None:
    logits = save_all(bases[family], tmp_path)
    engine = engine_of(bases[family], tmp_path / "work")
    try:
        for name in logits:
            ref = engine.publish(tmp_path / name)
            engine.add(name, prompt_of(name), ref, max_tokens=TOKENS, logprobs=0)
            engine.measure(f"numbers of {name}", ref)
        logits["base"] = logits_of(of_transformers(bases[family]))
        engine.add("base", prompt_of("base"), max_tokens=TOKENS, logprobs=0)
        engine.run()
        check_answers(engine, logits)
        for name in logits.keys() - {"base"}:
            files = tmp_path / name / "adapter_config.json", tmp_path / name / "adapter_model.safetensors"
            verdict = check_numbers(*files, engine.base, engine.outputs(f"numbers of {name}"))
            assert verdict.ok, (name, verdict.message)
    finally:
        engine.close()


Answers = dict[str, tuple[list[int], bytes]]


def ask(engine: LocalEngine, folder: Path, *groups: Sequence[str]) -> Answers:
    """Tokens, and the bytes of their log probabilities, of "base" and adapters by the names of their folders. Each
    group is asked at once, when the one before it has ended. A second answer of the same one has to equal its
    first."""
    found: Answers = {}
    for number, group in enumerate(groups):
        for name in group:
            ref = None if name == "base" else engine.publish(folder / name)
            engine.add(f"{name} at {number}", prompt_of(name), ref, max_tokens=TOKENS, logprobs=0)
        engine.run()
        for name in group:
            events = engine.events[f"{name} at {number}"]
            scores = join_scores([event.scores for event in events if event.scores is not None]).output
            assert scores is not None
            answer = engine.tokens(f"{name} at {number}"), bytes(scores.values)
            assert found.setdefault(name, answer) == answer, name
    return found


def ask_alone(engine: LocalEngine, folder: Path, names: Sequence[str]) -> Answers:
    answers = ask(engine, folder, *([name] for name in names))
    assert len({tuple(tokens) for tokens, _ in answers.values()}) == len(names)
    return answers


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("qwen3_moe", {"dtype": "bfloat16"}),
        ("qwen3_moe", {"quantise": "int8"}),
        ("qwen3_next", {"dtype": "bfloat16"}),
    ],
)
def test_an_adapter_has_the_same_bits_alone_in_company_and_under_cuts(
    family: str, settings: dict[str, Any], bases: dict[str, Path], tmp_path: Path
) -> None:
    base, names = bases[family], ("eight", "pairs", "32", "base")
    save_trained(base, tmp_path / "eight", 1, r=8, target_modules=["q_proj"], target_parameters=BOTH)
    save_pairs(base, tmp_path / "pairs", 3)
    save_trained(base, tmp_path / "32", 2, r=32, target_modules=[], target_parameters=BOTH)
    with closing(engine_of(base, tmp_path / "alone", **settings)) as engine:
        alone = ask_alone(engine, tmp_path, names)
    with closing(engine_of(base, tmp_path / "together", **settings)) as engine:
        assert ask(engine, tmp_path, names) == alone
    with closing(engine_of(base, tmp_path / "cut", max_num_batched_tokens=16, **settings)) as engine:
        assert ask(engine, tmp_path, names[::-1]) == alone


@pytest.fixture(scope="module")
def five(bases: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Answers]:
    """A folder of five adapters, and their answers in an engine with room for each. "q" and "v" leave the experts
    alone."""
    base, folder = bases["qwen3_moe"], tmp_path_factory.mktemp("five")
    save_trained(base, folder / "both", 1, r=8, target_modules=[], target_parameters=BOTH)
    save_trained(base, folder / "q", 2, r=4, target_modules=["q_proj"])
    save_trained(base, folder / "v", 3, r=4, target_modules=["v_proj", "o_proj"])
    save_trained(base, folder / "down", 4, r=3, target_modules=["q_proj"], target_parameters=BOTH[1:])
    save_pairs(base, folder / "pairs", 2)
    with closing(engine_of(base, folder / "work")) as engine:
        return folder, ask_alone(engine, folder, ("both", "q", "v", "down", "pairs", "base"))


def test_a_slot_is_used_by_adapters_with_experts_and_without_in_turns(
    five: tuple[Path, Answers], bases: dict[str, Path], tmp_path: Path
) -> None:
    folder, alone = five
    page = 256 << 10
    with closing(
        engine_of(bases["qwen3_moe"], tmp_path, adapter_memory=9 * page // 4)
    ) as engine:  # two, and tables
        in_turns = ("both", "pairs", "q", "v", "down", "both", "v", "q", "pairs", "down")
        assert ask(engine, folder, *([name] for name in in_turns), tuple(alone)) == alone
        stats = engine.core.stats()
        assert (stats.num_adapter_slots, stats.num_arena_pages) == (2, 2)
        assert stats.device_evictions >= len(in_turns) - 2


def test_preempted_adapters_on_experts_answer_as_alone(
    five: tuple[Path, Answers], bases: dict[str, Path], tmp_path: Path
) -> None:
    folder, alone = five
    base = bases["qwen3_moe"]
    caches = outline_model(base, torch.device("cpu"), "float32").shape.caches
    few = 5 * block_bytes(caches, torch.float32)  # one answer is to have as many
    with closing(engine_of(base, tmp_path, kv_cache_memory=few)) as engine:
        assert ask(engine, folder, tuple(alone), tuple(alone)[::-1]) == alone  # loaded and not
        assert engine.core.stats().num_preemptions


def test_an_activated_adapter_acts_on_experts_from_its_invocation_on(
    bases: dict[str, Path], tmp_path: Path
) -> None:
    """PEFT trains none on experts of today's models: a model that goes on behind the base's keys and values is what
    such a file means."""
    base, prompt, place = bases["qwen3_moe"], prompt_of("alora"), 9
    merged = merge_pairs(base, tmp_path / "alora", 2, alora_invocation_tokens=prompt[place : place + 2])
    plain = of_transformers(base)

    def logits(tokens: list[int]) -> torch.Tensor:
        with torch.no_grad():
            before = plain(torch.tensor([tokens[:place]]), use_cache=True)
            behind = merged(torch.tensor([tokens[place:]]), past_key_values=before.past_key_values)
        return torch.cat((before.logits[0], behind.logits[0]))

    expected = {"alora": logits, "both": save_trained(
        base, tmp_path / "both", 1, r=8, target_modules=[], target_parameters=BOTH
    )}  # fmt: skip
    with closing(engine_of(base, tmp_path / "work")) as engine:
        for name in expected:
            ref = engine.publish(tmp_path / name)
            engine.add(name, prompt_of(name), ref, max_tokens=TOKENS, logprobs=0, prompt_logprobs=0)
        engine.add("base", prompt, max_tokens=1, logprobs=0, prompt_logprobs=0)
        engine.run()
        check_answers(engine, expected)
        scores = {
            name: join_scores([e.scores for e in engine.events[name] if e.scores is not None]).prompt
            for name in ("alora", "base")
        }
        own, of_base = (bytes(part.values) for part in scores.values() if part is not None)
        differ = [at for at in range(0, len(own), 4) if own[at : at + 4] != of_base[at : at + 4]]
        assert differ
        assert (len(own) // 4, min(differ) // 4) == (len(prompt) - 1, place), "the row of its first token"


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["int8", "gptq int4, zeros", "mxfp4"])
def test_adapters_over_codes_answer_as_over_what_the_codes_stand_for(kind: str, tmp_path: Path) -> None:
    if kind == "mxfp4":
        family = FAMILIES["gpt_oss"] | {"intermediate_size": 32}
    else:
        family = FAMILIES["qwen3_moe"] | {"moe_intermediate_size": 32, "intermediate_size": 64}
    base, settings = save_tiny(tmp_path / "plain", family), {}
    if kind == "int8":
        dense, settings = dequantised(base, tmp_path / "dense"), {"quantise": "int8"}
    elif kind == "mxfp4":
        base, dense = write_mxfp4(base, tmp_path)
    else:
        base, dense = write_quantised(base, tmp_path, kind)
    logits = {
        "both": save_trained(dense, tmp_path / "both", 1, r=8, target_modules=[], target_parameters=BOTH),
        "pairs": save_pairs(dense, tmp_path / "pairs", 2),
        "base": logits_of(of_transformers(dense)),
    }
    with closing(engine_of(base, tmp_path / "alone", **settings)) as engine:
        alone = ask_alone(engine, tmp_path, tuple(logits))
        check_answers(engine, {f"{name} at {n}": each for n, (name, each) in enumerate(logits.items())})
    with closing(engine_of(base, tmp_path / "together", **settings)) as engine:
        assert ask(engine, tmp_path, tuple(logits)) == alone


@INTERPRETED
@pytest.mark.slow
@pytest.mark.usefixtures("quick_interpreter")
def test_answers_on_a_gpus_path_are_those_of_peft(tmp_path: Path) -> None:
    """Prompts in steps of their own and decoding in recorded ones, with a row of padding; then with adapters on experts
    alone; then there is room for others only in the place of these, and one changes no experts."""
    layers = {"num_hidden_layers": 2, "mlp_only_layers": [0], "num_experts": 4, "num_experts_per_tok": 2}
    base = save_tiny(tmp_path / "base", FAMILIES["qwen3_moe"] | layers)
    stacked: dict[str, Any] = {"r": 8, "target_modules": ["q_proj"], "target_parameters": BOTH}
    logits = {
        "stacks": save_trained(base, tmp_path / "stacks", 1, **stacked),
        "pairs": save_pairs(base, tmp_path / "pairs", 3),
        "others": save_trained(base, tmp_path / "others", 2, **stacked),
        "attention": save_trained(base, tmp_path / "attention", 3, r=4, target_modules=["v_proj"]),
        "base": logits_of(of_transformers(base)),
    }
    recorder = Repeater()
    engine = engine_of(
        base, tmp_path / "work", kernels="triton", recorder=recorder, max_num_seqs=4, max_adapter_rank=8,
        adapter_memory=ROOM, num_threads=1,
    )  # fmt: skip
    refs = {name: engine.publish(tmp_path / name) for name in logits if name != "base"}
    try:
        for together in (("stacks", "pairs", "base"), ("pairs", "base"), ("others", "attention", "base")):
            before = recorder.replays.total()
            for name in together:
                engine.add(name, prompt_of(name, 5), refs.get(name), max_tokens=3, logprobs=0)
            engine.run()
            check_answers(engine, {name: logits[name] for name in together}, 5, 3)
            assert recorder.replays.total() - before >= 2
            engine.events.clear()
        assert engine.core.residency().get(refs["stacks"].digest) != "hot"
    finally:
        engine.close()
