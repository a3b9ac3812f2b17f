"""What the admission of an adapter reads in parts, read at once."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from loraplex.adapters.admission.base_model import BaseSpec, _weight_of, locate_module_weights
from loraplex.adapters.admission.faults import Faults
from loraplex.adapters.admission.peft_config import LoraSettings, read_settings
from loraplex.adapters.numerics import NumbersCheck, NumbersVerdict, SiteOutputs
from loraplex.adapters.store.tensors import read_native


def read_base_weight(base: BaseSpec, layer: int, site: str) -> NDArray[Any]:
    """The base's own weight of a site: [out_features, in_features] in the checkpoint's dtype (ml_dtypes for bfloat16).
    Raises BaseModelInvalid where the checkpoint has no such site, or in a dtype that is none of plain floats."""
    found = _weight_of(base, locate_module_weights(base), layer, site)
    return read_native(found.path, found.tensor)


def parse_peft_config(path: Path, module_paths: Iterable[str]) -> LoraSettings:
    """The settings of an adapter_config.json. Raises AdapterRefused, which names all that is wrong."""
    faults = Faults()
    found = read_settings(path, module_paths, faults)
    faults.raise_any()
    assert found is not None
    return found


def check_numbers(
    config_path: Path, tensors_path: Path, base: BaseSpec, outputs: SiteOutputs
) -> NumbersVerdict:
    """The whole of a `NumbersCheck`. Raises what it raises."""
    verdict = NumbersCheck(config_path, tensors_path, base, outputs).run()
    assert verdict is not None, "the time is not limited"
    return verdict
