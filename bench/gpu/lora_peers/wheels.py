"""LoRA kernels of vLLM and of SGLang, out of wheels that the caller brings. Nothing of theirs is in this repository.

`unpack` writes the folder with the kernels of a wheel to the disk, since Triton reads their sources. `imported` imports
its modules by file, with stand-ins for the parts of the two packages that these modules import.
"""

from __future__ import annotations

import importlib
import json
import logging
import sys
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from email.parser import HeaderParser
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import triton
import triton.language as tl

KERNELS = {"vllm": "vllm/lora/ops/triton_ops", "sglang": "sglang/kernels/ops/lora/dense"}
"""The folder with the kernels, by package."""
READ = {"vllm": "vLLM 0.32.0", "sglang": "SGLang 0.5.23"}
"""The versions that the stand-ins were written for."""
_MODULES = {
    "vllm": ("lora_shrink_op", "lora_expand_op", "lora_kernel_metadata"),
    "sglang": ("chunked_sgmv_shrink", "chunked_sgmv_expand"),
}
_LARGEST = 4 << 20
"""The most bytes of a file in the folder."""
_DESCRIPTION = "wheel.json"


class WheelError(Exception):
    """A file is no wheel of vLLM or SGLang, or one of a version whose kernels need what there is no stand-in for."""


@dataclass(frozen=True)
class Wheel:
    """An unpacked wheel: "vllm" or "sglang", its version, and the folder that its modules are imported from."""

    package: str
    version: str
    folder: Path

    @property
    def title(self) -> str:
        return f"{self.package} {self.version}"


def unpack(path: Path, into: Path) -> Wheel:
    """Unpack the kernels of a wheel into a folder of its own below `into`. Raises WheelError."""
    try:
        with zipfile.ZipFile(path) as archive:
            names = archive.namelist()
            package = next(
                (name for name, folder in KERNELS.items() if f"{folder}/__init__.py" in names), None
            )
            if package is None:
                raise WheelError(
                    f"{path} has none of {' and '.join(f'{folder}/' for folder in KERNELS.values())}: bring a wheel of "
                    f"vLLM or SGLang that has its LoRA kernels there, as {' and '.join(READ.values())} have"
                )
            wheel = Wheel(package, _version(archive, names), into / package)
            if wheel.folder.exists():
                raise WheelError(f"{path} is another wheel of {package}: one of each can be run at a time")
            for info in archive.infolist():
                if info.filename.startswith(f"{KERNELS[package]}/") and info.file_size <= _LARGEST:
                    archive.extract(info, wheel.folder)
    except (OSError, zipfile.BadZipFile) as error:
        raise WheelError(f"{path} cannot be read as a wheel: {error}") from error
    (wheel.folder / _DESCRIPTION).write_text(json.dumps({"version": wheel.version}), "utf-8")
    return wheel


def unpacked(folder: Path) -> list[Wheel]:
    """The wheels that `unpack` unpacked into `folder`, possibly in another process."""
    found = [
        (package, folder / package) for package in KERNELS if (folder / package / _DESCRIPTION).is_file()
    ]
    return [
        Wheel(package, json.loads((place / _DESCRIPTION).read_text("utf-8"))["version"], place)
        for package, place in found
    ]


@contextmanager
def imported(wheel: Wheel) -> Iterator[SimpleNamespace]:
    """The wheel's modules with kernels, by name, with stand-ins in place of the package that they belong to. At the end
    `sys.modules` is what it was. Raises WheelError where a module needs what there is no stand-in for."""
    standing = _stand_ins(wheel)
    before = {
        name: sys.modules.pop(name) for name in [*sys.modules] if name.partition(".")[0] == wheel.package
    }
    sys.modules.update(standing)
    prefix = KERNELS[wheel.package].replace("/", ".")
    found, name = SimpleNamespace(), ""
    try:
        try:
            for name in _MODULES[wheel.package]:
                setattr(found, name, importlib.import_module(f"{prefix}.{name}"))
        except (ImportError, AttributeError) as error:
            raise missing(wheel, f"{KERNELS[wheel.package]}/{name}.py", error) from error
        yield found
    finally:
        for name in [name for name in sys.modules if name.partition(".")[0] == wheel.package]:
            del sys.modules[name]
        sys.modules.update(before)


