"""A planned model without its weights: its sizes, as the server's own code for loading derives them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from loraplex.adapters.pooled import Head
from loraplex.engine.model.base import ModelShape
from loraplex.engine.model.base_head import read_base_head
from loraplex.engine.model.config_fields import refusing
from loraplex.engine.model.family import DecoderSpec
from loraplex.engine.model.fused import DecoderReader
from loraplex.engine.model.loading import lay_out_wrapped
from loraplex.engine.model.model_plan import ModelPlan
from loraplex.engine.model.weights import ExaminedTensors, open_checkpoint
from loraplex.kernels.experts.lora_types import ExpertSiteGroup
from loraplex.kernels.linear.dense import pack_weight
from loraplex.kernels.linear.packed import PackedLinear, every_part
from loraplex.kernels.lora.site_groups import SiteGroup
from loraplex.kernels.weight_form import FLOATS

_META = torch.device("meta")


@dataclass(frozen=True, slots=True)
class ModelOutline:
    """The sizes that memory is divided by, and the time of a step is estimated from."""

    model_type: str
    shape: ModelShape
    site_groups: tuple[SiteGroup, ...]
    head_group: SiteGroup | None
    embedding_shape: tuple[int, int] | None
    expert_groups: tuple[ExpertSiteGroup, ...]
    dtype: torch.dtype
    kv_dtype: torch.dtype
    weight_bytes: int
    """All weights in memory."""
    step_bytes: int
    """Those that a decoding step reads once: all but the embedding, where it reads a row for each token."""
    num_weights: int
    step_weights: int
    """Those that a row is multiplied with."""
    hidden_size: int
    """The width of a layer, and of its feed-forward part."""
    inner_size: int
    head: Head | None = None
    """The head of a checkpoint that classifies itself."""
    expert_bytes: int = 0
    """Weights of experts, of all weights in memory."""
    chosen_share: float = 0.0
    """The share of a layer's experts that a row goes through."""

    @property
    def num_layers(self) -> int:
        return self.shape.num_layers

    def read_bytes(self, rows: int) -> float:
        """Weights that a decoding step of `rows` reads, where routers choose any experts alike."""
        return self.step_bytes - self.expert_bytes * (1 - self.chosen_share) ** rows


def outline_model(plan: ModelPlan) -> ModelOutline:
    """The device of the plan need not be here. Raises ModelUnsupported."""
    with refusing(f"the sizes of {plan.model_type} are not known"):
        outline = _outline_wrapped(plan) if plan.spec is None else _outline_fused(plan, plan.spec)
    return outline


def examine_tensors(plan: ModelPlan) -> None:
    """Compare a checkpoint with its plan, without reading weights: all of its tensors, or for a model that runs through
    transformers its modules. Raises ModelUnsupported as `load_model` does."""
    if plan.head is not None:
        text = plan.config.get_text_config() if plan.spec is None else plan.spec
        read_base_head(plan.model_dir, plan.head, plan.shape.vocab_size, text.hidden_size)
    if plan.spec is None:
        lay_out_wrapped(plan)
        return
    with open_checkpoint(plan.model_dir) as checkpoint:
        examined = ExaminedTensors(checkpoint)
        reader = DecoderReader(examined, plan.spec, torch.float32, _META, codes=examined)
        reader.decoder()
        checkpoint.refuse_leftover(plan.spec.model_type, (*plan.unread, *reader.unread))


