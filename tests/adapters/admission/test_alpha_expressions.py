"""Keys of alpha_pattern that are regular expressions: what PEFT makes of them, by both readings of an upload, or a
refusal; and in bounded time."""

from __future__ import annotations

import json
import re
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from loraplex.adapters.admission.base_model import load_base_spec
from loraplex.adapters.admission.config.expressions import MAX_EXPRESSIONS, ExpressionRefused, match_paths
from loraplex.adapters.admission.config.patterns import parse_ranks, suffixes
from loraplex.adapters.admission.peft_config import LoraSettings
from loraplex.adapters.errors import AdapterRefused
from loraplex.adapters.numerics.upload import Upload
from loraplex.adapters.spec import BaseSpec
from support.adapters.admission import ARCH, admit
from support.adapters.drafts import ALL_SITES, draft_adapter, peft_config, site_module, write_base
from support.adapters.whole_reads import parse_peft_config

MODULES = [site_module(layer, site) for layer in range(12) for site in ALL_SITES]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> BaseSpec:
    return load_base_spec(write_base(tmp_path_factory.mktemp("base"), ARCH))


def parse(directory: Path, **fields: Any) -> LoraSettings:
    path = directory / "adapter_config.json"
    path.write_text(json.dumps(peft_config(**fields)))
    return parse_peft_config(path, MODULES)


EVALUATED = [
    r"layers\.0\..*",
    ".*q_proj",
    "(q|k)_proj",
    "",
    ".q_proj",
    "q.proj",
    "self.attn.q_proj",
    "^model.layers.0.self.attn.q_proj",
    "a..b",
    "q[_]proj",
    "layers.?.mlp.up_proj",
    r"mlp\.0.up_proj",
    r"^model\.layers\.([0-9]|1[01])\.mlp\.(?:up|down)_proj$",
    r".*\.\d{1}\..*(?P<which>[qk])_proj",
    r"\bself_attn\b.*",
    "(p|r)roj",
    r"[^.]+_proj",
    r"layers\.1{1,2}\..*?proj",
]


@pytest.mark.parametrize("key", EVALUATED)
def test_an_expression_means_to_both_readings_what_it_means_to_peft(
    tmp_path: Path, base: BaseSpec, key: str
) -> None:
    from peft.utils.other import get_pattern_key

    pattern = {"1.mlp.up_proj": 2, key: 5, "mlp.up_proj": 3}
    found = parse(tmp_path, alpha_pattern=pattern)
    for module in MODULES:
        alpha = pattern.get(get_pattern_key(pattern, module), 8)
        assert found.rank_and_scaling(module) == (4, alpha / 4), module
    files = draft_adapter(ARCH, targets=ALL_SITES, alpha_pattern=pattern).write(tmp_path / "adapter")
    spec, upload = admit(files, base), Upload(files.config, files.tensors, base)
    for site in spec.sites:
        path = base.sites[site.layer, site.site].module_path
        alpha = json.loads(files.config.read_text())["alpha_pattern"].get(
            get_pattern_key(sorted(pattern), path), 8
        )
        assert site.scaling == upload.read(site.layer, site.site).scaling == alpha / 4, path


REFUSED = {
    "look-ahead": r"(?!q)._proj",
    "look-behind": r".*(?<=q)_proj",
    "a reference": r"(q)\1_proj",
    "a named reference": r"(?P<a>q)(?P=a)_proj",
    "flags": "(?i:Q_PROJ)",
    "flags for all": "(?i)Q_PROJ",
    "an atomic group": "(?>q)_proj",
    "possessive repetition": "q*+_proj",
    "repeated repetition": "q**_proj",
    "nothing to repeat": "*q_proj",
    "a repeated anchor": "^*q_proj",
    "a count that re and RE2 read in two ways": "q{,3}_proj",
    "a brace": "q{x_proj",
    "a count beyond RE2's": "q{1001}",
    "counts in the wrong order": "q{3,2}",
    "the end, which RE2 spells otherwise": r"q_proj\Z",
    "the start": r"\Amodel.*",
    "an octal": r"\161_proj",
    "a hexadecimal": r"\x71_proj",
    "a class by name": "[[:alpha:]]_proj",
    "an open class": "[q_proj",
    "a class in the wrong order": "[z-a]",
    "set operations": "[a--b]_proj",
    "a name of two groups": "(?P<a>q(?P<a>_))proj",
    "a comment": "(?#x)q_proj",
    "a condition": "(q)?(?(1)_|x)proj",
    "an open group": "(q_proj",
    "a group that closes nothing": "a)|(b",
    "a line break": "q_proj\n",
    "beyond ASCII": "\u00e9_proj",
    "a null": "q\x00_proj",
    "very long": "q" * 999 + "(x|y)" * 9,
    "a large program": "((a?){100}){100}",
}


