"""A config is read once by transformers, and its plan then from the disk: the same to the bit, or read again."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from loraplex.engine.model import plans as plans_module
from loraplex.engine.model.base import ModelUnsupported
from loraplex.engine.model.plans import KEPT_S, KeptPlans
from support.models.checkpoints import (
    FAMILIES,
    PagedRun,
    edit_config,
    save_tiny,
    save_tiny_gemma3_with_vision,
)
from support.models.loading import load_model
from support.servers.live_server import importable_tests, write_tiny_model

pytestmark = pytest.mark.usefixtures("one_torch_thread")


@pytest.fixture
def no_transformers(monkeypatch):
    """From when it is called, nothing may be read by transformers."""

    def forbid() -> None:
        def refuse(*_args, **_options):
            raise AssertionError("transformers was asked")

        import transformers

        monkeypatch.setattr(transformers.AutoConfig, "from_pretrained", refuse)
        monkeypatch.setattr(transformers.AutoConfig, "for_model", refuse)

    return forbid


def logits(path: Path, plans: KeptPlans | None, **options) -> torch.Tensor:
    run = PagedRun(load_model(path, "cpu", "float32", plans=plans, **options), [list(range(3, 40))])
    run.step({0: 37})
    return run.result(0)


@pytest.mark.parametrize("family", [*FAMILIES, "gemma3 with vision"])
def test_every_family_computes_the_same_from_a_kept_plan(family, tmp_path, no_transformers):
    if family in FAMILIES:
        path = save_tiny(tmp_path / "model", FAMILIES[family])
    else:
        path = save_tiny_gemma3_with_vision(tmp_path / "model", FAMILIES["gemma3"])
    plans = KeptPlans(tmp_path / "plans")
    expected, first = logits(path, None), logits(path, plans)
    no_transformers()
    assert torch.equal(first, expected)
    assert torch.equal(logits(path, plans), expected)


def test_a_plan_is_for_one_config_and_one_length(tmp_path, no_transformers):
    path = save_tiny(tmp_path / "model", FAMILIES["llama-dynamic-rope"])
    plans = KeptPlans(tmp_path / "plans")
    usual = logits(path, plans)
    longer = logits(path, plans, max_model_len=2000)  # another length, other frequencies
    assert not torch.equal(longer, usual)
    edit_config(path, rms_norm_eps=0.5)
    changed = logits(path, plans)
    assert not torch.equal(changed, usual)
    no_transformers()
    assert torch.equal(logits(path, plans), changed)
    assert torch.equal(logits(path, plans), logits(path, plans))
    with pytest.raises(ModelUnsupported, match="transformers was asked"):
        logits(path, plans, max_model_len=100)


@pytest.mark.parametrize("updated", ["transformers", "torch"])
def test_a_plan_is_for_one_version_of_what_computed_it(updated, tmp_path, monkeypatch, no_transformers):
    path = save_tiny(tmp_path / "model", FAMILIES["llama"])
    plans = KeptPlans(tmp_path / "plans")
    load_model(path, "cpu", plans=plans)
    no_transformers()
    load_model(path, "cpu", plans=plans)
    versions = {name: plans_module.version(name) for name in ("transformers", "torch")} | {updated: "99.0"}
    monkeypatch.setattr(plans_module, "version", versions.__getitem__)
    with pytest.raises(ModelUnsupported, match="transformers was asked"):
        load_model(path, "cpu", plans=plans)


def test_a_plan_is_for_one_table_of_families(tmp_path, monkeypatch, no_transformers):
    """The parts of a multimodal type, which admission reads too, are not among this package's sources."""
    path = save_tiny(tmp_path / "model", FAMILIES["llama"])
    plans = KeptPlans(tmp_path / "plans")
    load_model(path, "cpu", "float32", plans=plans)
    table = tmp_path / "model_parts.py"
    table.write_text(Path(plans_module.model_parts.__file__).read_text() + "# a row more\n")
    monkeypatch.setattr(plans_module.model_parts, "__file__", str(table))
    no_transformers()
    with pytest.raises(ModelUnsupported, match="transformers was asked"):
        load_model(path, "cpu", "float32", plans=plans)


def test_remarks_are_repeated_at_each_start(tmp_path, caplog):
    path = save_tiny(tmp_path / "model", FAMILIES["phi3-longrope"])
    edit_config(path, made_with="love")
    plans = KeptPlans(tmp_path / "plans")
    for _ in range(2):
        caplog.clear()
        load_model(path, "cpu", plans=plans)
        assert "made_with" in caplog.text
        assert "up to 128 positions" in caplog.text


def test_a_refusal_is_not_forgotten(tmp_path):
    path = save_tiny(tmp_path / "model", FAMILIES["llama"])
    plans = KeptPlans(tmp_path / "plans")
    load_model(path, "cpu", plans=plans)
    edit_config(path, hidden_act="relu")
    for _ in range(2):
        with pytest.raises(ModelUnsupported, match="relu"):
            load_model(path, "cpu", plans=plans)


