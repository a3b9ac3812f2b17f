"""What doctor says of the tokens that end a turn."""

from __future__ import annotations

import json
from pathlib import Path

from loraplex.app.doctor.checks import check_ends, check_generation
from support.models.byte_tokenizer import EOS_ID, START_ID, write_byte_tokenizer


def test_tokens_their_sources_and_a_disagreement(tmp_path: Path) -> None:
    base = write_byte_tokenizer(tmp_path)
    (base / "tokenizer_config.json").write_text("{}")
    (base / "config.json").write_text(json.dumps({"eos_token_id": EOS_ID}))
    found = check_ends(base)
    assert (found.status, found.found) == ("ok", "'<|end|>' (256: config.json, the chat template)")
    (base / "config.json").write_text(json.dumps({"eos_token_id": START_ID}))
    found = check_ends(base)
    assert found.status == "warn"
    assert found.found == "'<|end|>' (256: the chat template); '<|start|>' (257: config.json)"
    assert "config.json says '<|start|>' (257); the chat template says '<|end|>' (256)" in found.remedy


def test_a_base_that_names_no_end(tmp_path: Path) -> None:
    base = write_byte_tokenizer(tmp_path, chat_template=None)
    (base / "tokenizer_config.json").write_text("{}")
    (base / "config.json").write_text("{}")
    assert check_ends(base).status == "warn"


def test_settings_of_a_generation_config_that_no_answer_follows(tmp_path: Path) -> None:
    base = write_byte_tokenizer(tmp_path)
    assert check_generation(base).status == "ok"
    path = base / "generation_config.json"
    path.write_text(json.dumps({"temperature": 0.6, "eos_token_id": EOS_ID}))
    found = check_generation(base)
    assert (found.status, found.found) == (
        "ok",
        "generation_config.json has temperature 0.6: requests say these themselves",
    )
    path.write_text(json.dumps({"suppress_tokens": [START_ID]}))
    found = check_generation(base)
    assert found.status == "warn"
    assert found.found == "generation_config.json has suppress_tokens [257]: nothing here follows it"
