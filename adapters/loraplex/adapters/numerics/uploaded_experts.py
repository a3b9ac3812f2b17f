"""The second reading of LoRA on the routed experts of a mixture, apart from `loraplex.adapters.admission.experts`.

Three forms, with E experts of K inputs and N outputs, and the rank r of one expert:

    experts.5.gate_proj   A [r, K], B [N, r]                   a pair for each expert
    experts.w1            A [E or 1, r, K], B [E or 1, N, r]   three dimensions
    experts[.base_layer]  A [E·r, K], B [N, r·E]               stacks: row e·r + i of A and column i·E + e of B belong
                                                               to expert e
    the same, turned      A [E·r, N], B [K, r·E]               of the transposed weights, by PEFT before 0.19.1
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from loraplex.adapters.errors import AdapterRefused
from loraplex.adapters.spec import ExpertShape

_Matrix = NDArray[np.float32]
_SITES = {
    "gate_proj": "gate", "w1": "gate", "up_proj": "up", "w3": "up", "down_proj": "down", "w2": "down",
}  # fmt: skip
_IN_TURNS = frozenset({"gpt_oss"})
"""Model types whose files have the rows of gate and up in turns. They are served as halves."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor of the file. `read` gives its rows [first, last) in float32."""

    shape: tuple[int, ...]
    read: Callable[[int, int], _Matrix]

    def whole(self) -> _Matrix:
        return self.read(0, self.shape[0])


@dataclass(frozen=True, slots=True)
class _Module:
    """A module of the file, with its tensors "a" and "b"."""

    path: str
    tensors: dict[str, StoredTensor]

    def both(self) -> tuple[StoredTensor, StoredTensor]:
        if self.tensors.keys() != {"a", "b"}:
            raise AdapterRefused("missing_tensor", f"{self.path[:160]!a} needs lora_A and lora_B alone")
        return self.tensors["a"], self.tensors["b"]


@dataclass(frozen=True, slots=True)
class ExpertMatrices:
    """One site of one expert: a [r, K], b [N, r], and the path by which the config gives it an alpha."""

    path: str
    a: _Matrix
    b: _Matrix


