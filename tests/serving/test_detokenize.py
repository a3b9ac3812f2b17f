"""Text from tokens, piece by piece, against the same text in one piece."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders
from tokenizers.models import BPE

from loraplex.serving.errors import TokenizerUnsupported
from loraplex.serving.text.detokenize import StopChecker, TextStream, TokenTable, build_token_table
from loraplex.serving.text.processor import TextProcessor
from support.models.byte_tokenizer import EOS_ID, PAD_ID, START_ID, byte_encode, write_byte_tokenizer

BYTES = TokenTable(tuple(bytes([i]) for i in range(256)))
# Few letters, so that stop strings and their beginnings are met often; and characters of 2, 3 and 4 bytes,
# a combining mark, a joined emoji.
TEXT = st.text(st.sampled_from("aab\n é̈界🙂\u200d🏽"), max_size=40)
STOPS = st.lists(st.text(st.sampled_from("ab\né界🙂"), min_size=1, max_size=5), max_size=4)


def split(data: st.DataObject, tokens: Sequence[int]) -> list[list[int]]:
    """The tokens cut into events at drawn places."""
    cuts = data.draw(st.lists(st.integers(0, len(tokens)), max_size=6).map(sorted))
    edges = [0, *cuts, len(tokens)]
    return [list(tokens[start:end]) for start, end in itertools.pairwise(edges)]


def run(stream: TextStream, pieces: Sequence[Sequence[int]]) -> tuple[str, str | None, list[str]]:
    deltas = [stream.push(piece) for piece in pieces]
    deltas.append(stream.finish())
    texts = [delta.text for delta in deltas]
    return "".join(texts), deltas[-1].finished_by_stop, texts


def first_stop(text: str, stops: Sequence[str], shortest_end: int = 0) -> tuple[str, str | None]:
    """The plain definition: the first place where a stop string ends, and of those the longest."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if end >= shortest_end and text[:end].endswith(stop)]
        if found:
            longest = max(found, key=len)
            return text[: end - len(longest)], longest
    return text, None


@given(TEXT, STOPS, st.data())
def test_deltas_add_up_to_the_text_before_the_first_stop(
    text: str, stops: list[str], data: st.DataObject
) -> None:
    whole, stop, texts = run(TextStream(BYTES, stops), split(data, byte_encode(text)))
    assert (whole, stop) == first_stop(text, stops)
    assert not any("\ufffd" in piece for piece in texts)


@given(st.binary(max_size=40), st.data())
def test_invalid_bytes_read_as_replacement_characters(raw: bytes, data: st.DataObject) -> None:
    whole, _, _ = run(TextStream(BYTES), split(data, list(raw)))
    assert whole == raw.decode("utf-8", "replace")


@given(TEXT, STOPS)
def test_held_back_is_only_what_may_become_a_stop(text: str, stops: list[str]) -> None:
    checker = StopChecker(stops)
    shown = ""
    for end, char in enumerate(text, 1):
        delta, found = checker.push(char)
        shown += delta
        if found is not None:
            return
        held = max(
            (n for stop in stops for n in range(len(stop)) if text[:end].endswith(stop[:n])),
            default=0,
        )
        assert shown == text[: end - held]
    assert shown + checker.finish() == text


@given(
    st.text("ab", max_size=30),
    st.lists(st.text("ab", min_size=1, max_size=4), max_size=3),
    st.integers(0, 12),
)
def test_stops_before_min_tokens_do_not_count(text: str, stops: list[str], min_tokens: int) -> None:
    stream = TextStream(BYTES, stops, min_tokens=min_tokens)
    whole, stop, _ = run(stream, [[token] for token in byte_encode(text)])
    assert (whole, stop) == first_stop(text, stops, min_tokens)
    if stop is not None:
        assert stream.num_tokens >= min_tokens
        assert stream.num_tokens == len(whole) + len(stop)


def test_a_stop_string_over_many_tokens_never_leaks() -> None:
    stream = TextStream(BYTES, ["###END###"])
    shown = [stream.push([token]).text for token in byte_encode("ok ###EN ###END### more")]
    assert "".join(shown) == "ok ###EN "
    assert stream.finished_by_stop == "###END###"
    assert stream.finish().text == ""
    assert stream.push(byte_encode("late")).text == ""


def test_tokens_are_counted_up_to_the_one_that_stopped() -> None:
    stream = TextStream(BYTES, ["b"])
    assert stream.push(byte_encode("aabaa")).text == "aa"
    assert stream.num_tokens == 3


def test_a_stop_token_counts_but_is_no_text() -> None:
    stream = TextStream(BYTES)
    assert stream.push(byte_encode("hi!"), stop_token_id=ord("!")).text == "hi"
    assert stream.num_tokens == 3
    same_token_earlier = TextStream(BYTES)
    assert same_token_earlier.push(byte_encode("!hi!"), stop_token_id=ord("!")).text == "!hi"


def test_a_character_that_is_never_completed_is_flushed() -> None:
    stream = TextStream(BYTES)
    assert stream.push(list("🙂".encode())[:3]).text == ""
    assert stream.finish().text == "\ufffd"


