"""How the parts of a model are called, of a multimodal one whose text part is served too.

A checkpoint and an adapter name modules by their paths in some version of transformers, which has moved them more than
once (versions 4.52 and 5.0). Here each has one name: the path in transformers 5. Sources: `conversion_mapping` of
transformers, and `key_mapping` of `PeftModel.from_pretrained`, which renames the tensors of older adapters by it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from loraplex.adapters.expert_shapes import SPELLINGS
from loraplex.kernels.lora.site_groups import MODEL_PROJECTION

DECODERS: tuple[tuple[str, str], ...] = (
    ("model.", "a language model with its head, as AutoModelForCausalLM builds it"),
    ("", "a decoder alone, as AutoModel builds it"),
    ("model.language_model.", "a multimodal model with its head, since transformers 4.52"),
    ("language_model.", "a multimodal model without its head, since transformers 4.52"),
    ("language_model.model.", "a multimodal model before transformers 4.52"),
    ("model.text_model.", "Idefics and SmolVLM, with their head"),
    ("text_model.", "Idefics and SmolVLM, without their head"),
    ("backbone.", "Nemotron-H by its own code"),
    ("thinker.model.", "Qwen2.5-Omni and Qwen3-Omni with their speech, in transformers 4"),
    ("thinker.model.language_model.", "Qwen2.5-Omni and Qwen3-Omni with their speech, in transformers 5"),
)
"""Prefixes before "layers" in the path of a decoder's module, and the model that each belongs to."""
LAYER_LISTS = ("layers", "h", "blocks")
"""Names of the list of layers in a decoder; the last two are GPT-2's, and of those that came after it."""
_OF_DECODERS = frozenset(
    {
        *LAYER_LISTS,
        "embed_tokens",
        "embeddings",
        "norm",
        "embed_tokens_per_layer",
        "per_layer_projection_norm",
        MODEL_PROJECTION,
    }
)
_MODEL = "model."
_HEADS = (("language_model.lm_head.", "lm_head."), ("embed_out.", "lm_head."))


@dataclass(frozen=True, slots=True)
class ModelParts:
    """A model type. The modules of a multimodal one lie in "model.": the language model in `decoder`, what no text goes
    through in `others`."""

    others: tuple[str, ...] = ()
    decoder: str = "language_model"
    renamed: tuple[tuple[str, str], ...] = ()
    """Further beginnings of names, each with the one of now."""
    inside: tuple[tuple[str, str], ...] = ()
    """Parts of names within a layer, each with the one of now."""
    is_converted: bool = False
    """Whether transformers makes modules of other names, or sizes, of the tensors of `others`."""
    layer_count: str = "num_hidden_layers"
    """The field of config.json with the number of layers."""
    transposed: bool = False
    """Whether the linears of the layers are stored as [in, out]."""
    unread: tuple[str, ...] = ()
    """How the names begin of tensors that transformers makes no modules of: a head that predicts further tokens."""
    expert_linears: tuple[str, ...] = ()
    """Names of an expert's linears, gate, up and down, of types whose files may have stacks of them."""
    experts_in_turns: bool = False
    """Whether these stacks are [experts, in, out], with columns of gate and up in turns."""

    def part_of(self, name: str) -> str | None:
        """The part beside the language model that a module or tensor lies in, by its name of now."""
        first, _, rest = name.partition(".")
        part = rest.partition(".")[0]
        return part if first == "model" and part in self.others else None

    def module_name(self, name: str) -> str:
        """The name of now of a module or tensor; `name` itself where it is none of this model's."""
        for old, new in (*self.renamed, *_HEADS):
            if name.startswith(old):
                name = new + name.removeprefix(old)
        for old, new in self.inside:
            name = name.replace(old, new)
        if not self.others:
            return name
        if name.partition(".")[0] in self.others:
            name = _MODEL + name
        if self.part_of(name) is not None:
            # CLIP's and SigLIP's towers had another module around their layers.
            part, inner, rest = name.partition(".vision_model.")
            return f"{part}.{rest}" if inner and part.count(".") == 1 else name
        for decoder, _ in DECODERS:
            if (rest_of := part_behind(decoder, name)) is not None:
                return f"{_MODEL}{self.decoder}.{rest_of}"
        return name


def part_behind(decoder: str, name: str) -> str | None:
    """The path of a module or tensor within the decoder of this prefix; None where it lies elsewhere."""
    if not name.startswith(decoder):
        return None
    part = name.removeprefix(decoder)
    return part if part.partition(".")[0] in _OF_DECODERS else None