def _outline_fused(plan: ModelPlan, spec: DecoderSpec) -> ModelOutline:
    counted = _CountedTensors(plan, has_head=not spec.tied)
    decoder = DecoderReader(counted, spec, plan.dtype, _META, codes=counted).decoder()
    count = spec.vocab_size * spec.hidden_size
    embed, has_copy = count * plan.dtype.itemsize, counted.has_head_of_codes
    if spec.tied and not has_copy and _packs(plan):
        # Where weights are packed, the head is a copy of the embeddings that it is tied to.
        counted.num_bytes, has_copy = counted.num_bytes + embed, True
    own = spec.layers[0].own_input
    # Read by token, as the embedding is.
    table = 0 if own is None else own.vocab_size * own.size * spec.num_layers
    unread = table + (0 if spec.tied and not has_copy else count)
    return ModelOutline(
        model_type=spec.model_type,
        shape=plan.shape,
        site_groups=decoder.site_groups,
        head_group=decoder.head_group,
        embedding_shape=decoder.embedding_shape,
        expert_groups=decoder.expert_groups,
        dtype=plan.dtype,
        kv_dtype=plan.kv_dtype,
        weight_bytes=counted.num_bytes,
        step_bytes=counted.num_bytes - unread * plan.dtype.itemsize,
        num_weights=counted.num_weights,
        step_weights=counted.num_weights
        - table
        - (0 if spec.tied else count)
        - (spec.expert_weights - spec.chosen_weights),
        hidden_size=spec.hidden_size,
        inner_size=spec.intermediate_size,
        head=plan.summary.head,
        expert_bytes=plan.expert_bytes,
        chosen_share=spec.chosen_weights / max(spec.expert_weights, 1),
    )


def _packs(plan: ModelPlan) -> bool:
    if plan.kernels.device.type != "cpu":
        return False
    weight = torch.zeros(64, 64, dtype=plan.dtype)
    packed = plan.kernels.ops.pack(weight, FLOATS, plan.dtype)
    return all(part is not weight for part in every_part(packed))


class _CountedTensors:
    """A checkpoint's tensors without values, and the reader of linears that are more than floats. Each weight is read
    once: the bytes are those of the model."""

    def __init__(self, plan: ModelPlan, *, has_head: bool) -> None:
        self.num_bytes = 0
        self.num_weights = 0
        self.has_head_of_codes = False
        self._plan = plan
        self._has_head = has_head

    def __contains__(self, name: str) -> bool:
        return name == "model.embed_tokens.weight" or (self._has_head and name == "lm_head.weight")

    def read_into(self, name: str, out: torch.Tensor) -> None:
        self.num_weights += out.numel()
        self.num_bytes += out.nbytes

    def stores(self, module: str) -> bool:
        return False  # of a head beside the embeddings that it is tied to

    def read(self, modules: Mapping[str, tuple[int, int]]) -> PackedLinear | None:
        """Count the linears with these names, [rows, K] each, if they are more than floats."""
        rows, inputs = sum(shape[0] for shape in modules.values()), next(iter(modules.values()))[1]
        linears, dtype = self._plan.linears, self._plan.dtype
        form = linears.form_of(modules, inputs)
        if form.codes == "floats":
            return None
        self.num_bytes += rows * form.row_bytes(inputs, dtype.itemsize, linears.backend)
        is_head = any(name.endswith(("lm_head", "embed_tokens")) for name in modules)
        self.has_head_of_codes |= is_head
        if not is_head or self._has_head:
            self.num_weights += rows * inputs
        return pack_weight(torch.empty(rows, inputs, dtype=dtype, device=_META))


def _outline_wrapped(plan: ModelPlan) -> ModelOutline:
    decoder = lay_out_wrapped(plan)
    model = decoder.eager_model
    tensors = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    total = sum(tensor.nbytes for tensor in tensors.values())
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    is_tied = head is None or head.weight is embedding.weight
    read_once = total - (0 if is_tied else embedding.weight.nbytes)
    text = plan.config.get_text_config()
    return ModelOutline(
        model_type=plan.model_type,
        shape=decoder.shape,
        site_groups=decoder.site_groups,
        head_group=decoder.head_group,
        embedding_shape=decoder.embedding_shape,
        expert_groups=decoder.expert_groups,
        dtype=plan.dtype,
        kv_dtype=plan.kv_dtype,
        weight_bytes=total,
        step_bytes=read_once,
        num_weights=total // plan.dtype.itemsize,
        step_weights=read_once // plan.dtype.itemsize,
        hidden_size=text.hidden_size,
        inner_size=getattr(text, "intermediate_size", None) or 4 * text.hidden_size,
        head=plan.summary.head,
    )
