"""Answers of one adapter over two forms of its base, for fixed prompts.

The engine's own decoder computes them, in float32 with torch's kernels. Each weight is read when the pass comes to it.
So memory stays below that of a layer, beside the adapter and the logits.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path

import numpy as np
import torch

from loraplex.adapters.admission.base_model import load_base_spec
from loraplex.adapters.admission.inspection import inspect_adapter
from loraplex.adapters.device.arena import AdapterArena
from loraplex.adapters.device.host_image import build_image
from loraplex.adapters.errors import LoraplexError
from loraplex.adapters.spec import AdapterSpec, BaseSpec
from loraplex.engine.base_error.forms import BaseInForm
from loraplex.engine.base_error.messages import BaseErrorFigures, BaseErrorTask
from loraplex.engine.execution.inputs import PlainInputs
from loraplex.engine.kv.cache import KVCache
from loraplex.engine.kv.layers import keeping_all
from loraplex.engine.model.base import ForwardBatch, TokenRows
from loraplex.engine.model.family import DecoderSpec
from loraplex.engine.model.fused import DecoderReader, FusedDecoder
from loraplex.engine.model.model_plan import ModelSettings, make_plan
from loraplex.engine.model.plans import KeptPlans
from loraplex.engine.sizing import adapter_layout
from loraplex.kernels.attention import BLOCK_SIZE
from loraplex.kernels.attention.choice import AttentionChoice
from loraplex.kernels.bundle import Kernels
from loraplex.kernels.lora.dispatch import CHUNK
from loraplex.kernels.lora.site_groups import EMBEDDING, HEAD
from loraplex.kernels.torch_backend import torch_kernels

_CPU = torch.device("cpu")
_LIBRARY_BYTES = 256 << 20
"""Room for torch's products, and for all else of Python's."""
_ROWS_AT_A_TIME = 16
"""Rows of logits that are compared at a time, in float64."""


class NotMeasured(LoraplexError):
    """There is no figure, for this reason."""

    code = "base_error_not_measured"


@dataclass(frozen=True, slots=True)
class Subject:
    """A task with what its files' headers say."""

    spec: DecoderSpec
    """The decoder that the engine has."""
    attention: AttentionChoice
    base: BaseSpec
    trained_on: str
    adapter: AdapterSpec
    tensors_path: Path
    prompts: list[list[int]]
    """Token ids."""
    places: list[int]
    """The position of each prompt that the adapter acts from; what comes before is not compared."""


def read_subject(task: BaseErrorTask) -> Subject:
    """Raises NotMeasured, AdapterRefused, ArtifactMissing, ModelUnsupported, BaseModelInvalid, OSError."""
    spec, attention = _decoder(task)
    cache_dir = None if task.cache_dir is None else Path(task.cache_dir)
    base = load_base_spec(Path(task.model_dir), cache_dir=cache_dir, quantise=task.quantise)
    files = Path(task.config_path), Path(task.tensors_path)
    adapter = inspect_adapter(*files, base, max_rank=task.max_rank, deep=False, digest=task.digest)
    prompts, places = _invoked(task.prompts, adapter.invocation, spec.rope.max_positions)
    return Subject(spec, attention, base, task.trained_on, adapter, files[1], prompts, places)


