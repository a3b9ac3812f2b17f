"""From a directory to a model that can serve."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from loraplex.adapters.admission.base_families import obstacle_of, text_fields
from loraplex.adapters.base_weights.schemes import read_scheme
from loraplex.adapters.base_weights.tensors import QuantisationUnsupported
from loraplex.adapters.store.files import shown
from loraplex.engine.kv.layers import CacheKind
from loraplex.engine.model import code_products
from loraplex.engine.model.base import Model, ModelShape, ModelUnsupported
from loraplex.engine.model.config_fields import check_sizes, read_config_json
from loraplex.engine.model.family import DecoderSpec, decoder_spec, is_fused
from loraplex.engine.model.fused import attention_needs, load_fused
from loraplex.engine.model.plans import FusedPlan, KeptPlans
from loraplex.engine.model.probe import probe
from loraplex.engine.model.rope import STATIC_ROPE_TYPES
from loraplex.engine.model.text_part import TextPart, text_part
from loraplex.engine.model.wrapped import ATTENTION_NAME, TransformersDecoder, register_attention
from loraplex.kernels.attention.choice import AttentionChoice, AttentionUnavailable
from loraplex.kernels.bundle import Kernels
from loraplex.kernels.linear.dense import multiplies

_log = logging.getLogger(__name__)

_NO_LIMIT = 1 << 62
_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}

TESTED = frozenset({"gemma", "granite", "olmo2", "smollm3", "starcoder2"})
"""Model types whose equality with transformers through `TransformersDecoder` the test suite shows. Others are
compared at every start."""


def load_model(
    model_dir: Path,
    kernels: Kernels,
    dtype: str | torch.dtype = "auto",
    *,
    max_model_len: int = 0,
    attention: str = "auto",
    plans: KeptPlans | None = None,
    quantise: bool = False,
    kv_codes: bool = False,
) -> Model:
    """Load a checkpoint of safetensors files: `FusedDecoder` for its families, `TransformersDecoder` for others.

    `dtype` "auto" is the checkpoint's own; where the kernels can't multiply in it, float32. `max_model_len` is the
    length that was asked for, 0 if none was: where RoPE depends on the length, it decides for all sequences (ADR 0011).
    With `plans`, transformers is not imported where a config of the families has been read before (ADR 0011).
    `quantise`: the linears are kept as codes of 8 bits; `kv_codes`: keys and values will be. Nothing in the directory
    is executed. Raises ModelUnsupported with the reason if it can't be served exactly as transformers would, or, for
    batch-invariant kernels, only by transformers' own code, and for an `attention` that cannot compute this model's."""
    device = kernels.device
    content, raw = read_config_json(model_dir)
    plan = None if plans is None else plans.find(content, max_model_len)
    if plan is None:
        config, part = _read(model_dir, raw)
        if is_fused(part.config.model_type):
            spec = decoder_spec(part.config, part.raw, max_model_len)
            plan = FusedPlan(spec, _stored_dtype(config), part.unread)
            # Of this file alone: not where it names others to read in its place, or is being replaced.
            alone = "configuration_files" not in raw and read_config_json(model_dir)[0] == content
            if plans is not None and alone:
                plans.save_plan(content, max_model_len, plan)
    if plan is not None:
        _tell(plan.spec)
        chosen = _dtype(plan.dtype, dtype, kernels.multiplies)
        choice = fused_attention(attention, kernels, plan.spec, chosen, kv_codes=kv_codes)
        form = code_products.linear_form(raw, dtype, kernels, quantise=quantise)
        return load_fused(
            model_dir,
            plan.spec,
            chosen,
            device,
            unread=plan.unread,
            ops=kernels.ops,
            attention=choice,
            form=form,
            quantise=quantise,
        )
    if attention not in ("auto", "torch"):
        raise _refuse_attention(attention, config.model_type)
    if kernels.batch_invariant:
        raise _refuse_bits(config.model_type)
    if quantise or _is_quantised(raw):
        raise _refuse_codes(config.model_type, quantise)
    chosen = serving_dtype(config, part, dtype, kernels)
    decoder = load_wrapped(model_dir, config, chosen, device)
    if config.model_type not in TESTED:
        probe(decoder)
    return decoder


def _is_quantised(raw: Mapping[str, Any]) -> bool:
    """Whether config.json has a quantization_config. Some tools write null where a checkpoint has none."""
    return text_fields(raw).get("quantization_config") is not None


def _refuse_codes(model_type: str, quantise: bool) -> ModelUnsupported:
    what = "--quantise" if quantise else "a quantised checkpoint"
    return ModelUnsupported(
        f"{what}: {model_type} runs through transformers, which keeps its weights as they are; serve one of 16 bits"
    )


def examine_codes(model_dir: Path, quantise: bool) -> None:
    """Raises ModelUnsupported where a checkpoint would be served as codes and cannot be, from its config alone."""
    raw = read_config_json(model_dir)[1]
    config, part = read_model_config(model_dir)
    if not is_fused(part.config.model_type) and (quantise or _is_quantised(raw)):
        raise _refuse_codes(config.model_type, quantise)


def fused_attention(
    attention: str, kernels: Kernels, spec: DecoderSpec, dtype: torch.dtype, *, kv_codes: bool
) -> AttentionChoice:
    """The attention of a model on the fused decoder. `kv_codes`: its KV cache is of codes. Raises ModelUnsupported
    where an `attention` that was asked for cannot."""
    try:
        choice = kernels.choose_attention(attention, attention_needs(spec), dtype)
    except AttentionUnavailable as error:
        raise ModelUnsupported(f"--attention {attention}: {error}") from error
    if kv_codes and not choice.kernel.reads_codes:
        raise ModelUnsupported(
            f"--kv-cache-dtype int8: --attention {attention} reads keys and values in the model's dtype alone; "
            "choose --attention auto, or serve with --kv-cache-dtype auto"
        )
    return choice


def _refuse_attention(attention: str, model_type: str) -> ModelUnsupported:
    return ModelUnsupported(
        f"--attention {attention}: {model_type} runs through transformers, with torch's attention; choose auto or torch"
    )


def no_same_bits(model_type: str) -> str:
    """Why a model outside of the fused families cannot promise the same bits in every step."""
    return f"{model_type} runs through transformers, whose products depend on the other rows of a step"


def _refuse_bits(model_type: str) -> ModelUnsupported:
    return ModelUnsupported(f"--batch-invariant: {no_same_bits(model_type)}; serve without it")


def _tell(spec: DecoderSpec) -> None:
    """Notes about this model for the operator."""
    for name in spec.ignored:
        _log.warning("config.json has %s, which %s does not define: ignored", name, spec.model_type)
    longest = spec.rope.max_positions
    if longest < spec.trained_positions:
        _log.warning(
            "sequences of up to %d positions are served, of the %d that the model can have: a --max-model-len "
            "above %d would choose other RoPE frequencies, for all sequences",
            longest,
            spec.trained_positions,
            longest,
        )


def examine_model(model_dir: Path, max_model_len: int = 0) -> str:
    """How a checkpoint would be served, from its config alone. Raises ModelUnsupported where the config shows already
    that it can't be."""
    config, part = read_model_config(model_dir)
    if is_fused(part.config.model_type):
        spec = decoder_spec(part.config, part.raw, max_model_len)
        return f"{spec.model_type} on the fused decoder, up to {spec.rope.max_positions} positions"
    model_shape(config)
    how = "tested" if config.model_type in TESTED else "to be compared with it at the start"
    return f"{config.model_type} through transformers, {how}"