def missing(wheel: Wheel, place: str, error: Exception) -> WheelError:
    """An error about a part of a wheel that is gone, or that needs what there is no stand-in for."""
    return WheelError(
        f"{wheel.title}: {place} is not as in {READ[wheel.package]}, which can be run here: {error}"
    )


def _version(archive: zipfile.ZipFile, names: list[str]) -> str:
    metadata = [name for name in names if name.endswith(".dist-info/METADATA") and name.count("/") == 1]
    if not metadata:
        return "of no known version"
    return str(HeaderParser().parsestr(archive.read(metadata[0]).decode("utf-8"))["Version"])


def _stand_ins(wheel: Wheel) -> dict[str, ModuleType]:
    """Modules by name: packages without content on the way to the kernels, and what these import."""
    found: dict[str, ModuleType] = {}
    folder = KERNELS[wheel.package]
    for name, content in _CONTENTS[wheel.package]().items():
        parts = name.split(".")
        for end in range(1, len(parts) + 1):
            parent = ".".join(parts[:end])
            module = found.setdefault(parent, ModuleType(parent))
            module.__path__ = []
        vars(found[name]).update(content)
    parts = folder.split("/")
    for end in range(1, len(parts) + 1):
        name = ".".join(parts[:end])
        module = found.setdefault(name, ModuleType(name))
        module.__path__ = [str(wheel.folder / folder)] if end == len(parts) else []
    return found


def _of_vllm() -> dict[str, Mapping[str, Any]]:
    """Stand-ins for vLLM, whose settings have their defaults."""
    settings = SimpleNamespace(
        VLLM_BATCH_INVARIANT=False,
        VLLM_TUNED_CONFIG_FOLDER=None,
        VLLM_LORA_ENABLE_DUAL_STREAM=False,
        VLLM_LORA_DISABLE_PDL=False,
    )
    platform = SimpleNamespace(
        is_cuda=torch.cuda.is_available,
        has_device_capability=lambda tens: torch.cuda.get_device_capability() >= divmod(tens, 10),
    )

    def refuse(**_: object) -> None:
        # Then the functions themselves are what the modules offer.
        raise AttributeError("nothing is registered with torch")

    return {
        "vllm": {"envs": settings},
        "vllm.triton_utils": {"tl": tl, "triton": triton},
        "vllm.logger": {"init_logger": _Quiet},
        "vllm.platforms": {"current_platform": platform},
        "vllm.utils.math_utils": {"next_power_of_2": triton.next_power_of_2},
        "vllm.utils.torch_utils": {
            "async_tensor_h2d": lambda data, dtype, device: torch.tensor(data, dtype=dtype, device=device),
            "direct_register_custom_op": refuse,
        },
    }


def _of_sglang() -> dict[str, Mapping[str, Any]]:
    off = SimpleNamespace(get=lambda: False)
    settings = SimpleNamespace(
        SGLANG_ENABLE_LORA_CSGMV_SPLIT_K=off, SGLANG_ENABLE_DETERMINISTIC_INFERENCE=off
    )

    def device_name() -> str:
        return torch.cuda.get_device_name() if torch.cuda.is_available() else "NVIDIA H200"

    return {
        "sglang.srt.environ": {"envs": settings},
        "sglang.srt.lora.utils": {"LoRABatchInfo": SimpleNamespace},
        "sglang.srt.utils": {
            "cached_triton_kernel": lambda _key: lambda kernel: kernel,
            "get_device_name": device_name,
        },
    }


class _Quiet(logging.LoggerAdapter[logging.Logger]):
    """A logger with two more methods, which say nothing."""

    def __init__(self, name: str) -> None:
        super().__init__(logging.getLogger(name))

    def info_once(self, *_: object) -> None: ...

    def warning_once(self, *_: object) -> None: ...


_CONTENTS: Mapping[str, Callable[[], dict[str, Mapping[str, Any]]]] = {"vllm": _of_vllm, "sglang": _of_sglang}