_TEXT = ModelParts()
_PREDICTS = ("mtp.",)
_EXPERTS = ModelParts(expert_linears=SPELLINGS[0])
_LLAVA = ModelParts(("vision_tower", "multi_modal_projector", "image_newline", "vision_resampler"))
_LFM3_INSIDE = ((".self_attn.gate_proj.", ".self_attn.g_proj."),)
_COSMOS_INSIDE = (
    *((f".self_attn.to_{letter}.", f".self_attn.{letter}_proj.") for letter in "qkv"),
    (".self_attn.to_out.", ".self_attn.o_proj."),
    *((f".self_attn.norm_{letter}.", f".self_attn.{letter}_norm.") for letter in "qk"),
)
_IDEFICS = ModelParts(("vision_model", "connector"), "text_model")
_QWEN_VL = ModelParts(("visual",))
_MINICPM = ModelParts(("vision_tower", "merger"), unread=_PREDICTS)
_QWEN_OMNI = ModelParts(("visual", "audio_tower"), renamed=(("thinker.", ""),))
_GEMMA4 = ModelParts(
    ("vision_tower", "audio_tower", "embed_vision", "embed_audio", "vision_embedder"), is_converted=True
)
MULTIMODAL: Mapping[str, ModelParts] = {
    # Types whose language model is of a family of the fused decoder.
    "cosmos3_omni": replace(
        _QWEN_VL,
        renamed=tuple(
            (f"{part}.", f"model.visual.{part}.")
            for part in ("blocks", "merger", "patch_embed", "pos_embed", "deepstack_merger_list")
        ),
        inside=_COSMOS_INSIDE,
    ),
    "deepseek_vl": ModelParts(("vision_model", "aligner")),
    "deepseek_vl_hybrid": ModelParts(
        (
            "vision_model", "aligner", "high_res_vision_model", "high_res_vision_neck", "high_res_vision_proj",
            "high_res_vision_alpha",
        )
    ),
    "fast_vlm": _LLAVA,
    "gemma3": _LLAVA,
    "gemma4": replace(_GEMMA4, expert_linears=_EXPERTS.expert_linears),
    "gemma4_unified": _GEMMA4,
    "got_ocr2": _LLAVA,
    "idefics2": _IDEFICS,
    "idefics3": _IDEFICS,
    "internvl": _LLAVA,
    "janus": ModelParts(
        ("vision_model", "aligner", "vqmodel", "generation_embeddings", "generation_aligner", "generation_head")
    ),
    "lighton_ocr": ModelParts(("vision_encoder", "vision_projection")),
    "lfm2_vl": _LLAVA,
    "lfm3_vl": replace(_LLAVA, inside=_LFM3_INSIDE, is_converted=True),
    "llava": _LLAVA,
    "llava_next": _LLAVA,
    "llava_next_video": _LLAVA,
    "llava_onevision": _LLAVA,
    "minicpm_ocr": _MINICPM,
    "minicpmv4_6": _MINICPM,
    "minicpmv4_7": _MINICPM,
    "mistral3": _LLAVA,
    "ovis2": ModelParts(("vision_tower", "visual_embeddings_table")),
    "paddleocr_vl": ModelParts(("visual", "projector"), renamed=(("mlp_AR.", "projector."),)),
    "perception_lm": _LLAVA,
    "pp_chart2table": _LLAVA,
    "qianfan_ocr": ModelParts(
        _LLAVA.others,
        # transformers 5 saves the language model's layers in an "encoder" too.
        renamed=(
            ("language_model.model.encoder.", "language_model.model."),
            ("vision_model.", "vision_tower."),
            ("mlp1.", "multi_modal_projector."),
        ),
        is_converted=True,
    ),
    "qwen2_vl": _QWEN_VL,
    "qwen2_5_vl": _QWEN_VL,
    "qwen2_5_omni": replace(_QWEN_OMNI, unread=("talker.", "token2wav.")),
    "qwen2_5_omni_thinker": _QWEN_OMNI,
    "qwen3_5": replace(_QWEN_VL, unread=_PREDICTS),
    "qwen3_5_moe": replace(_QWEN_VL, unread=_PREDICTS, expert_linears=_EXPERTS.expert_linears),
    "qwen3_vl": _QWEN_VL,
    "smolvlm": _IDEFICS,
    "video_llava": ModelParts(("image_tower", "video_tower", "multi_modal_projector")),
    "video_llama_3": ModelParts(("vision_model", "projector")),
    "vipllava": _LLAVA,
    # Types that run through transformers.
    "aria": _LLAVA,
    "aya_vision": _LLAVA,
    "cohere2_vision": _LLAVA,
    "cohere_compass": _QWEN_VL,
    "cosmos3_edge": ModelParts(
        ("visual", "projector"),
        inside=(*_COSMOS_INSIDE, (".mlp.up_proj.", ".mlp.fc1."), (".mlp.down_proj.", ".mlp.fc2.")),
        is_converted=True,
    ),
    "ernie4_5_vl_moe": ModelParts(
        ("vision_tower", "resampler_model"),
        renamed=(("model.vision_model.", "model.vision_tower."),),
        is_converted=True,
    ),
    "emu3": ModelParts(("vqmodel",), "text_model"),
    "exaone4_5": _QWEN_VL,
    "fuyu": ModelParts(("vision_embed_tokens",)),
    "glm46v": _QWEN_VL,
    "glm4v": _QWEN_VL,
    "glm4v_moe": _QWEN_VL,
    "glm_ocr": _QWEN_VL,
    "glmga": _QWEN_VL,
    "granite4_vision": ModelParts(("vision_tower", "layerwise_projectors", "spatial_projectors", "image_newline")),
    "granite_docling": ModelParts(("vision_model",), "text_model"),
    "hunyuan_vl": ModelParts(
        ("vision_tower",),
        renamed=(("vit.", "vision_tower."), ("model.vit.", "model.vision_tower.")),
        is_converted=True,
    ),
    "hyperclovax_vision_v2": ModelParts(
        ("vision_model", "projector"), renamed=(("model.vision_projector.", "model.projector."),)
    ),
    "muse_glimmer": ModelParts(("vision_tower", "vision_adapter", "vision_projection", "perception_emb_norm")),
    "paligemma": _LLAVA,
    "qwen3_omni_moe": replace(_QWEN_OMNI, unread=("talker.", "code2wav.")),
    "qwen3_omni_moe_thinker": _QWEN_OMNI,
    "qwen3_vl_moe": _QWEN_VL,
    "step3p7": ModelParts(
        ("vision_model", "multi_modal_projector"),
        renamed=(("vit_large_projector.", "model.multi_modal_projector."),),
        inside=((".share_expert.", ".mlp.shared_experts."),),
        is_converted=True,
    ),
}  # fmt: skip
"""The parts of a multimodal model by its `model_type`."""


