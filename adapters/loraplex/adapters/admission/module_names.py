"""The names that one module goes by in adapters and checkpoints.

A file names modules by their paths in the model that was trained. One decoder has several: inside a model with a head
("model.layers.3…"), alone ("layers.3…", as AutoModel builds it), or as a part of a model that also sees
(`model_parts`). The weights are the same under each name.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from loraplex.adapters.admission.model_parts import DECODERS, LAYER_LISTS, part_behind, parts_of
from loraplex.adapters.errors import AdapterRefused
from loraplex.adapters.spec import BaseSpec
from loraplex.kernels.lora.site_groups import HEAD

HEADS: tuple[tuple[str, str], ...] = (
    (HEAD, "a model of transformers"),
    ("language_model.lm_head", "a multimodal model before transformers 4.52"),
    ("thinker.lm_head", "Qwen2.5-Omni and Qwen3-Omni with their speech"),
    ("output", "a model of torchtune, of Llama's own code, or InternLM2"),
    ("embed_out", "GPT-NeoX before transformers 5"),
)
"""Names of the linear behind the layers, and which model they are names in."""
HEAD_NAMES = frozenset(name for name, _ in HEADS)
WRAPPERS: tuple[tuple[str, str], ...] = (
    ("_orig_mod", "torch.compile, of the model or of its layers"),
    ("_fsdp_wrapped_module", "FullyShardedDataParallel"),
    ("_checkpoint_wrapped_module", "PyTorch's wrapper for activation checkpointing"),
)
"""Words that a wrapper puts into the paths of the modules inside it, anywhere, and which wrapper."""
_WRAPPER = re.compile(rf"(?<![^.])(?:{'|'.join(word for word, _ in WRAPPERS)})\\?\.")
PREFIX = "base_model.model."
"""The prefix that PEFT gives the path of a module."""
_LAYERS = re.compile(rf"(?<![^.])(?:{'|'.join(LAYER_LISTS)})\.\d")
_BEFORE = re.compile(r"(?:module\.)+(?=base_model\.model\.)")
"""The prefix of DataParallel, before PEFT's."""


@dataclass(frozen=True, slots=True)
class ModuleNames:
    """How a file names the base's modules. Before "layers" the base's own paths have `base_decoder`, those of the file
    `decoder`; `head` is the file's name of the head, None where it has no tensors for it. `multimodal`: the base's."""

    base_decoder: str
    decoder: str
    head: str | None
    multimodal: str
    inside: tuple[tuple[str, str], ...] = ()
    """Parts of names within a layer that other versions of the base's model have, each with the base's own."""
    inside_in_file: tuple[tuple[str, str], ...] = ()
    """Those of them that the file has."""

    def in_file(self, path: str) -> str:
        """The file's name of a module or weight that the base calls `path`."""
        if _is_or_holds(HEAD, path):
            return (self.head or HEAD) + path.removeprefix(HEAD)
        path = _replaced(path, [(own, other) for other, own in self.inside_in_file])
        part = part_behind(self.base_decoder, path)
        return path if part is None else self.decoder + part

    def in_base(self, name: str) -> str:
        """The base's name of a module or weight, whichever of its names is given; `name` itself where it has no such
        one."""
        for head in HEAD_NAMES:
            if _is_or_holds(head, name):
                return HEAD + name.removeprefix(head)
        name = _replaced(name, self.inside)
        for decoder in _known_decoders(self.base_decoder):
            part = part_behind(decoder, name)
            if part is not None:
                return self.base_decoder + part
        return parts_of(self.multimodal).module_name(name)

    def own_name(self, name: str) -> str:
        """The file's own name of a module that its config names by any of them. A single word is the end of a path in
        each of them, and stays; so does the head's, which could mean anything else where the file has no head."""
        if "." not in name and (self.head is None or name not in HEAD_NAMES):
            return name
        return self.in_file(self.in_base(name))


def without_wrappers(name: str) -> str:
    """The path of a module, or an expression for paths, in the model that was wrapped."""
    return _WRAPPER.sub("", name)


def tensor_without_wrappers(name: str) -> str:
    """The name that PEFT gives a tensor where nothing wraps the model."""
    bare = _WRAPPER.sub("", name)
    before = _BEFORE.match(bare)
    return bare[before.end() :] if before else bare


def names_of(modules: Iterable[str], base: BaseSpec) -> ModuleNames:
    """Find out which names a file uses, from the paths of its modules or weights. Where it names no module of the
    decoder, or not the head, the base's own. Raises AdapterRefused (unexpected_tensor) where it uses two at once: two
    tensors could stand for one module."""
    own = _decoder_of(base)
    known = _known_decoders(own)
    decoders: dict[str, str] = {}
    heads: dict[str, str] = {}
    inside = parts_of(base.model_type).inside
    parts: dict[tuple[str, str], dict[str, str]] = {pair: {} for pair in inside}
    for module in modules:
        for decoder in known:
            if part_behind(decoder, module) is not None:
                decoders.setdefault(decoder, f"{decoder}layers")
        for head in HEAD_NAMES:
            if _is_or_holds(head, module):
                heads.setdefault(head, head)
        for pair, spellings in parts.items():
            spellings.update((part, part.strip(".")) for part in pair if part in f".{module}.")
    for found, what in (
        (decoders, "layers"),
        (heads, "head"),
        *((spellings, "modules") for spellings in parts.values()),
    ):
        if len(found) > 1:
            first, second, *_ = found.values()
            raise AdapterRefused(
                "unexpected_tensor",
                f"the file names the model's {what} in two ways, {first} and {second}: name all tensors in one",
            )
    return ModuleNames(
        own,
        next(iter(decoders), own),
        next(iter(heads), None),
        base.multimodal,
        inside,
        tuple(pair for pair in inside if pair[0] in parts[pair]),
    )


def _replaced(path: str, parts: Iterable[tuple[str, str]]) -> str:
    """The path, or the end of one, with each of these parts replaced by another."""
    whole = f".{path}."
    for old, new in parts:
        whole = whole.replace(old, new)
    return whole[1:-1]


def _decoder_of(base: BaseSpec) -> str:
    for shape in base.sites.values():
        if found := _LAYERS.search(shape.module_path):
            return shape.module_path[: found.start()]
    return "model."


def _known_decoders(own: str) -> tuple[str, ...]:
    """`own` may be one that only its family has ("gpt_neox."); AutoModel's paths lack its first word."""
    return tuple(dict.fromkeys((own, own.partition(".")[2], *(decoder for decoder, _ in DECODERS))))


def _is_or_holds(module: str, name: str) -> bool:
    return name == module or name.startswith(f"{module}.")
