"""What an upload brings for its chats, looked at beside the requests of others."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from loraplex.adapters.admission.chat_files import ChatFiles
from loraplex.adapters.errors import AdapterRefused
from loraplex.app.base_model.own_chats import ChatExaminer
from loraplex.control.types import Serving
from loraplex.serving.errors import ServingError, TemplateError
from loraplex.serving.templates.messages import Trial, Tried
from loraplex.serving.text.processor import TextProcessor
from support.models.byte_tokenizer import EOS_ID, START_ID, write_byte_tokenizer


async def test_the_tokens_of_an_upload_are_looked_up_beside_the_event_loop() -> None:
    """A tokenizer's config has room for hundreds of thousands of them."""
    looked_up: set[int] = set()

    def token_id(token: str) -> int | None:
        looked_up.add(threading.get_ident())
        return None

    def names(token_ids: Sequence[int]) -> list[str]:
        return [str(number) for number in token_ids]

    async def try_out(tenant: str, trial: Trial) -> Tried:
        return Tried(is_base=False)

    text: Any = SimpleNamespace(vocab_size=8, template_sources={}, token_id=token_id, names=names)
    renderer: Any = SimpleNamespace(try_out=try_out)
    examine = ChatExaminer(text, (), renderer, own_serves=True)
    files = ChatFiles({"default": "mine"}, {"eos_token": "<end>"}, (), ("<a>", "<b>"))
    found = await examine("acme", files, Serving(None, None))
    assert "lacks 2 tokens" in cast("str", found.checks[1]["detail"])
    assert looked_up
    assert threading.get_ident() not in looked_up


async def test_a_turn_ends_at_the_token_that_the_versions_template_writes(tmp_path: Path) -> None:
    text = TextProcessor(write_byte_tokenizer(tmp_path, special=["<|im_end|>"]), max_model_len=64)

    async def try_out(tenant: str, trial: Trial) -> Tried:
        return Tried(is_base=False, turn_ends=text.own_chat(trial.own).turn_ends)

    source = "{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}"
    for own_serves in (True, False):
        examine = ChatExaminer(
            text, {EOS_ID}, cast("Any", SimpleNamespace(try_out=try_out)), own_serves=own_serves
        )
        found = await examine("acme", ChatFiles({"default": source}, {}, (), ()), Serving(None, None))
        assert found.own is not None
        assert found.own.eos_ids == (text.token_id("<|im_end|>"),)
        assert "'<|im_end|>' (260) too" in found.checks[-1]["detail"]


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ("", "it gives the tokens of the one that serves"),
        ("'2026' is …", "warning: another tokenizer serves than the version's own: '2026' is …"),
        (TemplateError("it is no tokenizer: x."), "could not be compared: it is no tokenizer: x"),
        (TemplateError("a\0b\x1b[2Jc\nd\x9b\u202e."), "could not be compared: a?b?[2Jc?d??"),
    ],
)
async def test_the_report_tells_of_the_versions_tokenizer(
    answer: str | ServingError, words: str, tmp_path: Path
) -> None:
    async def compare_tokenizer(tenant: str, path: str) -> str:
        if isinstance(answer, ServingError):
            raise answer
        return answer

    own = tmp_path / "tokenizer.json"
    own.write_text("{}")
    text = TextProcessor(write_byte_tokenizer(tmp_path / "base"), max_model_len=64)
    renderer: Any = SimpleNamespace(compare_tokenizer=compare_tokenizer)
    examine = ChatExaminer(text, (), renderer, own_serves=False)
    (check,) = (await examine("acme", ChatFiles({}, {}, (), (), own), Serving(None, None))).checks
    assert check["name"] == "tokenizer"
    assert words in cast("str", check["detail"])
    assert check["ok"] is not cast("str", check["detail"]).startswith("warning: ")


async def test_equal_bytes_are_compared_by_their_digest(tmp_path: Path) -> None:
    text = TextProcessor(write_byte_tokenizer(tmp_path), max_model_len=64)
    examine = ChatExaminer(text, (), cast("Any", None), own_serves=False)
    files = ChatFiles({}, {}, (), (), tmp_path / "tokenizer.json")
    (check,) = (await examine("acme", files, Serving(None, None))).checks
    assert (check["name"], check["ok"]) == ("tokenizer", True)


async def test_settings_of_a_versions_generation_config_are_named(tmp_path: Path) -> None:
    text = TextProcessor(write_byte_tokenizer(tmp_path), max_model_len=64)
    examine = ChatExaminer(text, (EOS_ID,), cast("Any", None), own_serves=False)
    for generation, ok, detail in (
        ({"top_p": 0.9}, True, "generation_config.json has top_p 0.9: requests say these themselves"),
        (
            {"forced_bos_token_id": 1, "stop_strings": ["<|end|>"]},
            False,
            "warning: generation_config.json has forced_bos_token_id 1: nothing here follows it",
        ),
    ):
        files = ChatFiles({}, {}, (), (), generation=generation)
        (check,) = (await examine("acme", files, Serving(None, None))).checks
        assert (check["name"], check["ok"], check["detail"]) == ("generation config", ok, detail)
    found = await examine(
        "acme", ChatFiles({}, {}, (), (), generation={"stop_strings": "<|start|>"}), Serving(None, None)
    )
    assert found.own is not None
    assert found.own.eos_ids == (START_ID,)


@pytest.mark.parametrize("own_serves", [True, False])
@pytest.mark.parametrize("refuses", [True, False])
async def test_a_templates_words_are_printable_in_the_report(
    own_serves: bool, refuses: bool, tmp_path: Path
) -> None:
    """A database may refuse NUL, and a terminal does what the others say."""

    async def try_out(tenant: str, trial: Trial) -> Tried:
        if refuses:
            raise TemplateError("line 1: \0\x1b]0;x\n")
        return Tried(is_base=False, format_reason="" if not own_serves else "\0\x1b]0;x\n")

    text = TextProcessor(write_byte_tokenizer(tmp_path), max_model_len=64)
    renderer: Any = SimpleNamespace(try_out=try_out)
    examine = ChatExaminer(text, (), renderer, own_serves=own_serves)
    files = ChatFiles({"default": "mine"}, {}, (), ())
    if own_serves:
        with pytest.raises(AdapterRefused, match=r"\?\?\]0;x\?") as caught:
            await examine("acme", files, Serving(None, None))
        told = [caught.value.message]
    else:
        checks = (await examine("acme", files, Serving(None, None))).checks
        told = [cast("str", check["detail"]) for check in checks]
    assert told
    assert all(words.isprintable() for words in told)