def untested_type(model_dir: Path) -> str:
    """The model type of a checkpoint that a start compares with transformers, and may refuse; empty for any other.
    Raises ModelUnsupported."""
    config, part = read_model_config(model_dir)
    known = is_fused(part.config.model_type) or config.model_type in TESTED
    return "" if known else str(config.model_type)


def examine_same_bits(model_dir: Path, asked: bool) -> str | None:
    """Why a checkpoint cannot promise the same bits in every step, from its config alone; None where it can. Raises
    ModelUnsupported where that was asked for."""
    config, part = read_model_config(model_dir)
    if is_fused(part.config.model_type):
        return None
    if asked:
        raise _refuse_bits(config.model_type)
    return no_same_bits(config.model_type)


def examine_attention(
    model_dir: Path, asked: str, kernels: Kernels, dtype: torch.dtype, *, kv_codes: bool
) -> str:
    """The attention that a checkpoint would get, and why, from its config alone. `kv_codes` as of `fused_attention`.
    Raises ModelUnsupported."""
    config, part = read_model_config(model_dir)
    if is_fused(part.config.model_type):
        spec = decoder_spec(part.config, part.raw)
        found = fused_attention(asked, kernels, spec, dtype, kv_codes=kv_codes)
        return f"attention {found.name} ({found.reason}){', KV in int8' if kv_codes else ''}"
    if asked not in ("auto", "torch"):
        raise _refuse_attention(asked, config.model_type)
    return f"attention torch{', KV in int8' if kv_codes else ''}"


