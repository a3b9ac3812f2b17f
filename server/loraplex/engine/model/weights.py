"""Weights read tensor by tensor from safetensors files: nothing is held twice, and nothing is executed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from loraplex.adapters.admission.base_model import (
    BaseTensor,
    locate_tensors,
    read_text_config,
    stored_scheme,
)
from loraplex.adapters.base_weights.gguf import is_indexed
from loraplex.adapters.base_weights.tensors import QuantisationUnsupported
from loraplex.adapters.errors import ArtifactCorrupt, BaseModelInvalid
from loraplex.engine.model.base import ModelUnsupported
from loraplex.kernels.linear.dense import pack_weight
from loraplex.kernels.linear.packed import PackedLinear
from loraplex.kernels.linear.stored import FloatWeight, GroupedWeight

_FLOATS = frozenset({"F64", "F32", "F16", "BF16"})


class TensorSource(Protocol):
    """The weights of a model by their names in its checkpoint, for example a `Checkpoint`."""

    def __contains__(self, name: str) -> bool: ...

    def read_into(self, name: str, out: torch.Tensor) -> None:
        """Fill `out`. Raises ModelUnsupported where no tensor has this name and shape."""
        ...


class Checkpoint:
    """The tensors of one checkpoint, one file or shards, opened once. Use `open_checkpoint`."""

    def __init__(self, model_dir: Path, stack: ExitStack) -> None:
        from safetensors import safe_open

        self._dir = model_dir
        located = locate_tensors(model_dir)
        self._stored = stored_scheme(read_text_config(model_dir), located)
        self._located = located
        self._files = {
            path: stack.enter_context(safe_open(path, framework="pt", device="cpu"))
            for path in {entry.path for entry in located.values()}
            if not is_indexed(model_dir)
        }
        self._taken: set[str] = set()

    def __contains__(self, name: str) -> bool:
        return name in self._located

    def read_into(self, name: str, out: torch.Tensor) -> None:
        """Copy a tensor into `out`, cast to its dtype; for codes, what they stand for. Raises as `read` does."""
        module = name.removesuffix(".weight")
        if self._stored is None or module not in self._stored.modules:
            out.copy_(self.read(name, tuple(out.shape)))
            return
        first = 0
        for rows in self._dense_rows(module, tuple(out.shape)):
            out[first : first + len(rows)].copy_(torch.from_numpy(rows))
            first += len(rows)

    def examine(self, name: str, shape: tuple[int, ...]) -> None:
        """Raises as reading a tensor or a module's codes would, without reading them."""
        module = name.removesuffix(".weight")
        if self._stored is None or module not in self._stored.modules:
            self._plain(name, shape)
            return
        self._taken.update(self._stored.names(module))
        try:
            self._check_shape(module, shape)
            self._stored.examine(module)
        except QuantisationUnsupported as error:
            raise ModelUnsupported(error.message) from error

    def _check_shape(self, module: str, shape: tuple[int, ...]) -> None:
        assert self._stored is not None
        if (found := self._stored.shape(module)) != shape:
            raise ModelUnsupported(f"{module}.weight has the shape {list(found)}, not {list(shape)}")

    def _dense_rows(self, module: str, shape: tuple[int, ...]) -> Iterator[NDArray[np.float32]]:
        assert self._stored is not None
        self._taken.update(self._stored.names(module))
        try:
            self._check_shape(module, shape)
            yield from self._stored.dense_rows(module)
        except QuantisationUnsupported as error:
            raise ModelUnsupported(error.message) from error

    def read(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """A tensor as it is stored, on the CPU; for 8-bit floats what they stand for, in float32. Raises
        ModelUnsupported if it is missing, of another shape, or no floating-point tensor."""
        module = name.removesuffix(".weight")
        if self.stores(module, "float8"):
            return torch.from_numpy(np.concatenate(list(self._dense_rows(module, shape))))
        return self._tensor(self._plain(name, shape))

    def _plain(self, name: str, shape: tuple[int, ...]) -> BaseTensor:
        entry = self._located.get(name)
        if entry is None:
            raise ModelUnsupported(f"the checkpoint in {self._dir} lacks {name}")
        if entry.tensor.shape != shape:
            raise ModelUnsupported(f"{name} has the shape {list(entry.tensor.shape)}, not {list(shape)}")
        if entry.tensor.dtype not in _FLOATS:
            raise ModelUnsupported(
                f"{name} is stored as {entry.tensor.dtype}; quantised weights are not supported"
            )
        self._taken.add(name)
        return entry

    def _tensor(self, entry: BaseTensor) -> torch.Tensor:
        if entry.path in self._files and not entry.is_part:
            stored: torch.Tensor = self._files[entry.path].get_tensor(entry.stored_name)
            return stored
        try:
            values = entry.read()
        except (ArtifactCorrupt, OSError) as error:
            raise ModelUnsupported(f"cannot read {entry.stored_name} in {entry.path}: {error}") from error
        if entry.tensor.dtype == "BF16":
            return torch.from_numpy(values.view(np.int16)).view(torch.bfloat16)
        return torch.from_numpy(values)

    def stores(self, module: str, codes: str) -> bool:
        """Whether a module's weight is stored as `codes` (`WeightForm.codes`)."""
        stored = self._stored
        return stored is not None and stored.scheme.form.codes == codes and module in stored.modules

    def stored(self, module: str) -> GroupedWeight | FloatWeight | None:
        """The weight of a module that is not stored as floats of 16 or 32 bits; None where it can only be read as such.
        Raises ModelUnsupported."""
        assert self._stored is not None
        self._taken.update(self._stored.names(module))
        try:
            return self._stored.read(module)
        except QuantisationUnsupported as error:
            raise ModelUnsupported(error.message) from error

    def refuse_leftover(self, model_type: str, unread: tuple[str, ...]) -> None:
        """Raises ModelUnsupported where tensors were not read, except those whose names begin with one of `unread`,
        and for what old tools saved too: frequencies, and biases of 0 beside codes."""
        found = sorted(
            name
            for name in self._located.keys() - self._taken
            if not name.endswith((".rotary_emb.inv_freq", ".attn.masked_bias"))
            and not name.startswith(unread)
            and not self._is_empty_bias(name)
        )
        if found:
            shown = ", ".join(found[:4]) + (", …" if len(found) > 4 else "")
            raise ModelUnsupported(
                f"the checkpoint in {self._dir} has {len(found)} tensors that {model_type} does not know: {shown}"
            )

    def _is_empty_bias(self, name: str) -> bool:
        module = name.removesuffix(".bias")
        if module == name or not (
            self.stores(module, "groups") and self._located[name].tensor.dtype in _FLOATS
        ):
            return False
        return not self._tensor(self._located[name]).any()


class ExaminedTensors:
    """A checkpoint's tensors, compared with the shapes of a model on the device "meta" and not read: a `TensorSource`,
    and the reader of linears that are stored as more than floats."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint

    def __contains__(self, name: str) -> bool:
        return name in self._checkpoint

    def read_into(self, name: str, out: torch.Tensor) -> None:
        self._checkpoint.examine(name, tuple(out.shape))

    def stores(self, module: str) -> bool:
        return self._checkpoint.stores(module, "groups")

    def read(self, modules: Mapping[str, tuple[int, int]]) -> PackedLinear | None:
        if not any(map(self.stores, modules)):
            return None
        for module, shape in modules.items():
            self._checkpoint.examine(f"{module}.weight", shape)
        rows, inputs = zip(*modules.values(), strict=True)
        return pack_weight(torch.empty(sum(rows), inputs[0], device="meta"))


@contextmanager
def open_checkpoint(model_dir: Path) -> Iterator[Checkpoint]:
    """Raises ModelUnsupported where the directory holds no readable safetensors checkpoint."""
    with ExitStack() as stack:
        try:
            checkpoint = Checkpoint(model_dir, stack)
        except BaseModelInvalid as error:
            raise ModelUnsupported(error.message) from error
        yield checkpoint
