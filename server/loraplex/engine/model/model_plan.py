"""The plan of a model: all that a checkpoint becomes under some settings and kernels, decided before a weight is read.

`load_model` builds a plan; `loraplex plan`, `loraplex doctor`, the engine's report and its numerical build read it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from loraplex.adapters.admission.base_families import ANSWER_FILE, not_served, text_fields
from loraplex.engine.devices import refuse_bits
from loraplex.engine.kv.states import state_bytes, window_bytes
from loraplex.engine.model.base import ModelShape, ModelUnsupported
from loraplex.engine.model.base_head import HEAD_MODULE, BaseHead, base_head
from loraplex.engine.model.config_fields import read_config_json, refusing
from loraplex.engine.model.families.own_attention import uses_alibi
from loraplex.engine.model.families.table import is_fused, is_wrapped
from loraplex.engine.model.family import DecoderSpec, decoder_spec
from loraplex.engine.model.fused import attention_needs, decoder_shape
from loraplex.engine.model.layer_kinds import DeltaKind, MambaKind, ShortConvKind
from loraplex.engine.model.linear_forms import Linears, plan_linears
from loraplex.engine.model.plans import KeptPlans, ReadConfig
from loraplex.engine.model.served_config import ServedConfig, read_served_config, wrapped_shape
from loraplex.engine.model.wrapped import wrapped_attention
from loraplex.engine.reports import ModelSummary
from loraplex.kernels.attention.choice import AttentionChoice, AttentionUnavailable
from loraplex.kernels.attention.kernel import TellsPrevious
from loraplex.kernels.bundle import Kernels
from loraplex.kernels.linear.dense import multiplies

_EXPERTS = "its layers have experts{}, which torch's kernels do not compute on a GPU; choose --kernels auto"
_BEHIND = {DeltaKind: " behind gated delta nets", MambaKind: " behind Mamba-2"}
_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}

TESTED = frozenset({"gemma", "granite", "olmo2", "smollm3", "starcoder2"})
"""Model types whose equality with transformers through `TransformersDecoder` the test suite shows. Others are
compared at every start."""


@dataclass(frozen=True, slots=True)
class ModelSettings:
    """The settings that decide what a checkpoint becomes, by the names that `EngineConfig` has."""

    dtype: str = "auto"
    max_model_len: int = 0
    attention: str = "auto"
    quantise: str = "none"
    kv_cache_dtype: str = "auto"

    @classmethod
    def of(cls, settings: object) -> ModelSettings:
        """The fields of the same names of an `EngineConfig`, or of anything else that has them."""
        return cls(**{field.name: getattr(settings, field.name) for field in dataclasses.fields(cls)})


@dataclass(frozen=True, slots=True)
class ModelPlan:
    """A checkpoint's decoder, dtype, linears, attention and KV cache, and why. Made by `make_plan`."""

    model_dir: Path
    settings: ModelSettings
    kernels: Kernels
    model_type: str
    """The type in config.json; `spec` has that of its text part."""
    spec: DecoderSpec | None
    """The fused decoder's; None: the model runs through transformers."""
    config: Any
    """transformers' config of a model that runs through it; None for the fused decoder."""
    unread: tuple[str, ...]
    """How the names begin of tensors that belong to other parts of a larger model."""
    shape: ModelShape
    dtype: torch.dtype
    stored_dtype: str
    """The checkpoint's own, as `torch.dtype` is named."""
    attention: AttentionChoice
    linears: Linears
    obstacle: str | None
    """Why it cannot promise the same bits in every step; None where it can."""
    head: BaseHead | None = None
    """The head of a checkpoint that classifies or ranks itself."""

    @property
    def decoder(self) -> str:
        return "transformers" if self.spec is None else "fused"

    @property
    def untested(self) -> bool:
        """Whether the start compares it with transformers, and may refuse it."""
        return self.spec is None and self.model_type not in TESTED

    @property
    def kv_dtype(self) -> torch.dtype:
        """The dtype of keys and values; int8 is that of codes."""
        return torch.int8 if self.settings.kv_cache_dtype == "int8" else self.dtype

    @property
    def remarks(self) -> tuple[str, ...]:
        """Warnings to the operator, at each start."""
        found = []
        if self.spec is not None:
            for name in self.spec.ignored:
                found.append(f"config.json has {name}, which {self.spec.model_type} does not define: ignored")
            longest, trained = self.spec.rope.max_positions, self.spec.trained_positions
            if longest < trained:
                found.append(
                    f"sequences of up to {longest} positions are served, of the {trained} that the model can have: a "
                    f"--max-model-len above {longest} would choose other RoPE frequencies, for all sequences"
                )
        if self._is_widened:
            # Tens of times as fast there, for twice the memory.
            found.append(
                f"this processor can't multiply in {self.stored_dtype}, the checkpoint's dtype: float32 is used"
            )
        if self.obstacle is not None and self.kernels.device.type == "cpu":
            found.append(f"answers may depend on what is computed beside them: {self.obstacle}")
        return tuple(found)

    @property
    def _is_widened(self) -> bool:
        return self.settings.dtype == "auto" and _name(self.dtype) != self.stored_dtype

    @property
    def summary(self) -> ModelSummary:
        return ModelSummary(
            vocab_size=self.shape.vocab_size,
            dtype=_name(self.dtype),
            decoder=self.decoder,
            attention=self.attention.name,
            attention_reason=self.attention.reason,
            quantise=self.settings.quantise,
            kv_cache_dtype=_name(self.kv_dtype),
            stored_codes=self.linears.format,
            activations=self.linears.activations,
            same_bits=self.obstacle is None,
            head=None if self.head is None else self.head.head,
        )

    def explain(self) -> str:
        """The plan in words, for `loraplex doctor`."""
        if self.spec is None:
            how = "to be compared with it at the start" if self.untested else "tested"
            kind, attention = f"{self.model_type} through transformers, {how}", "attention torch"
        else:
            kind = f"{self.spec.model_type} on the fused decoder, up to {self.shape.max_positions} positions"
            attention = f"attention {self.attention.name} ({self.attention.reason})"
        if self.kv_dtype is torch.int8:
            attention += ", KV in int8"
        bits = "the same bits in every batch"
        if self.obstacle is not None:
            bits = f"bits that may depend on the batch ({self.obstacle})"
        head = "" if self.head is None else self.head.head.described
        return ", ".join(
            filter(
                None,
                (
                    kind,
                    head,
                    attention,
                    bits,
                    self._explain_dtype(),
                    self._explain_linears(),
                    self._explain_states(),
                    self._explain_experts(),
                ),
            )
        )

    def _explain_states(self) -> str:
        state, window = state_bytes(self.shape.caches), window_bytes(self.shape.caches)
        if not state:
            return ""
        return f"states of {state / (1 << 20):.1f} MiB and windows of {window / (1 << 20):.1f} MiB"

    @property
    def expert_bytes(self) -> int:
        """Memory of the weights of all experts."""
        if self.spec is None:
            return 0
        row_bytes, hidden = self.linears.row_bytes, self.spec.hidden_size
        return sum(
            kind.router.num_experts
            * (2 * kind.size * row_bytes(hidden, self.dtype) + hidden * row_bytes(kind.size, self.dtype))
            for kind in self.spec.mixtures
        )

    def _explain_experts(self) -> str:
        mixtures = () if self.spec is None else self.spec.mixtures
        if not mixtures:
            return ""
        router = mixtures[0].router
        memory = f"{self.expert_bytes / (1 << 20):.1f} MiB"
        return f"{router.num_experts} experts in {len(mixtures)} layers ({memory}), {router.top_k} for each token"

    def _explain_dtype(self) -> str:
        name = _name(self.dtype)
        if self._is_widened:
            return f"{name} (this processor cannot multiply in {self.stored_dtype}, the checkpoint's dtype)"
        if self.settings.dtype == "auto" and not multiplies(self.dtype, self.kernels.device):
            return f"{name} (the checkpoint's; this processor multiplies in float32, into which the kernels widen it)"
        return name

    def _explain_linears(self) -> str:
        form, choose = self.linears.form, self.kernels.choose_four_bits
        if form.activations == "int8":
            return f"{form.bits}-bit linears with 8-bit activations in groups of 32"
        if form.codes != "groups" or form.bits != 4 or choose is None:
            return ""
        choice = choose(form.group, self.dtype)
        by = (
            f"{choice.library} where it has their form"
            if choice.library
            else f"Triton, since {choice.reason}"
        )
        return f"two codes of 4 bits in a byte, by {by}"


