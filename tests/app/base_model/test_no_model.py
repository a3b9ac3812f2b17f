"""A folder that is given as the base model and is none."""

from __future__ import annotations

import shutil
from pathlib import Path

import huggingface_hub
import pytest

from loraplex.app.base_model.source import ModelUnavailable, ensure_model
from support.servers.live_server import EXAMPLE_ADAPTERS
from support.servers.run_here import run_here


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    return Path(shutil.copytree(EXAMPLE_ADAPTERS / "pirate", tmp_path / "pirate"))


@pytest.mark.parametrize(
    "form", ["peft", "beside a config.json", "mlx", "pickle", "a file of it", "on a hub"]
)
def test_an_adapter_says_that_it_is_one(form: str, adapter: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = str(adapter)
    tensors = adapter / "adapter_model.safetensors"
    match form:
        case "beside a config.json":  # a trainer's checkpoint
            (adapter / "config.json").write_text('{"model_type": "llama"}')
        case "mlx":
            tensors.rename(adapter / "adapters.safetensors")
        case "pickle":
            tensors.rename(adapter / "adapter_model.bin")
        case "a file of it":
            spec = str(tensors)
        case "on a hub":
            spec = "hf:someone/pirate"
            monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda repo, **_: str(adapter))
    with pytest.raises(ModelUnavailable) as caught:
        ensure_model(spec)
    message = caught.value.message
    assert message.startswith(
        f"'{spec}' is an adapter and no model: it has adapter_config.json, which names its base '"
    )
    assert message.endswith(f"then push it: loraplex adapter push NAME {adapter}")


def test_a_model_with_an_adapter_beside_it_is_a_model(adapter: Path) -> None:
    (adapter / "config.json").write_text("{}")
    (adapter / "model.safetensors").write_bytes(b"")
    assert ensure_model(str(adapter)) == adapter


def test_a_folder_with_neither(tmp_path: Path) -> None:
    with pytest.raises(ModelUnavailable, match=r"it has no config\.json"):
        ensure_model(str(tmp_path))


@pytest.mark.parametrize("command", ["plan", "doctor", "serve"])
def test_each_command_says_so(command: str, adapter: Path, tmp_path: Path) -> None:
    data = (
        ()
        if command == "plan"
        else ("--data-dir", str(tmp_path / "data"), "--port", "0", "--admin-port", "0")
    )
    done = run_here(command, "--model", str(adapter), *(("--gpu", "cpu") if command == "plan" else data))
    assert done.code == 1
    assert "is an adapter and no model" in done.stdout + done.stderr
