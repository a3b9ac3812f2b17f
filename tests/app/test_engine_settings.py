"""The engine's configuration has every field from the server's settings."""

from __future__ import annotations

import inspect
import re
from dataclasses import fields
from pathlib import Path

import pytest
from pydantic import ValidationError

from loraplex.app import engine_settings
from loraplex.app.engines.process import number_in
from loraplex.app.settings import Settings
from loraplex.engine.config import EngineConfig
from support.models.byte_tokenizer import write_byte_tokenizer

CHOSEN_BY_THE_ENGINE = {"lookahead", "recorded_prompt_rows", "adapter_load_timeout"}
"""Fields that no setting has; programs and tests give them."""


def test_every_field_of_the_engine_is_filled() -> None:
    """By a setting of the same name, or by a line of its own: one that is forgotten would keep its default."""
    named = set(re.findall(r'"(\w+)": ', inspect.getsource(engine_settings.engine_config)))
    shared = {field.name for field in fields(EngineConfig)} & Settings.model_fields.keys()
    assert named | shared | CHOSEN_BY_THE_ENGINE == {field.name for field in fields(EngineConfig)}


def test_shared_names_are_copied_and_others_are_translated(tmp_path: Path) -> None:
    settings = Settings(
        model="x",
        data_dir=tmp_path,
        max_waiting=7,
        kernels="torch",
        threads=3,
        batch_invariant=True,
    )
    config = engine_settings.engine_config(settings, tmp_path / "model", "served")
    assert (config.max_waiting, config.kernels, config.batch_invariant) == (7, "torch", True)
    assert (config.num_threads, config.lookahead, config.model_name) == (3, -1, "served")
    assert config.model_path == str(tmp_path / "model")
    assert config.turn_ends == ()


def test_a_disk_for_prefixes_has_a_size_and_perhaps_a_key(tmp_path: Path) -> None:
    def disk(text: str) -> tuple[str | None, int, str | None]:
        settings = Settings(model="x", data_dir=tmp_path, kv_disk=text)
        config = engine_settings.engine_config(settings, tmp_path / "model", "served")
        return config.kv_disk_dir, config.kv_disk_bytes, config.kv_disk_key_file

    assert disk("") == (None, 0, None)
    assert disk("/var/kv") == ("/var/kv", 16 << 30, None)
    assert disk("/var/kv, key-file=/run/key, bytes=1GiB") == ("/var/kv", 1 << 30, "/run/key")
    for wrong in (",bytes=1", "bytes=1GiB", "/var/kv,bytes=0", "/var/kv,size=3", "/var/kv,key-file="):
        with pytest.raises(ValidationError, match=r"begin with a directory|is not bytes=SIZE"):
            disk(wrong)


def test_the_number_in_a_replicas_name_is_its_folders() -> None:
    named = {"gpu3": 3, "engine-1": 1, "host.7": 7, "machine": 0, "x-70": 6, "ray1-k3p9x71": 0, "ray1-a1": 0}
    assert {name: number_in(name) for name in named} == named


def test_an_engine_is_told_what_the_chat_template_writes_behind_an_answer(tmp_path: Path) -> None:
    model = write_byte_tokenizer(tmp_path / "model")
    config = engine_settings.engine_config(Settings(model="x", data_dir=tmp_path), model, "served")
    assert config.turn_ends == ("<|end|>",)