def make_plan(
    model_dir: Path, settings: ModelSettings, kernels: Kernels, kept: KeptPlans | None = None
) -> ModelPlan:
    """Plan a checkpoint of safetensors files or a GGUF file, from its config alone. Nothing in the directory is
    executed, and with `kept`, transformers is not imported where a config of the families has been read before (ADR
    0011). Raises ModelUnsupported with the reason if it can't be served exactly as transformers would, or not with
    these settings; DeviceUnavailable where batch-invariant kernels cannot keep their promise in its dtype."""
    content, raw = read_config_json(model_dir)
    with refusing(f"{model_dir / 'config.json'} is not served"):
        plan = _plan(model_dir, settings, kernels, kept, content, raw)
    return plan


def _plan(
    model_dir: Path,
    settings: ModelSettings,
    kernels: Kernels,
    kept: KeptPlans | None,
    content: bytes,
    raw: Mapping[str, Any],
) -> ModelPlan:
    read = None if kept is None else kept.find(content, settings.max_model_len)
    computes_experts = kernels.device.type == "cpu" or kernels.backend == "triton"
    if read is None or (read.spec.mixtures and not computes_experts):
        served = read_served_config(model_dir, raw)
        text, computes_its = served.text, computes_experts and served.text is served.whole
        if not is_fused(text.model_type) or is_wrapped(text, computes_experts=computes_its):
            return _plan_wrapped(model_dir, settings, kernels, served)
        spec = decoder_spec(text, served.raw, settings.max_model_len)
        read = ReadConfig(spec, _stored_dtype(served.whole), served.unread)
        # Of this file alone: not where it names others to read in its place, or is being replaced.
        if (
            kept is not None
            and "configuration_files" not in raw
            and read_config_json(model_dir)[0] == content
        ):
            kept.save_plan(content, settings.max_model_len, read)
    if read.spec.mixtures and not computes_experts:
        mixers = (type(kind.mixer) for kind in read.spec.layers)
        where = next((_BEHIND[mixer] for mixer in mixers if mixer in _BEHIND), " beside feed-forwards")
        raise ModelUnsupported(not_served(raw["model_type"], _EXPERTS.format(where)))
    dtype = _dtype(settings.dtype, read.dtype, kernels.multiplies(_DTYPES[read.dtype]))
    head, spec, unread = base_head(model_dir, raw), read.spec, read.unread
    if head is not None and head.answers is not None and spec.logits_softcap is not None:
        raise ModelUnsupported(
            f"{ANSWER_FILE}: the logits of {spec.model_type} are capped, and their difference is not served"
        )
    if head is not None and head.answers is None:
        # It has no head over the vocabulary: nothing is read of one that is tied.
        spec, unread = dataclasses.replace(spec, tied=True), (*unread, f"{HEAD_MODULE}.")
    linears = plan_linears(model_dir, text_fields(raw), settings.quantise, settings.dtype, kernels)
    if spec.mixtures and kernels.backend == "triton" and (linears.quantise or linears.format):
        what = "--quantise" if linears.quantise else "a quantised checkpoint"
        raise ModelUnsupported(f"{what}: experts in codes are computed on CPUs alone; serve one of 16 bits")
    return ModelPlan(
        model_dir=model_dir,
        settings=settings,
        kernels=kernels,
        model_type=raw["model_type"],
        spec=spec,
        config=None,
        unread=unread,
        shape=decoder_shape(spec, dtype),
        dtype=dtype,
        stored_dtype=read.dtype,
        attention=_attention(settings, kernels, spec, dtype),
        linears=linears,
        obstacle=_obstacle(kernels, dtype),
        head=head,
    )


