"""The fingerprint of answers: in every dialect and stream, equal for equal servers, another for what changes bits."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import Any

import pytest

from loraplex.adapters.ref import AdapterRef
from loraplex.api.fingerprint import HEADER, fingerprint
from loraplex.serving.output.formats import NO_FORMATS, TOOL_FORMATS, OutputFormats
from loraplex.serving.text.text_build import text_build
from support.engine.fake_engine import fake_engine_info
from support.http.data_plane import BASE, DataPlane
from support.models.byte_tokenizer import write_byte_tokenizer

HI = [{"role": "user", "content": "hi"}]
ROUTES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": HI},
    "/v1/completions": {"prompt": "hi"},
    "/v1/responses": {"input": "hi", "store": False},
    "/v1/messages": {"messages": HI, "max_tokens": 9},
    "/v1/embeddings": {"input": "hi"},
}
INFO = fake_engine_info(base_fingerprint="b" * 64, numerics="0123")
PIRATE = AdapterRef("acme", "pirate", 2, "sha256:aa", 8)


def ask(plane: DataPlane, path: str, model: str = BASE, **fields: Any) -> Any:
    headers = {"authorization": "Bearer lpx_acme", "anthropic-version": "2023-06-01"}
    answer = plane.http.post(
        plane.url + path, json={"model": model, **ROUTES[path], **fields}, headers=headers
    )
    assert answer.status_code == 200, answer.text
    return answer


def chunks(answer: Any) -> list[dict[str, Any]]:
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: {")]
    return [json.loads(line) for line in lines]


@pytest.mark.parametrize("path", ROUTES)
def test_every_generation_route_has_the_header(plane: DataPlane, path: str) -> None:
    own = ask(plane, path).headers[HEADER]
    assert re.fullmatch("fp_[0-9a-f]{16}", own)
    assert ask(plane, path, "pirate").headers[HEADER] != own
    if path != "/v1/embeddings":
        assert ask(plane, path, temperature=0.5).headers[HEADER] == own
        assert ask(plane, path, stream=True).headers[HEADER] == own


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_openais_bodies_and_all_chunks_have_it(plane: DataPlane, path: str) -> None:
    for model in (BASE, "pirate"):
        whole = ask(plane, path, model)
        assert whole.json()["system_fingerprint"] == whole.headers[HEADER]
        streamed = ask(plane, path, model, stream=True, stream_options={"include_usage": True})
        found = chunks(streamed)
        assert len(found) > 2
        assert {chunk["system_fingerprint"] for chunk in found} == {whole.headers[HEADER]}


def test_equal_servers_agree_and_whatever_changes_bits_changes_it() -> None:
    def of(
        adapter: AdapterRef | None = PIRATE, text: str = "t", formats: OutputFormats = NO_FORMATS, **info: Any
    ) -> str:
        return fingerprint(replace(INFO, **info), text, adapter, formats)

    first = of()
    # Names and versions are labels; sizes of a server change no bit.
    assert (
        of(AdapterRef("other", "name", 7, PIRATE.digest, 8)) == of(max_num_seqs=1, num_kv_blocks=9) == first
    )
    others = [
        of(None),
        of(replace(PIRATE, digest="sha256:ab")),
        of(text="u"),
        of(dtype="bfloat16"),
        of(numerics="4567"),
        of(base_fingerprint="c" * 64),
        of(eos_ids=(1,)),
        of(formats=OutputFormats(tools=next(iter(TOOL_FORMATS.values())))),
    ]
    assert len({first, *others}) == len(others) + 1


def test_the_text_build_follows_the_tokenizer_and_the_template(tmp_path: Any) -> None:
    one, two = (write_byte_tokenizer(tmp_path / name) for name in ("one", "two"))
    assert text_build(one) == text_build(two)
    template = two / "chat_template.jinja"
    template.write_text("{{ messages }}")
    changed = text_build(two)
    tokenizer = two / "tokenizer.json"
    tokenizer.write_text(tokenizer.read_text() + " ")
    assert len({text_build(one), changed, text_build(two)}) == 3
