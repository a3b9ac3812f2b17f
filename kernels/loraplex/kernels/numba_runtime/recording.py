"""Calls of kernels that are recorded once and repeated: what a CUDA graph is on a GPU.

While a `Recording` is entered, code that calls kernels runs as ever, but nothing is computed: the calls are kept, and
new tensors lie in memory that a repetition uses again. `CallList.run` makes all the calls in one call of compiled code.
An argument that differs from step to step is a `StepValue`.
"""
# mypy: allow-untyped-calls

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode  # no public way to see which operations code calls

from loraplex.kernels.numba_runtime.thread_team import Call, record_calls, run_calls


class NotRecordable(Exception):
    """The code did what a list of calls cannot repeat."""


class StepValue(int):
    """An argument of a recorded call that each step gives a value, by its name."""

    name: object

    def __new__(cls, name: object) -> StepValue:
        made = super().__new__(cls, 0)
        made.name = name
        return made


class LayerMemory:
    """Memory of the tensors of recorded layers. Two sets of buffers take turns, from layer to layer, so a layer's
    tensors must not be used beyond the next one. Lists of calls share it: for one at a time."""

    def __init__(self) -> None:
        self._buffers: dict[tuple[int, int], torch.Tensor] = {}

    def buffer(self, layer: int, number: int, num_bytes: int) -> torch.Tensor:
        """A buffer of `num_bytes` bytes or more for tensor `number` of a layer."""
        key = (layer % 2, number)
        found = self._buffers.get(key)
        if found is None or found.numel() < num_bytes:
            # Powers of two: a smaller one, which some list may still use, is left behind for few numbers of rows.
            size = 1 << max(num_bytes - 1, 63).bit_length()
            found = self._buffers[key] = torch.empty(size, dtype=torch.uint8)
        return found


class Recording(TorchDispatchMode):
    """Entered once. `enter_layer` is to be called with the number of each layer. Raises NotRecordable from torch's
    operations except `torch.empty` and views: they would not be repeated."""

    def __init__(self, memory: LayerMemory) -> None:
        super().__init__()
        self._memory = memory
        self._layer = self._number = 0
        self._calls: list[Call] = []
        self._used: list[torch.Tensor] = []
        self._entered = ExitStack()

    def enter_layer(self, layer: int) -> None:
        if layer != self._layer:
            self._layer, self._number = layer, 0

    def __enter__(self) -> Recording:
        self._calls = self._entered.enter_context(record_calls())
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._entered.close()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = dict(kwargs or {})
        if func is torch.ops.aten.empty.memory_format:
            return self._empty(args[0], given.get("dtype") or torch.get_default_dtype())
        if not func.is_view:
            raise NotRecordable(f"{func} is not a kernel's call")
        out = func(*args, **given)
        if out.untyped_storage().data_ptr() != args[0].untyped_storage().data_ptr():
            raise NotRecordable(f"{func} copied")
        return out

    def _empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        num_bytes = math.prod(shape) * dtype.itemsize
        buffer = self._memory.buffer(self._layer, self._number, num_bytes)
        self._number += 1
        self._used.append(buffer)
        return buffer[:num_bytes].view(dtype).view(*shape)

    def call_list(self, *used: object) -> CallList:
        """The recorded calls, once recording has ended. `used`: other owners of memory that the arguments point to."""
        return CallList(self._calls, (self._used, used))


class CallList:
    """Recorded calls in memory, as `thread_team.run_calls` takes them. Keeps alive what they use."""

    def __init__(self, calls: Sequence[Call], used: object) -> None:
        self._used = used
        longest = max((layout.size for layout, _ in calls), default=8)
        stride = -(-longest // 64) * 64  # whole cache lines
        self._memory = np.zeros((len(calls), stride // 8), np.int64)
        self._address, self._stride = self._memory.ctypes.data, stride
        self._numbers = self._memory.reshape(-1)
        places: list[int] = []
        names: dict[object, int] = {}
        which: list[int] = []
        for index, (layout, numbers) in enumerate(calls):
            layout.pack_into(self._memory.data, index * stride, *numbers)
            for word, number in enumerate(numbers):
                if isinstance(number, StepValue):
                    places.append(index * (stride // 8) + word)
                    which.append(names.setdefault(number.name, len(names)))
        self._names = tuple(names)
        self._places, self._which = np.array(places, np.int64), np.array(which, np.int64)

    def run(self, values: Mapping[Any, int]) -> None:
        """Make the calls, each when the one before is done. `values`: of all the step values, by name."""
        if self._names:
            given = np.array([values[name] for name in self._names], np.int64)
            self._numbers[self._places] = given[self._which]
        run_calls(self._address, len(self._memory), self._stride)
