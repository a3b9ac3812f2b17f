"""Which token each piece of text belongs to: of outputs as they stream, and of prompts that are echoed."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loraplex.serving.text.detokenize import TextStream, TokenTable
from loraplex.serving.text.processor import TextProcessor
from support.models.byte_tokenizer import EOS_ID, START_ID, THINK_ID, write_byte_tokenizer

TEXT = st.text(st.sampled_from("aab é界🙂"), max_size=30)
STOPS = st.lists(st.text(st.sampled_from("ab é界🙂"), min_size=1, max_size=4), max_size=3)
CUTS = st.lists(st.integers(1, 6), max_size=60)


def cut(data: bytes, sizes: list[int]) -> list[bytes]:
    """Tokens of several bytes, whose ends fall inside characters, too."""
    tokens = []
    for size in itertools.chain(sizes, itertools.repeat(2)):
        if not data:
            return tokens
        tokens.append(data[:size])
        data = data[size:]
    raise AssertionError


@given(TEXT, STOPS, CUTS, st.integers(1, 5))
def test_a_token_goes_out_with_its_end(text: str, stops: list[str], sizes: list[int], per_event: int) -> None:
    tokens = cut(text.encode(), sizes)
    stream = TextStream(TokenTable(tuple(tokens)), stops, by_token=True)
    plain = TextStream(TokenTable(tuple(tokens)), stops)
    ends = list(itertools.accumulate(map(len, tokens)))
    shown, told = "", 0
    ids = list(range(len(tokens)))
    for first in range(0, len(ids), per_event):
        delta = stream.push(ids[first : first + per_event])
        assert delta.text == plain.push(ids[first : first + per_event]).text
        shown += delta.text
        for start in delta.tokens:
            begins = ends[told] - len(tokens[told])
            assert start == len(text.encode()[:begins].decode("utf-8", "ignore"))
            told += 1
        covered = len(shown.encode())
        if delta.finished_by_stop is None:
            assert told == sum(end <= covered for end in ends[: first + per_event])
    last = stream.finish()
    assert last.text == plain.finish().text
    shown += last.text
    told += len(last.tokens)
    if last.finished_by_stop is None:
        assert (shown, told) == (text, len(tokens))
    else:
        # Those that began before the stop string, and none behind it.
        covered = len(shown.encode())
        assert told == sum(end - len(token) < covered for token, end in zip(tokens, ends, strict=True))


def test_a_stop_token_is_told_of_no_more_than_shown() -> None:
    stream = TextStream(TokenTable((b"ab", b"c", b"")), by_token=True)
    assert stream.push([0, 2, 1]).tokens == (0, 2, 2)
    assert stream.push([1, 0], stop_token_id=0).tokens == (3,)
    assert stream.finish().tokens == ()
    assert TextStream(TokenTable((b"ab",))).push([0]).tokens == ()


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> TextProcessor:
    return TextProcessor(write_byte_tokenizer(tmp_path_factory.mktemp("model")), max_model_len=4096)


def test_tokens_by_themselves(text: TextProcessor) -> None:
    told = [(token.text, token.data) for token in map(text.token, (65, 0xE2, EOS_ID, THINK_ID, 9999))]
    assert told == [
        ("A", b"A"), ("\\xe2", b"\xe2"), ("<|end|>", None), ("<think>", b"<think>"), ("token_id:9999", None),
    ]  # fmt: skip


@given(st.text(st.sampled_from("a\n é界🙂\ud800<|>endthik/"), max_size=30))
def test_a_text_is_spelled_as_it_was_written(text: TextProcessor, written: str) -> None:
    ids = text.encode(written)
    spelling = text.spell(ids, written)
    assert spelling.text == written.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    assert spelling == text.spell(ids)
    assert len(spelling.spans) == len(ids)
    starts = [start for start, _ in spelling.spans]
    assert starts == sorted(starts)


def test_tokens_added_by_the_tokenizer_have_no_text(text: TextProcessor) -> None:
    ids = [START_ID, *b"a", EOS_ID, 0xE2, 0x9A, EOS_ID, 9999, *b"b"]
    assert text.spell(ids).text == "<|start|>a<|end|>\ufffd<|end|>b"
    spelling = text.spell(ids, "a<|end|>b")
    assert spelling.text == "a<|end|>\ufffdb"
    assert spelling.spans == ((0, 0), (0, 1), (1, 8), (8, 9), (8, 9), (8, 9), (9, 9), (9, 10))


@pytest.mark.slow
def test_the_real_tokenizer_spells_what_was_written(real_model_dir: Path) -> None:
    text = TextProcessor(real_model_dir, max_model_len=8192)
    for written in ("Ahoy, wörld ⚓!\n\n  x = 1 🙂🏽 界", "<|im_start|>user\nhi<|im_end|>\n", " a  b"):
        ids = text.encode(written)
        spelling = text.spell(ids, written)
        assert spelling.text == written
        for token_id, (start, end) in zip(ids, spelling.spans, strict=True):
            token = text.token(token_id)
            assert token.text == written[start:end] or token.data is None or "\\x" in token.text