@pytest.mark.parametrize("case", REFUSED)
def test_any_other_expression_is_refused_for_alphas_and_left_to_the_tensors_for_ranks(
    tmp_path: Path, case: str
) -> None:
    key = REFUSED[case]
    with pytest.raises(AdapterRefused) as caught:
        parse(tmp_path, alpha_pattern={key: 2})
    assert (caught.value.code, caught.value.feature) == ("unsupported_feature", "alpha_pattern")
    assert "regular expression" in caught.value.message
    assert caught.value.message.isascii()
    found = parse(tmp_path, rank_pattern={key: 2, "up_proj": 5})
    assert found.rank_and_scaling(MODULES[0], 2) == (2, 4.0)
    assert found.rank_and_scaling(MODULES[0], 7) == (4, 2.0)


def test_the_names_that_a_refusal_proposes_mean_the_same_as_the_expression(tmp_path: Path) -> None:
    from peft.utils.other import get_pattern_key

    key = r"(?!k).*\.(?!k)._proj"
    with pytest.raises(AdapterRefused, match="A key that is a module's name is served"):
        parse(tmp_path, alpha_pattern={key: 2})
    meant = {module: 2 for module in MODULES if get_pattern_key([key], module) == key}
    assert 0 < len(meant) < len(MODULES)
    found = parse(tmp_path, alpha_pattern=meant)
    for module in MODULES:
        assert found.rank_and_scaling(module)[1] == (0.5 if module in meant else 2.0)


_atoms = st.sampled_from(
    ["q", "proj", "_", "-", ".", r"\.", r"\d", r"\D", r"\w", r"\W", r"\s", r"\S", "[qk]", "[^.]", "[a-z_]", "[0-9.-]"]
)  # fmt: skip
_marks = st.sampled_from(["^", "$", r"\b", r"\B", "|", ""])
_repeats = st.sampled_from(["", "", "", "*", "+", "?", "*?", "+?", "??", "{2}", "{0,2}", "{1,}", "{1,3}?"])


_few = st.sampled_from(["", "", "?", "??", "{2}", "{0,2}"])
"""Of groups: `re` takes exponential time for more."""


def _joined(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    group = st.builds("{}{}){}".format, st.sampled_from(["(", "(?:"]), inner, _few)
    return st.lists(group | st.builds("{}{}".format, _atoms, _repeats) | _marks, max_size=5).map("".join)


_expressions = st.recursive(_joined(st.just("")), _joined, max_leaves=6)
_texts = st.lists(
    st.sampled_from(["model", "0", "11", "q_proj", "k_proj", "q", "qq", "-", "_"]), min_size=1, max_size=2
).map(".".join)  # fmt: skip


@settings(suppress_health_check=list(HealthCheck))
@given(expression=_expressions, texts=st.lists(_texts, min_size=1, max_size=8))
def test_what_is_evaluated_means_what_it_means_to_re(expression: str, texts: list[str]) -> None:
    try:
        (found,) = match_paths([expression], texts)
    except ExpressionRefused:
        return
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        theirs = re.compile(rf"(.*\.)?({expression})$")
    assert found == [text for text in texts if theirs.match(text)]


@settings(suppress_health_check=list(HealthCheck))
@given(
    expression=st.text(st.sampled_from("aq.*+?{}()[]|^$\\-:,<>=!Pid10_ZAbB&~"), max_size=9),
    texts=st.lists(_texts, max_size=4),
)
def test_any_text_is_refused_or_means_what_it_means_to_re(expression: str, texts: list[str]) -> None:
    try:
        (found,) = match_paths([expression], texts)
    except ExpressionRefused:
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of sets within sets, which mean characters today
        theirs = re.compile(rf"(.*\.)?({expression})$")
    assert found == [text for text in texts if theirs.match(text)]


HOSTILE = [
    "(.*a)*(.*b)*(.*c)*x",
    "(a|a)*" * 60 + "x",
    "(.?.?){200}",
    "([a-z.]?[a-z_.]?){250}[a-z]{60}",
    "(.*){99}",
    "(" * 300 + "q" + ")*" * 300,
]


def test_hostile_expressions_take_little_time_however_many(tmp_path: Path) -> None:
    paths = [site_module(layer, site) for layer in range(126) for site in ALL_SITES]
    begin = time.perf_counter()
    for expression in HOSTILE:
        for many in (1, MAX_EXPRESSIONS, MAX_EXPRESSIONS + 1):
            try:
                match_paths([expression + "x" * (number % 7) for number in range(many)], paths)
            except ExpressionRefused:
                continue
    assert time.perf_counter() - begin < 20  # each config alone: under a second


def test_an_expression_for_ordinary_modules_is_evaluated_on_the_largest_bases() -> None:
    paths = [site_module(layer, site) for layer in range(126) for site in ALL_SITES]
    found = match_paths([rf"layers\.({layer}|{layer + 1})\..*[qkvo]_proj" for layer in range(40)], paths)
    assert [len(modules) for modules in found] == [8] * 40


def test_paths_of_an_upload_are_not_remembered() -> None:
    suffixes.cache_clear()
    paths = [f"model.layers.0.mlp.experts.{n}.q_proj" for n in range(50)]
    found = parse_ranks({"q.proj": 3, "experts.7.q_proj": 2}, lambda rank, where: int(rank), paths)
    assert found.loose == {3}
    assert suffixes.cache_info().currsize == 0