# Some files are of the decoder alone.
_GPT = ModelParts(renamed=(("h.", "transformer.h."),), layer_count="n_layer")
_TEXTS: Mapping[str, ModelParts] = {
    **dict.fromkeys(("bloom", "codegen", "gpt_bigcode", "gptj"), _GPT),
    "gpt2": replace(_GPT, transposed=True),
    "gpt_neo": replace(_GPT, layer_count="num_layers"),
    "mpt": ModelParts(layer_count="n_layers"),
    "hy_v3": ModelParts(inside=((".mlp.shared_mlp.", ".mlp.shared_experts."),)),
    "lfm3": ModelParts(inside=_LFM3_INSIDE),
    "gpt_oss": replace(_EXPERTS, experts_in_turns=True),
    **dict.fromkeys(
        ("granitemoe", "granitemoehybrid", "granitemoeshared"),
        replace(
            _EXPERTS,
            inside=(
                (".block_sparse_moe.input_linear.", ".block_sparse_moe.experts.gate_up_proj."),
                (".block_sparse_moe.output_linear.", ".block_sparse_moe.experts.down_proj."),
                (".block_sparse_moe.router.layer.", ".block_sparse_moe.router."),
            ),
        ),
    ),
    **dict.fromkeys(("gemma4_text", "glm4_moe", "olmoe", "qwen2_moe", "qwen3_moe"), _EXPERTS),
    "mixtral": ModelParts(inside=((".block_sparse_moe.", ".mlp."),), expert_linears=SPELLINGS[1]),
    "olmo_hybrid": ModelParts(
        inside=(
            (".attention_layer_norm.", ".input_layernorm."),
            (".feedforward_layer_norm.", ".post_attention_layernorm."),
        )
    ),
    "nemotron_h": ModelParts(renamed=(("backbone.", "model."),), unread=_PREDICTS),
    "qwen3_5_text": ModelParts(unread=_PREDICTS),
    **dict.fromkeys(("qwen3_5_moe_text", "qwen3_next"), replace(_EXPERTS, unread=_PREDICTS)),
    "laguna": ModelParts(inside=((".mlp.shared_expert.", ".mlp.shared_experts."),)),
}
"""Text models whose names, sizes or tensors are stored otherwise than those of others."""


_SEEN_OR_HEARD = frozenset(part for parts in MULTIMODAL.values() for part in parts.others)


def is_of_multimodal(name: str) -> bool:
    """Whether a module has the name of a part of some multimodal model that no text goes through."""
    return name.removeprefix(_MODEL).partition(".")[0] in _SEEN_OR_HEARD


def parts_of(model_type: object) -> ModelParts:
    """The parts of a model; of a text model, one that has no other."""
    if not isinstance(model_type, str):
        return _TEXT
    return MULTIMODAL.get(model_type) or _TEXTS.get(model_type, _TEXT)