@pytest.mark.parametrize("damage", [b"", b"{", b"[]", b'{"spec": {}}', b"\xff\xfe"])
def test_a_damaged_plan_counts_as_absent(damage, tmp_path):
    path = save_tiny(tmp_path / "model", FAMILIES["qwen3"])
    plans = KeptPlans(tmp_path / "plans")
    expected = logits(path, plans)
    (kept,) = (tmp_path / "plans").iterdir()
    whole = kept.read_bytes()
    kept.write_bytes(damage)
    assert torch.equal(logits(path, plans), expected)
    assert kept.read_bytes() == whole


def _other_number(kept: Path, _other: Path) -> None:
    kept.write_bytes(kept.read_bytes().replace(b'"trained_positions":512', b'"trained_positions":511'))


def _longer(kept: Path, _other: Path) -> None:
    with kept.open("ab") as file:
        file.truncate(1 << 40)  # takes no room, but would in memory


def _of_another_config(kept: Path, other: Path) -> None:
    other.replace(kept)


def _link(kept: Path, _other: Path) -> None:
    kept.replace(kept.with_name("elsewhere"))
    kept.symlink_to("elsewhere")


def _pipe(kept: Path, _other: Path) -> None:
    kept.unlink()
    os.mkfifo(kept)


def _endless(kept: Path, _other: Path) -> None:
    kept.unlink()
    kept.symlink_to("/dev/zero")


def _writable(kept: Path, _other: Path) -> None:
    kept.chmod(0o666)


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    "harm", [_other_number, _longer, _of_another_config, _link, _pipe, _endless, _writable]
)
def test_a_file_that_is_not_what_this_user_kept_counts_as_absent(harm, tmp_path):
    path, plans = save_tiny(tmp_path / "model", FAMILIES["qwen3"]), KeptPlans(tmp_path / "plans")
    load_model(path, "cpu", plans=plans)
    (kept,) = (tmp_path / "plans").iterdir()
    content = (path / "config.json").read_bytes()
    plan = plans.find(content, 0)
    assert plan is not None
    plans.save_plan(b"another config", 0, plan)
    (other,) = set((tmp_path / "plans").iterdir()) - {kept}
    harm(kept, other)
    assert plans.find(content, 0) is None
    plans.save_plan(content, 0, plan)
    assert not kept.is_symlink()
    assert plans.find(content, 0) == plan


def test_a_link_where_a_plan_is_to_be_written_is_not_followed(tmp_path):
    path, plans = save_tiny(tmp_path / "model", FAMILIES["llama"]), KeptPlans(tmp_path / "plans")
    load_model(path, "cpu", plans=plans)
    (kept,) = (tmp_path / "plans").iterdir()
    precious = tmp_path / "precious"
    precious.write_text("mine")
    kept.unlink()
    for name in (kept, kept.with_suffix(f".{os.getpid()}.tmp")):
        name.symlink_to(precious)
    load_model(path, "cpu", plans=plans)
    assert precious.read_text() == "mine"
    assert kept.is_file()
    assert not kept.is_symlink()


def test_a_directory_that_cannot_be_written_costs_nothing_but_time(tmp_path):
    path = save_tiny(tmp_path / "model", FAMILIES["llama"])
    (tmp_path / "file").write_text("")
    plans = KeptPlans(tmp_path / "file" / "plans")
    assert torch.equal(logits(path, plans), logits(path, None))


def test_plans_that_no_start_has_used_for_long_are_removed(tmp_path):
    plans = KeptPlans(tmp_path / "plans")
    path = save_tiny(tmp_path / "model", FAMILIES["llama"])

    def serve(positions: int) -> set[Path]:
        edit_config(path, max_position_embeddings=positions)
        load_model(path, "cpu", plans=plans)
        return set((tmp_path / "plans").iterdir())

    used = serve(100)
    assert len(serve(200)) == 2
    long_ago = time.time() - KEPT_S - 60
    for kept in (tmp_path / "plans").iterdir():
        os.utime(kept, (long_ago, long_ago))
    serve(100)
    left = serve(300)
    assert len(left) == 2
    assert used < left


ENGINE = """
import json, sys
from pathlib import Path
from support.servers.live_server import TINY, make_adapter
from support.engine.local_engine import LocalEngine
model, work, plans = map(Path, sys.argv[1:])
engine = LocalEngine(
    model, work, plan_dir=str(plans), kernels="torch", num_threads=1, max_model_len=64,
    kv_cache_memory=1 << 22, adapter_memory=16 << 20, adapter_cpu_memory=16 << 20,
)
make_adapter(work / "a", TINY)
engine.add("base", range(8), max_tokens=3)
engine.add("adapted", range(8), engine.publish(work / "a"), max_tokens=3)
engine.run()
print(json.dumps([engine.tokens("base"), engine.tokens("adapted"), sorted(sys.modules)]))
"""


@pytest.mark.slow
def test_a_known_family_is_served_without_transformers_and_what_it_imports(tmp_path):
    model = write_tiny_model(tmp_path / "model")
    load_model(model, "cpu", max_model_len=64, plans=KeptPlans(tmp_path / "plans"))
    done = subprocess.run(
        [sys.executable, "-c", ENGINE, model, tmp_path, tmp_path / "plans"],
        stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": importable_tests()},
        check=True,
    )
    base, adapted, modules = json.loads(done.stdout)
    assert len(base) == len(adapted) == 3
    heavy = {"transformers", "huggingface_hub", "torch._dynamo", "sympy", "torch.distributed.tensor"}
    assert heavy & set(modules) == set()
