"""The adapter among the files of a place: of an archive, a folder, a bucket's prefix, a repository."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Self

from loraplex.adapters.contents.kinds import GGUF, INDEX, NPZ, PICKLE, Kind
from loraplex.adapters.errors import AdapterRefused
from loraplex.adapters.store.files import CONFIG_NAME, TENSORS_NAME, TENSORS_NAMES, shown

Folder = tuple[str, ...]
_MAX_SHOWN = 6
_BY_SUFFIX = {
    ".bin": PICKLE,
    ".pt": PICKLE,
    ".pth": PICKLE,
    ".pkl": PICKLE,
    ".pickle": PICKLE,
    ".ckpt": PICKLE,
    ".npz": NPZ,
    ".gguf": GGUF,
}
_NO_WEIGHTS = ("training_args.", "optimizer.", "scheduler.", "rng_state", "scaler.", "trainer_state")
"""How the names of a trainer's other files begin."""


def weights_kind(name: str) -> Kind | None:
    """The kind of a file of weights that is not safetensors, by its name; None for any other file."""
    if name.endswith(".safetensors.index.json"):
        return INDEX
    if name.startswith(_NO_WEIGHTS):
        return None
    return _BY_SUFFIX.get(PurePosixPath(name).suffix.lower())


@dataclass(frozen=True, slots=True)
class Contents:
    """`adapters` are the folders that hold both files of one, each with the name of its tensors. `foreign` is a file of
    weights in another format, and what it is."""

    adapters: tuple[tuple[Folder, str], ...]
    foreign: tuple[str, Kind] | None

    @classmethod
    def of(cls, files: Iterable[Folder]) -> Self:
        """`files` are paths within the place, in parts. PEFT's name goes before mlx-lm's."""
        folders: dict[Folder, set[str]] = {}
        foreign: tuple[str, Kind] | None = None
        for path in files:
            if path[-1] == CONFIG_NAME or path[-1] in TENSORS_NAMES:
                folders.setdefault(path[:-1], set()).add(path[-1])
            elif (kind := weights_kind(path[-1])) is not None and not _is_better(foreign, path[-1]):
                foreign = path[-1], kind
        return cls(
            tuple(
                (folder, next(name for name in TENSORS_NAMES if name in names))
                for folder, names in sorted(folders.items())
                if CONFIG_NAME in names and len(names) > 1
            ),
            foreign,
        )

    def chosen(self) -> tuple[Folder, str] | None:
        """The one adapter's folder and the name of its tensors; None where there is none, or more than one."""
        return self.adapters[0] if len(self.adapters) == 1 else None

    def check_format(self) -> None:
        """Raises AdapterRefused (not_safetensors) where the weights are there in another format."""
        if not self.adapters and self.foreign is not None:
            raise foreign_weights(*self.foreign)


def foreign_weights(name: str, kind: Kind) -> AdapterRefused:
    return AdapterRefused(
        "not_safetensors", f"there is {shown(name)} and no {TENSORS_NAME}. {shown(name)} is {kind}"
    )


def folders_shown(folders: Sequence[Folder]) -> str:
    """A list of folders for a message."""
    names = ["its top" if not folder else shown("/".join(folder)) for folder in folders[:_MAX_SHOWN]]
    more = f" and {len(folders) - _MAX_SHOWN} more" if len(folders) > _MAX_SHOWN else ""
    return ", ".join(names) + more


def _is_better(found: tuple[str, Kind] | None, name: str) -> bool:
    """Whether a file that was found is to be named rather than this one."""
    return found is not None and (found[0].startswith("adapter") or not name.startswith("adapter"))