def _plan_wrapped(
    model_dir: Path, settings: ModelSettings, kernels: Kernels, served: ServedConfig
) -> ModelPlan:
    config, shape = served.whole, wrapped_shape(served.whole)
    kind, stored = config.model_type, _stored_dtype(config)
    through = f"{kind} runs through transformers"
    if settings.attention not in ("auto", "torch"):
        raise ModelUnsupported(
            f"--attention {settings.attention}: {through}, with torch's attention; choose auto or torch"
        )
    obstacle = f"{through}, whose products depend on the other rows of a step"
    if kernels.batch_invariant:
        raise ModelUnsupported(f"--batch-invariant: {obstacle}; serve without it")
    linears = plan_linears(model_dir, text_fields(served.raw), settings.quantise, settings.dtype, kernels)
    if linears.quantise or linears.format:
        what = "--quantise" if linears.quantise else "a quantised checkpoint"
        raise ModelUnsupported(
            f"{what}: {through}, which keeps its weights as they are; serve one of 16 bits"
        )
    # Its linears are torch's.
    dtype = _dtype(settings.dtype, stored, multiplies(_DTYPES[stored], kernels.device))
    if settings.kv_cache_dtype == "int8" and uses_alibi(config):
        raise ModelUnsupported(
            f"--kv-cache-dtype int8: {kind} adds the positions of keys, which codes of 8 bits do not hold; serve with "
            "--kv-cache-dtype auto"
        )
    head = base_head(model_dir, served.raw)
    if head is not None and head.answers is not None:
        raise ModelUnsupported(
            f"{ANSWER_FILE}: {through}, and a reranker of this kind does not; serve one of the fused decoder"
        )
    if head is not None:
        config.tie_word_embeddings = True  # as of the fused decoder
    return ModelPlan(
        model_dir=model_dir,
        settings=settings,
        kernels=kernels,
        model_type=kind,
        spec=None,
        config=config,
        unread=(),
        shape=shape,
        dtype=dtype,
        stored_dtype=stored,
        attention=wrapped_attention(shape, dtype, kernels.device),
        linears=linears,
        obstacle=obstacle,
        head=head,
    )


