"""The cache of verdicts."""

from __future__ import annotations

from loraplex.serving.grammar.verdicts import ENTRY_BYTES, GrammarVerdict, VerdictCache, verdict_key


def test_oldest_verdict_goes_first_and_a_used_one_is_new() -> None:
    cache = VerdictCache(3 * ENTRY_BYTES)
    for key in (b"1", b"2", b"3"):
        cache.put("a", key, GrammarVerdict())
    assert cache.get("a", b"1") is not None
    cache.put("a", b"4", GrammarVerdict())
    assert [key for key in (b"1", b"2", b"3", b"4") if cache.get("a", key)] == [b"1", b"3", b"4"]
    assert cache.num_bytes == 3 * ENTRY_BYTES


def test_tenant_with_the_most_gives_its_own_away() -> None:
    cache = VerdictCache(10 * ENTRY_BYTES)
    cache.put("small", b"1", GrammarVerdict("no"))
    for number in range(1000):
        cache.put("flood", b"%d" % number, GrammarVerdict())
    assert cache.get("small", b"1") == GrammarVerdict("no")
    assert cache.num_bytes <= 10 * ENTRY_BYTES
    assert cache.get("flood", b"999") is not None


def test_texts_count() -> None:
    cache = VerdictCache(4 * ENTRY_BYTES)
    cache.put("a", b"1", GrammarVerdict(lark="x" * 2 * ENTRY_BYTES))
    cache.put("a", b"2", GrammarVerdict())
    assert cache.num_bytes == 4 * ENTRY_BYTES
    cache.put("a", b"2", GrammarVerdict())
    assert cache.num_bytes == 4 * ENTRY_BYTES
    cache.put("a", b"3", GrammarVerdict(lark="x" * 9 * ENTRY_BYTES))  # larger than all of it
    assert cache.num_bytes == 0


def test_key_tells_syntaxes_apart() -> None:
    assert verdict_key("a", gbnf=True) != verdict_key("a", gbnf=False) != verdict_key("b", gbnf=False)