class UploadedExperts:
    """The matrices of a file by layer, site and expert. One whole B of a stack is held at a time."""

    def __init__(
        self, experts: Mapping[int, ExpertShape], config: Mapping[str, Any], model_type: str
    ) -> None:
        self._experts = experts
        self._parameters = tuple(str(name) for name in config.get("target_parameters") or ())
        self._in_turns = model_type in _IN_TURNS
        self._pairs: dict[tuple[int, str, int], _Module] = {}
        self._wholes: dict[tuple[int, str], _Module] = {}
        self._stacks: dict[int, dict[int, _Module]] = {}
        self._by_site: dict[int, dict[str, _Module]] = {}
        self._turned: bool | None = None
        self._held: tuple[tuple[int, str], _Matrix] | None = None

    def take(self, inside: str, module: str, kind: str, tensor: StoredTensor) -> bool:
        """Take a tensor of the module `module`, whose path within the decoder is `inside`. False if it lies on no
        routed expert. Raises AdapterRefused."""
        before, found, rest = f"{inside}.".partition(".experts.")
        words = before.split(".")
        is_of_layer = len(words) > 1 and words[0] == "layers" and words[1].isascii() and words[1].isdecimal()
        if not (found and is_of_layer) or int(words[1]) not in self._experts:
            return False
        layer = int(words[1])
        parts = [word for word in rest.split(".") if word]
        into: dict[Any, _Module]
        key: Any
        if not parts or set(parts) == {"base_layer"}:
            into, key = self._stacks.setdefault(layer, {}), len(parts)
        elif len(parts) == 2 and parts[0].isdecimal() and parts[1] in _SITES:
            into, key = self._pairs, (layer, _SITES[parts[1]], int(parts[0]))
        elif len(parts) == 1 and parts[0] in _SITES:
            into, key = self._wholes, (layer, _SITES[parts[0]])
        else:
            raise AdapterRefused("unexpected_tensor", f"no form of experts that is known: {module[:160]!a}")
        tensors = into.setdefault(key, _Module(module, {})).tensors
        if kind in tensors:
            raise AdapterRefused("unexpected_tensor", f"a second {kind} came for {module[:160]!a}")
        tensors[kind] = tensor
        return True

    def keys(self) -> Iterator[tuple[int, str, int]]:
        """Layer, site and expert of all that there is, those of a tensor behind each other."""
        yield from self._pairs
        for layer, site in self._wholes:
            yield from ((layer, site, expert) for expert in range(self._experts[layer].count))
        for layer in self._stacks:
            for site in self._sites_of_stacks(layer):
                yield from ((layer, site, expert) for expert in range(self._experts[layer].count))

    def path(self, layer: int, site: str) -> str:
        """A name for messages."""
        return f"{self._experts[layer].module_path}.{site}"

    def read(self, layer: int, site: str, expert: int) -> ExpertMatrices:
        """Raises AdapterRefused, and what the tensors raise."""
        if pair := self._pairs.get((layer, site, expert)):
            a, b = (tensor.whole() for tensor in pair.both())
            return ExpertMatrices(pair.path, a, b)
        if whole := self._wholes.get((layer, site)):
            a, b = (tensor.read(at := min(expert, tensor.shape[0] - 1), at + 1)[0] for tensor in whole.both())
            return ExpertMatrices(whole.path, a, b)
        return self._of_stack(layer, site, expert)

    def _of_stack(self, layer: int, site: str, expert: int) -> ExpertMatrices:
        stack = self._sites_of_stacks(layer)[site]
        a, b = stack.both()
        count = self._experts[layer].count
        rank = a.shape[0] // count
        if self._held is None or self._held[0] != (layer, site):
            self._held = None  # before another one is read
            by_expert = b.whole().reshape(b.shape[0], rank, count).transpose(2, 0, 1)
            self._held = (layer, site), np.ascontiguousarray(by_expert)
        rows, columns = a.read(expert * rank, (expert + 1) * rank), self._held[1][expert]
        one, other = (columns.T, rows.T) if self._are_turned() else (rows, columns)
        if self._in_turns and site == "gate_up":
            other = np.concatenate((other[0::2], other[1::2]))
        end = {"gate_up": "gate_up_proj", "down": "down_proj"}[site]
        path = f"{stack.path.partition('.experts')[0]}.experts.{end}"
        return ExpertMatrices(path, one, other)

    def _sites_of_stacks(self, layer: int) -> dict[str, _Module]:
        """PEFT wraps down_proj around gate_up_proj; one alone is what target_parameters names."""
        found = self._by_site.get(layer)
        if found is None:
            stacks = self._stacks[layer]
            if len(stacks) == 2:
                found = {"gate_up": stacks[1], "down": stacks[0]}
            else:
                found = {"down" if self._names(layer, "down_proj") else "gate_up": stacks[0]}
            self._by_site[layer] = found
        return found

    def _names(self, layer: int, parameter: str) -> bool:
        """Whether target_parameters has this one: by the end of its path, or by the path in any decoder."""
        whole = f".{self._experts[layer].module_path}.{parameter}"
        inside = whole[whole.index(".layers.") :]
        names = (f".{name}" for name in self._parameters)
        return any(inside.endswith(name) or name.endswith(inside) for name in names)

    def _are_turned(self) -> bool:
        """Whether the first matrix that is not square lies turned, as all do then."""
        if self._turned is None:
            self._turned = False
            for layer in self._stacks:
                shape = self._experts[layer]
                for site, stack in self._sites_of_stacks(layer).items():
                    outputs = shape.hidden_size if site == "down" else 2 * shape.inner_size
                    inputs = shape.inner_size if site == "down" else shape.hidden_size
                    if inputs != outputs:
                        self._turned = stack.both()[0].shape[1] == outputs
                        return self._turned
        return self._turned
