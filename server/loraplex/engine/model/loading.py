"""From a plan to a model that can serve."""

from __future__ import annotations

import copy
import logging
from pathlib import Path
from typing import Any

import torch

from loraplex.adapters.admission.base_families import CONVOLUTION, not_served
from loraplex.adapters.admission.model_parts import parts_of
from loraplex.engine.model.base import Model, ModelUnsupported
from loraplex.engine.model.config_fields import refusing
from loraplex.engine.model.families.own_attention import has_own_attention
from loraplex.engine.model.fused import DecoderReader, FusedDecoder
from loraplex.engine.model.model_plan import ModelPlan
from loraplex.engine.model.probe import probe
from loraplex.engine.model.served_config import wrapped_shape
from loraplex.engine.model.stored_linears import LinearReader
from loraplex.engine.model.weights import open_checkpoint
from loraplex.engine.model.wrapped import ATTENTION_NAME, TransformersDecoder, register_attention
from loraplex.kernels.linear.packed import PackedLinear, every_part

_log = logging.getLogger(__name__)


def load_model(plan: ModelPlan) -> Model:
    """Load a checkpoint as planned: `FusedDecoder` for its families, `TransformersDecoder` for others. Raises
    ModelUnsupported where its tensors are not those of the config."""
    for remark in plan.remarks:
        _log.warning("%s", remark)
    if plan.spec is None:
        if plan.untested:
            lay_out_wrapped(plan)  # what its modules tell of, before weights are read
        decoder = load_wrapped(plan.model_dir, plan.config, plan.dtype, plan.kernels.device)
        if plan.untested:
            probe(decoder)
        return decoder
    ops, linears, codes = plan.kernels.ops, plan.linears, None
    with open_checkpoint(plan.model_dir) as checkpoint:
        if linears.form.codes != "floats":
            codes = LinearReader(checkpoint, ops, plan.dtype, linears.form, quantise=linears.quantise)
        reader = DecoderReader(
            checkpoint, plan.spec, plan.dtype, plan.kernels.device, ops, plan.attention, codes
        )
        fused = reader.decoder()
        # It would change the computation.
        checkpoint.refuse_leftover(plan.spec.model_type, (*plan.unread, *reader.unread))
    return fused


def library_of(model: Model) -> str:
    """The library, with its version, that multiplies with linears of a model; empty for the engine's own kernels."""
    parts = every_part(model.weights) if isinstance(model, FusedDecoder) else ()
    return next((part.library for part in parts if isinstance(part, PackedLinear) and part.library), "")


def load_wrapped(
    model_dir: Path, config: Any, dtype: torch.dtype, device: torch.device
) -> TransformersDecoder:
    """Load any decoder through transformers, not probed yet. Raises ModelUnsupported."""
    register_attention()
    shape = wrapped_shape(config)
    with refusing(f"transformers can't load {model_dir}"):
        model, info = _auto_class(config).from_pretrained(
            model_dir,
            config=copy.deepcopy(config),  # the attention is chosen by writing into it
            dtype=dtype,
            attn_implementation=_attention_name(config),
            use_safetensors=True,
            trust_remote_code=False,
            local_files_only=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # so that they are reported
        )
    # transformers would give these random values and go on.
    absent = sorted({*map(str, info["missing_keys"]), *map(str, info["mismatched_keys"])})
    if absent:
        raise ModelUnsupported(
            f"the checkpoint in {model_dir} lacks {len(absent)} weights or has them in another shape: "
            + ", ".join(absent[:4])
        )
    model.requires_grad_(False)
    model = _text_alone(model).to(device)  # a device without the memory is no fault of the config
    with refusing(f"{config.model_type} cannot be served through transformers"):
        decoder = TransformersDecoder(model, shape)
    return decoder


def lay_out_wrapped(plan: ModelPlan) -> TransformersDecoder:
    """The same decoder without weights, on the device "meta". Raises ModelUnsupported, also for what its modules show
    and its config did not."""
    register_attention()
    with refusing(f"transformers cannot lay out this {plan.model_type}"):
        with torch.device("meta"):
            model = _auto_class(plan.config).from_config(
                copy.deepcopy(plan.config),
                dtype=plan.dtype,
                attn_implementation=_attention_name(plan.config),
                trust_remote_code=False,
            )
        model = _text_alone(model)
        if any(isinstance(module, torch.nn.Conv1d) for module in model.modules()):
            raise ModelUnsupported(not_served(plan.model_type, CONVOLUTION))
        decoder = TransformersDecoder(model, plan.shape)
    return decoder


def _attention_name(config: Any) -> str:
    return "eager" if has_own_attention(config.model_type) else ATTENTION_NAME


def _auto_class(config: Any) -> Any:
    import transformers

    is_multimodal = bool(parts_of(config.model_type).others)
    return transformers.AutoModelForImageTextToText if is_multimodal else transformers.AutoModelForCausalLM


def _text_alone(model: Any) -> Any:
    """A model without the parts that no text goes through."""
    for part in parts_of(model.config.model_type).others:
        setattr(model.model, part, None)
    if parts_of(model.config.model_type).transposed:
        _turn_linears(model)
    return model.eval()


def _turn_linears(model: Any) -> None:
    """Put linears in place of GPT-2's modules, whose weights are [in, out]."""
    from transformers.pytorch_utils import Conv1D

    for name, module in [*model.named_modules()]:
        if isinstance(module, Conv1D):
            linear = torch.nn.Linear(module.nx, module.nf, device="meta", dtype=module.weight.dtype)
            linear.weight = torch.nn.Parameter(module.weight.T.contiguous(), requires_grad=False)
            linear.bias = torch.nn.Parameter(module.bias, requires_grad=False)
            model.set_submodule(name, linear)
