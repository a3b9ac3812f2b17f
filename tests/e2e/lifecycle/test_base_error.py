"""A QLoRA adapter on a server of 16 bits: the report of its version gets figures."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from support.models.real_answers import ROOT
from support.servers.live_server import LiveServer, checked

pytestmark = pytest.mark.soak


def test_a_version_gets_its_figures(real_model_dir: Path, tmp_path: Path) -> None:
    folder = tmp_path / "qlora"
    shutil.copytree(ROOT / "examples" / "adapters" / "json", folder)
    config = folder / "adapter_config.json"
    named = {"base_model_name_or_path": "unsloth/SmolLM2-135M-Instruct-bnb-4bit"}
    config.write_text(json.dumps(json.loads(config.read_text()) | named))
    with LiveServer(real_model_dir, tmp_path / "data", kv_cache_memory="256MiB") as server:
        server.create_tenant("acme")
        server.upload("acme", "support", folder)
        server.wait(lambda: bool(server.logged("base_error_measured")), timeout=250)
        report = checked(server.admin.get("tenants/acme/adapters/support/versions/v1"))["report"]
    error = report["base_error"]
    assert (error["trained_on"], error["served"]) == ("bitsandbytes nf4", "full precision")
    assert error["reason"] is None
    assert error["tokens"] == 256
    # As docs/lab/README.md has them.
    assert error["kl"] == pytest.approx(0.5574, rel=0.01)
    assert error["top1"] == pytest.approx(0.734, abs=0.01)
    (check,) = [check for check in report["checks"] if check["name"] == "base_form"]
    assert not check["ok"]
    assert "which changes its answers by 0.56 nat a token" in check["detail"]