def examine_dtype(model_dir: Path, asked: str, kernels: Kernels) -> str:
    """The dtype that `load_model` would use, and why if there is a choice; and the form of 4-bit linears. Raises
    ModelUnsupported."""
    config, part = read_model_config(model_dir)
    named = _explain_dtype(config, part, asked, kernels)
    if not is_fused(part.config.model_type):
        return named
    served = serving_dtype(config, part, asked, kernels)
    return ", ".join(filter(None, (named, code_products.explain(part.raw, asked, served, kernels))))


def _explain_dtype(config: Any, part: TextPart, asked: str, kernels: Kernels) -> str:
    stored = _stored_dtype(config)
    used = serving_dtype(config, part, asked, kernels)
    name = str(used).removeprefix("torch.")
    if asked == "auto" and name != stored:
        return f"{name} (this processor cannot multiply in {stored}, the checkpoint's dtype)"
    if asked == "auto" and not multiplies(used, kernels.device):
        return f"{name} (the checkpoint's; this processor multiplies in float32, into which the kernels widen it)"
    return name


def load_wrapped(
    model_dir: Path, config: Any, dtype: torch.dtype, device: torch.device
) -> TransformersDecoder:
    """Load any decoder through transformers, not probed yet. Raises ModelUnsupported."""
    from transformers import AutoModelForCausalLM

    register_attention()
    config = copy.deepcopy(config)  # the attention is chosen by writing into it
    shape = model_shape(config)
    try:
        model, info = AutoModelForCausalLM.from_pretrained(
            model_dir,
            config=config,
            dtype=dtype,
            attn_implementation=ATTENTION_NAME,
            use_safetensors=True,
            trust_remote_code=False,
            local_files_only=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # so that they are reported
        )
    except KeyError as error:  # from a table of its own kinds of attention
        raise ModelUnsupported(
            f"{config.model_type} does not let its attention be chosen: {error}"
        ) from error
    except (OSError, ValueError, RuntimeError, ImportError) as error:
        reason = " ".join(str(error).split())[:300]
        raise ModelUnsupported(f"transformers can't load {model_dir}: {reason}") from error
    # transformers would give these random values and go on.
    absent = sorted({*map(str, info["missing_keys"]), *map(str, info["mismatched_keys"])})
    if absent:
        raise ModelUnsupported(
            f"the checkpoint in {model_dir} lacks {len(absent)} weights or has them in another shape: "
            + ", ".join(absent[:4])
        )
    model.requires_grad_(False)
    return TransformersDecoder(model.eval().to(device), shape)


def read_model_config(model_dir: Path) -> tuple[Any, TextPart]:
    """transformers' config of a directory, and the part of it that is served. Raises ModelUnsupported."""
    return _read(model_dir, read_config_json(model_dir)[1])