def test_endless_invalid_bytes_are_not_held_back() -> None:
    stream = TextStream(BYTES)
    assert len(stream.push([0x80] * 100).text) == 100


def test_cost_is_linear_even_for_a_stop_that_nearly_matches_everywhere() -> None:
    stream = TextStream(BYTES, ["a" * 1000 + "b", "a" * 999 + "c"])
    started = time.process_time()
    for _ in range(100_000):
        stream.push([ord("a")])
    assert time.process_time() - started < 5  # quadratic would be minutes


def sentencepiece() -> tuple[Tokenizer, TokenTable]:
    """A tokenizer decoded as Llama 2's and Mistral's are."""
    pieces = ["<s>", "▁Hello", "▁world", "!", "▁", "▁▁", "é", *(f"<0x{byte:02X}>" for byte in range(256))]
    tokenizer = Tokenizer(BPE({piece: i for i, piece in enumerate(pieces)}, [], byte_fallback=True))
    tokenizer.add_special_tokens([AddedToken("<s>", special=True)])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    decoder = json.loads(tokenizer.to_str())["decoder"]
    return tokenizer, build_token_table(tokenizer.get_vocab(with_added_tokens=True), [0], decoder)


@given(
    st.lists(st.sampled_from(["<s>", "▁Hello", "▁world", "!", "▁", "▁▁", "é", "🙂"]), max_size=12), st.data()
)
def test_sentencepiece_reads_as_the_library_reads_it(pieces: list[str], data: st.DataObject) -> None:
    tokenizer, table = sentencepiece()
    ids: list[int] = []
    for piece in pieces:
        raw = [f"<0x{byte:02X}>" for byte in piece.encode()] if piece == "🙂" else [piece]
        ids += [tokenizer.token_to_id(token) for token in raw]
    whole, _, _ = run(TextStream(table), split(data, ids))
    assert whole == tokenizer.decode(ids, skip_special_tokens=True)


def test_a_completion_keeps_the_space_that_an_answer_loses() -> None:
    tokenizer, table = sentencepiece()
    ids = [tokenizer.token_to_id("▁Hello"), tokenizer.token_to_id("▁world")]
    assert TextStream(table).push(ids).text == "Hello world"
    assert TextStream(table, continues=True).push(ids).text == " Hello world"


def test_an_unknown_decoder_is_refused() -> None:
    with pytest.raises(TokenizerUnsupported, match="WordPiece"):
        build_token_table({"a": 0}, [], {"type": "WordPiece", "prefix": "##", "cleanup": True})
    with pytest.raises(TokenizerUnsupported, match="null"):
        build_token_table({"a": 0}, [], None)


def test_the_byte_tokenizer_reads_as_the_library_reads_it(tmp_path: Path) -> None:
    processor = TextProcessor(write_byte_tokenizer(tmp_path), max_model_len=1000)
    library = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert processor.decode([ord("a"), EOS_ID, PAD_ID, 5000, -1, ord("b")]) == "ab"

    @given(st.lists(st.integers(0, 300), max_size=40))
    def random_tokens(ids: list[int]) -> None:
        assert processor.decode(ids) == library.decode(ids, skip_special_tokens=True)

    random_tokens()


@pytest.mark.slow
def test_the_real_tokenizer_reads_as_the_library_reads_it(real_model_dir: Path) -> None:
    processor = TextProcessor(real_model_dir, max_model_len=8192)
    library = Tokenizer.from_file(str(real_model_dir / "tokenizer.json"))

    @given(st.lists(st.integers(0, processor.vocab_size - 1), max_size=60), st.data())
    def random_tokens(ids: list[int], data: st.DataObject) -> None:
        whole, _, _ = run(processor.stream(), split(data, ids))
        assert whole == library.decode(ids, skip_special_tokens=True)

    @given(st.text(max_size=60), st.data())
    def random_text(text: str, data: st.DataObject) -> None:
        ids = processor.encode(text)
        whole, _, texts = run(processor.stream(), split(data, ids))
        # Not always the text itself: this vocabulary lacks some bytes.
        assert whole == library.decode(ids, skip_special_tokens=True)
        assert "\ufffd" in whole or not any("\ufffd" in piece for piece in texts)

    random_tokens()
    random_text()


def test_special_tokens_are_shown_where_they_are_named(tmp_path: Path) -> None:
    text = TextProcessor(write_byte_tokenizer(tmp_path), max_model_len=64)
    ids = [*b"a", START_ID, *b"b", PAD_ID, *"é".encode()[:1], START_ID]
    stream = text.stream(shown={"<|start|>", "<think>", "[ARGS]"}, by_token=True)
    deltas = [stream.push([token_id]) for token_id in ids]
    assert [delta.text for delta in deltas] == ["a", "<|start|>", "b", "", "", "\ufffd<|start|>"]
    assert sum((delta.tokens for delta in deltas), ()) == (0, 1, 10, 11, 11, 11)
    assert text.stream().push(ids).text == "ab\ufffd"[:2]