def _invoked(
    prompts: list[list[int]], invocation: tuple[int, ...], most: int
) -> tuple[list[list[int]], list[int]]:
    """The prompts, of `most` tokens at most, and where the adapter begins to act. An activated LoRA is invoked in the
    middle of each: it is to be measured over a conversation that the base has read."""
    if not invocation:
        return [prompt[:most] for prompt in prompts], [0] * len(prompts)
    places = [min(len(prompt) // 2, max(0, most - len(invocation))) for prompt in prompts]
    made = [
        [*prompt[:place], *invocation, *prompt[place:]] for prompt, place in zip(prompts, places, strict=True)
    ]
    return [prompt[:most] for prompt in made], places


def compare_answers(subject: Subject, memory: int) -> BaseErrorFigures:
    """The figures, within `memory` bytes. Raises as `read_subject`, and MemoryError or torch's own error where it is
    not enough after all."""
    wanted = needed_memory(subject)
    if wanted > memory:
        raise NotMeasured(f"it takes {_mib(wanted)} of memory, and may take {_mib(memory)}")
    as_trained = BaseInForm(replace(subject.base, quantise="none"), subject.trained_on)
    expected = _answers(as_trained, subject)
    return compare_logits(expected, _answers(BaseInForm(subject.base), subject))


def needed_memory(subject: Subject) -> int:
    """Bytes at most: four times the largest linear of a layer in float32, which nf4 is made in, the adapter twice, the
    logits of both forms and others being made."""
    spec, adapter, base = subject.spec, subject.adapter, subject.base
    tokens = sum(map(len, subject.prompts))
    linear = max(
        shape.in_features * shape.out_features
        for (_, site), shape in base.sites.items()
        if site not in (HEAD, EMBEDDING)
    )
    ranks = sum(
        (-(-site.rank // CHUNK) * CHUNK) * sum(site.a.shape[1:] + site.b.shape[:1]) for site in adapter.sites
    )
    rows = sum(table.rows.shape[0] * spec.hidden_size for table in adapter.tokens)
    floats = 4 * linear + 2 * (ranks + rows) + tokens * (3 * spec.vocab_size + 8 * spec.intermediate_size)
    floats += tokens * sum(2 * kind.kv_heads * kind.head_dim for kind in spec.caches)
    floats += tokens * sum(0 if kind.own_input is None else 3 * kind.own_input.size for kind in spec.layers)
    return 4 * floats + _LIBRARY_BYTES


@torch.inference_mode()
def compare_logits(trained: torch.Tensor, served: torch.Tensor) -> BaseErrorFigures:
    """The figures of logits [T, V] float32 of the same tokens: the mean of Σ p·(log p - log q), p of the training and q
    as served, and how often the largest is the same. Raises NotMeasured where one is not finite."""
    divergence, same = 0.0, 0
    for first in range(0, len(trained), _ROWS_AT_A_TIME):
        rows = slice(first, first + _ROWS_AT_A_TIME)
        p, q = trained[rows].double().log_softmax(-1), served[rows].double().log_softmax(-1)
        divergence += float((p.exp() * (p - q)).sum())
        same += int((p.argmax(-1) == q.argmax(-1)).sum())
    if not np.isfinite(divergence):
        raise NotMeasured("the adapter's answers are not finite over one of the two forms")
    tokens = len(trained)
    # Rounding may leave less than zero of equal answers.
    return BaseErrorFigures(max(0.0, divergence) / tokens, same / tokens, tokens)


def _decoder(task: BaseErrorTask) -> tuple[DecoderSpec, AttentionChoice]:
    """The engine's decoder, with torch's attention. Raises NotMeasured for a model that runs through transformers,
    ModelUnsupported."""
    kept = None if task.plan_dir is None else KeptPlans(Path(task.plan_dir))
    settings = ModelSettings(dtype="float32", max_model_len=task.max_model_len)
    plan = make_plan(Path(task.model_dir), settings, torch_kernels(_CPU, batch_invariant=False), kept)
    if plan.spec is None:
        raise NotMeasured(f"{plan.model_type} runs through transformers, which reads all layers at once")
    if any(kind.state_bytes for kind in plan.shape.caches):
        raise NotMeasured(f"layers of {plan.model_type} keep states, which the comparison does not hold")
    if plan.spec.mixtures:
        raise NotMeasured(f"layers of {plan.model_type} have experts, which the comparison does not hold")
    return plan.spec, plan.attention


@torch.inference_mode()
def _answers(form: BaseInForm, subject: Subject) -> torch.Tensor:
    """[T, V] float32: the logits behind each token of each prompt from its place on, of the adapter over a form of its
    base."""
    spec, prompts = subject.spec, subject.prompts
    kernels = torch_kernels(_CPU, batch_invariant=False)
    reader = DecoderReader(form, spec, torch.float32, _CPU, kernels.ops, subject.attention, form)
    rows = [token for prompt in prompts for token in prompt]
    known, compact = np.unique(np.array(rows, np.int64), return_inverse=True)
    table = None if reader.input_table is None else form.table_rows(reader.input_table, known)
    model = FusedDecoder(
        spec,
        [reader.layer(index) for index in range(spec.num_layers)],
        torch.from_numpy(form.embeddings(known)),
        reader.final_norm(),
        form.read({HEAD: (spec.vocab_size, spec.hidden_size)}),
        reader.inputs(table),
        ops=kernels.ops,
        attention=subject.attention,
    )
    arena = _arena(model, subject, form, kernels)
    starts = accumulate((len(prompt) for prompt in prompts), initial=0)
    segments = [
        (0, start + place, len(prompt) - place)
        for start, prompt, place in zip(starts, prompts, subject.places, strict=False)
    ]
    compared = [row for _, first, count in segments for row in range(first, first + count)]
    of_logits = [(0, 0, len(compared))]
    tokens = arena.token_pass(segments, of_logits, PlainInputs(_CPU))
    ends = list(accumulate(-(-len(prompt) // BLOCK_SIZE) for prompt in prompts))
    tables = [list(range(first, end)) for first, end in zip([0, *ends], ends, strict=False)]
    counts = [len(prompt) for prompt in prompts]
    return model.forward(
        ForwardBatch(
            token_ids=torch.from_numpy(compact),
            positions=torch.cat([torch.arange(count) for count in counts]),
            attention=(model.attention.lay_out(counts, counts, tables),),
            fresh_blocks=torch.arange(ends[-1]),
            logits_rows=torch.tensor(compared),
            kv=KVCache(keeping_all(model.shape.caches), ends[-1], torch.float32, _CPU),
            lora=arena.lora_pass(segments, len(rows)),
            head_lora=arena.head_pass(of_logits, len(compared)),
            token_rows=None if tokens is None else _OfTokens(tokens, torch.tensor(rows)),
        )
    )


def _arena(model: FusedDecoder, subject: Subject, form: BaseInForm, kernels: Kernels) -> AdapterArena:
    """An arena with the adapter in slot 0, as it lies over this form of the base."""
    adapter = subject.adapter
    layout = adapter_layout(model, adapter.rank)
    image = build_image(adapter, subject.tensors_path, layout, base=form.weights)
    arena = AdapterArena(layout, image.num_pages, 1, kernels)
    arena.write(image, 0, tuple(range(image.num_pages)))
    image.release()
    return arena


class _OfTokens:
    """Changes by token for a model whose embedding has the rows of some tokens alone."""

    def __init__(self, rows: TokenRows, token_ids: torch.Tensor) -> None:
        """`token_ids` [T]: the tokens of the batch, as the vocabulary numbers them."""
        self._rows = rows
        self._token_ids = token_ids

    def replace_embeddings(self, token_ids: torch.Tensor, y: torch.Tensor) -> None:
        self._rows.replace_embeddings(self._token_ids, y)

    def add_embeddings(self, token_ids: torch.Tensor, y: torch.Tensor, scale: float) -> None:
        self._rows.add_embeddings(self._token_ids, y, scale)

    def replace_logits(self, x: torch.Tensor, logits: torch.Tensor) -> None:
        self._rows.replace_logits(x, logits)


def _mib(num_bytes: int) -> str:
    return f"{num_bytes >> 20} MiB"
