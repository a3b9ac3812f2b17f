"""examples/push_adapters.py: the forms in which other servers are told of adapters."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

import pytest

from support.markdown import ROOT

SCRIPT = ROOT / "examples" / "push_adapters.py"


def load() -> ModuleType:
    spec = spec_from_file_location("push_adapters", SCRIPT)
    assert spec
    assert spec.loader
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


script = load()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("sql", "Chat Bot"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.usefixtures("folder")
def test_the_forms_of_vllm_and_tgi_and_directories() -> None:
    module = '{"name": "org/chat", "path": "Chat Bot", "base_model_name": "x"}'
    assert script.adapters_of(["SQL=sql", module]) == {"sql": Path("sql"), "org-chat": Path("Chat Bot")}
    assert script.adapters_of(["sql/", "Chat Bot"]) == {"sql": Path("sql"), "chat-bot": Path("Chat Bot")}
    assert script.adapters_of(["a=sql,b=Chat Bot,"]) == {"a": Path("sql"), "b": Path("Chat Bot")}


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["org/name"], "not a directory"),
        (["a=sql", "A=Chat Bot"], "two adapters"),
        (['{"name": "a"}'], "JSON object"),
        (["{"], "JSON object"),
        (["--=sql"], "letter or a digit"),
    ],
)
def test_what_cannot_be_pushed_is_said_before_anything_is(words: list[str], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        script.adapters_of(words)


def test_a_refusal_does_not_stop_the_others(folder: Path) -> None:
    """With a stand-in for the command line, which the pages' sessions run for real."""
    stand_in = folder / "bin" / "loraplex"
    stand_in.parent.mkdir()
    stand_in.write_text(
        f"#!{sys.executable}\nimport sys, json\n"
        "if sys.argv[3] == 'bad':\n    sys.exit('loraplex: refused')\n"
        "assert sys.argv[1:] == ['adapter', 'push', 'good', 'sql', '--tenant', 'acme', '--json']\n"
        "print(json.dumps({'version': 'v1', 'rank': 8, 'bytes': 1500000}))\n"
    )
    stand_in.chmod(stand_in.stat().st_mode | stat.S_IXUSR)
    good = json.dumps({"name": "good", "path": "sql"})
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--tenant", "acme", "bad=sql", good],
        env={"PATH": os.pathsep.join([str(stand_in.parent), os.environ["PATH"]])},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.splitlines() == ["bad: loraplex: refused", "good: v1, rank 8, 1.50 MB"]
    assert done.returncode == 1