def _attention(
    settings: ModelSettings, kernels: Kernels, spec: DecoderSpec, dtype: torch.dtype
) -> AttentionChoice:
    try:
        choice = kernels.choose_attention(settings.attention, attention_needs(spec), dtype)
    except AttentionUnavailable as error:
        raise ModelUnsupported(f"--attention {settings.attention}: {error}") from error
    if settings.kv_cache_dtype == "int8" and not choice.kernel.reads_codes:
        raise ModelUnsupported(
            f"--kv-cache-dtype int8: --attention {settings.attention} reads keys and values in the model's dtype "
            "alone; choose --attention auto, or serve with --kv-cache-dtype auto"
        )
    mixers = {type(kind.mixer) for kind in spec.layers}
    convolves = ShortConvKind in mixers
    if convolves:
        assert isinstance(choice.kernel, TellsPrevious)
        if settings.kv_cache_dtype == "int8":
            raise ModelUnsupported(
                f"--kv-cache-dtype int8: the short convolutions of {spec.model_type} keep their rows in the model's "
                "dtype alone; serve with --kv-cache-dtype auto"
            )
    return choice


def _obstacle(kernels: Kernels, dtype: torch.dtype) -> str | None:
    found = kernels.obstacle_to_same_bits(dtype, kernels.batch_invariant)
    if found is not None and kernels.batch_invariant:
        raise refuse_bits(found)
    return found


def _dtype(asked: str, stored: str, is_fast: bool) -> torch.dtype:
    if asked != "auto":
        return _DTYPES[asked]
    return _DTYPES[stored] if is_fast else torch.float32


def _stored_dtype(config: Any) -> str:
    name = str(getattr(config, "dtype", None)).removeprefix("torch.")
    return name if name in _DTYPES else "float32"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