def serving_dtype(config: Any, part: TextPart, asked: str | torch.dtype, kernels: Kernels) -> torch.dtype:
    """The dtype that a model of this config is served in. The linears of one that runs through transformers are
    torch's."""
    if is_fused(part.config.model_type):
        return _dtype(_stored_dtype(config), asked, kernels.multiplies)
    return _dtype(_stored_dtype(config), asked, lambda dtype: multiplies(dtype, kernels.device))


def _read(model_dir: Path, raw: dict[str, Any]) -> tuple[Any, TextPart]:
    config = _config(model_dir, raw)
    return config, text_part(config, raw)


def _config(model_dir: Path, raw: dict[str, Any]) -> Any:
    # Before transformers, which has another reason of its own for an old config, and none for many families.
    fields = text_fields(raw)
    obstacle = obstacle_of(fields)
    if obstacle is not None:
        raise ModelUnsupported(f"{obstacle} ({model_dir})")
    check_sizes(fields)
    try:
        read_scheme(fields)
    except QuantisationUnsupported as error:
        raise ModelUnsupported(f"{error.message} ({model_dir})") from error
    from transformers import AutoConfig

    scaling = raw.get("rope_scaling")
    try:
        if isinstance(scaling, dict) and scaling.get("type") == "su":
            # The first name of longrope, which transformers takes no parameters for any more.
            return AutoConfig.for_model(**raw | {"rope_scaling": scaling | {"type": "longrope"}})
        config = AutoConfig.from_pretrained(model_dir, trust_remote_code=False, local_files_only=True)
    except Exception as error:  # its validators raise errors of many kinds
        reason = " ".join(str(error).split())[:500]
        raise ModelUnsupported(
            f"transformers does not accept {model_dir / 'config.json'}: {reason}"
        ) from error
    return config


def _dtype(stored: str, asked: str | torch.dtype, multiplies: Callable[[torch.dtype], bool]) -> torch.dtype:
    if isinstance(asked, torch.dtype):
        return asked
    if asked != "auto":
        return _DTYPES[asked]
    found = _DTYPES[stored]
    if not multiplies(found):
        # Tens of times as fast there, for twice the memory.
        _log.warning("this processor can't multiply in %s, the checkpoint's dtype: float32 is used", found)
        return torch.float32
    return found


def _stored_dtype(config: Any) -> str:
    name = str(getattr(config, "dtype", None)).removeprefix("torch.")
    return name if name in _DTYPES else "float32"


def model_shape(config: Any) -> ModelShape:
    """The sizes of a model that runs through transformers. Raises ModelUnsupported."""
    text = config.get_text_config()
    heads = _number(text, "num_attention_heads")
    kind = CacheKind(
        kv_heads=getattr(text, "num_key_value_heads", None) or heads,
        head_dim=getattr(text, "head_dim", None) or _number(text, "hidden_size") // heads,
    )
    return ModelShape(
        caches=(kind,) * _number(text, "num_hidden_layers"),
        vocab_size=_number(text, "vocab_size"),
        max_positions=min(_number(text, "max_position_embeddings"), *_rope_limits(text)),
    )


def _number(config: Any, name: str) -> int:
    value = getattr(config, name, None)
    if not isinstance(value, int) or value < 1:
        raise ModelUnsupported(f"the config of {config.model_type} has no {name}")
    return value


def _rope_limits(config: Any) -> list[int]:
    """Where RoPE's frequencies would change with the longest row of a batch, so that neighbours would matter: up to
    these positions they do not."""
    parameters = getattr(config, "rope_parameters", None) or {}
    kinds = parameters.values() if all(isinstance(v, dict) for v in parameters.values()) else [parameters]
    limits = [_NO_LIMIT]
    for kind in kinds:
        rope_type = kind.get("rope_type", "default")
        if rope_type == "longrope":
            limit = kind.get("original_max_position_embeddings") or getattr(
                config, "original_max_position_embeddings", None
            )
            if not limit:
                raise ModelUnsupported("rope_type 'longrope' without original_max_position_embeddings")
            limits.append(limit)
        elif rope_type not in STATIC_ROPE_TYPES | {"proportional", "dynamic"}:
            raise ModelUnsupported(f"rope_type {shown(rope_type)} is not supported")
    return limits
