"""Drawing in Triton against its own arithmetic in numpy, against float64, and against the sampler of torch."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from loraplex.engine.execution.inputs import PlainInputs
from loraplex.engine.sampling import sampler
from loraplex.engine.sampling.batch import RowMemory, build_sample_rows
from loraplex.engine.sampling.noise import uniform
from loraplex.engine.sampling.scoring import score_tokens
from loraplex.engine.types import SamplingParams
from loraplex.kernels.sampling import triton_sampling
from loraplex.kernels.sampling.triton_logsumexp import log_sum_exp
from loraplex.kernels.sampling.triton_sampling import SamplingTiling, TritonSampling
from loraplex.kernels.sampling.types import MAX_VOCAB, Biases, Option, Options, SampleRows, TokenMasks
from support.engine.sampling import EOS, cuts, reference_weights, row
from support.engine.sampling_options import sampling_params, token_lists

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
ONE_TILE = SamplingTiling(tile=64, candidates=16, block=32)
TILES = SamplingTiling(tile=256, candidates=64, block=128)

pytestmark = [
    pytest.mark.usefixtures("quick_interpreter"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]


@pytest.fixture(autouse=True, scope="module")
def poisoned_memory():
    empty = torch.empty

    def full_of_rubbish(*args, **kwargs):
        made = empty(*args, **kwargs)
        rubbish = float("nan") if made.is_floating_point() else torch.iinfo(made.dtype).max // 3
        return made.fill_(rubbish)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "empty", full_of_rubbish)
        yield


def plan(rows, vocab_size, device=DEVICE):
    return build_sample_rows(
        rows,
        vocab_size=vocab_size,
        eos_ids=EOS,
        memory=RowMemory(vocab_size),
        upload=PlainInputs(device),
    )


def run(logits, options, pending=None, tiling=TILES, sampling=None):
    x = torch.tensor(np.asarray(logits), dtype=torch.float32, device=DEVICE)
    last = torch.tensor([0] * len(x) if pending is None else pending, device=DEVICE)
    sampling = sampling or TritonSampling(len(x), x.shape[1], DEVICE, tiling=tiling)
    tokens, ok = sampling.draw(x, options, last)
    assert tokens.dtype is torch.int64
    assert ok.dtype is torch.bool
    return tokens.tolist(), ok.tolist()


def draw(logits, rows, pending=None, tiling=TILES):
    return run(logits, plan(rows, np.shape(logits)[1]), pending, tiling)


def torch_draw(logits, rows, pending=None):
    x = torch.tensor(np.asarray(logits), dtype=torch.float32)
    asked = plan(rows, x.shape[1], torch.device("cpu"))
    tokens, ok = sampler.sample(x, asked, torch.tensor([0] * len(rows) if pending is None else pending))
    return tokens.tolist(), ok.tolist()


def sample_rows(**options):
    """Draws with what is given, one number a row, and all else off."""
    size = len(next(iter(options.values())))
    off = dict.fromkeys(Option, 0.0) | {
        Option.TEMPERATURE: 1.0, Option.TOP_P: 1.0, Option.REPETITION_PENALTY: 1.0, Option.UNIFORM: 0.5,
    }  # fmt: skip
    columns = [options.get(column.name.lower(), [value] * size) for column, value in off.items()]
    host = np.array(columns, dtype=np.float64).T.copy()
    return SampleRows(size, Options(host, torch.tensor(host, device=DEVICE)))


def exact_token(logits, options):
    """The kernels' arithmetic with a sort in place of their search: float32 weights, whole multiples of 2^-44."""
    x = np.asarray(logits, np.float32)
    k, p, u = int(options[Option.TOP_K]), options[Option.TOP_P], options[Option.UNIFORM]
    w = np.exp(((x - x.max()) / np.float32(options[Option.TEMPERATURE])).astype(np.float32))
    fixed = (w.astype(np.float64) * 2.0**44).astype(np.int64)
    ranked = np.sort(w)[::-1]
    least = ranked[k - 1] if 0 < k < len(w) else np.float32(0)
    if p < 1:
        need = p * float(fixed[w >= least].sum())
        sums = np.cumsum(np.sort(fixed)[::-1]).astype(np.float64)
        least = max(least, ranked[min((sums < need).sum(), len(w) - 1)])
    kept = np.where((w >= least) & (w >= np.float32(options[Option.MIN_P])), fixed, 0)
    running = np.cumsum(kept)
    return int(np.searchsorted(running, int(u * float(running[-1])), side="right"))


@given(
    st.lists(
        st.tuples(sampling_params, token_lists, token_lists, st.none() | st.integers(0, 59)),
        min_size=1,
        max_size=3,
    ),
    st.integers(0, 10**6),
)
def test_rows_equal_float64_and_the_torch_sampler(drawn, seed):
    logits = np.random.default_rng(seed).normal(0, 3, (len(drawn), 60)).astype(np.float32)
    rows = [
        row(str(i), p, prompt=(1, *prompt), output=output, pending=pending)
        for i, (p, prompt, output, pending) in enumerate(drawn)
    ]
    pending = [99 if p is None else p for _, _, _, p in drawn]
    tokens, ok = draw(logits, rows, pending, ONE_TILE)
    assert all(ok)
    others, _ = torch_draw(logits, rows, pending)
    for i, item in enumerate(rows):
        w = reference_weights(logits[i], item, drawn[i][3])
        p = item.request.sampling
        u = uniform(p.seed, p.choice, item.output_index) if p.temperature else 0.5
        edges = cuts(w)
        assert w[tokens[i]] > 0
        if np.abs(edges - u).min() < 1e-5:
            continue  # float32 may fall on either side
        assert tokens[i] == np.searchsorted(edges, u, side="right") - 1
        assert tokens[i] == others[i]


@pytest.mark.parametrize("spread", [1e-6, 1.0, 20.0])
def test_thresholds_are_those_of_a_sort(spread):
    """Whether a row's candidates fit side by side (peaked) or the row is read as a whole (flat), with ties."""
    rng = np.random.default_rng(3)
    size, vocab_size = 9, 603
    logits = rng.normal(0, spread, (size, vocab_size)).astype(np.float32)
    logits[3:6] = np.round(logits[3:6])
    options = sample_rows(
        top_k=[5, 0, 500, 40, 0, 1, 0, 70, vocab_size],
        top_p=[1.0, 0.9, 0.5, 0.3, 0.999, 1.0, 0.0, 1.0, 0.7],
        temperature=[1.0, 0.7, 1.0, 1.0, 2.0, 1.0, 1.0, 1e-3, 1.0],
        min_p=[0.0, 0.0, 0.1, 0.0, 0.0, 0.0, 0.0, 0.0, 0.3],
        uniform=rng.random(size),
    )
    tokens, ok = run(logits, options)
    assert all(ok)
    expected = [exact_token(logits[s], options.options.host[s]) for s in range(size)]
    if DEVICE.type == "cpu":
        assert tokens == expected
    else:  # the device's exponential is another one
        assert sum(a == b for a, b in zip(tokens, expected, strict=True)) >= size - 2


def test_uniform_numbers_are_turned_into_the_distribution():
    """Evenly spread numbers give every token its share, to one draw, with the whole range of the rest."""
    size = 80
    p = np.array([0.4, 0.25, 0.15, 0.1, 0.07, 0.03])
    logits = np.tile(np.log(p), (size, 1))
    options = sample_rows(uniform=(np.arange(size) + 0.5) / size)
    tokens, _ = run(logits, options, tiling=SamplingTiling(tile=4))
    assert sorted(tokens) == tokens
    assert np.abs(np.bincount(tokens, minlength=6) - p * size).max() <= 1


@pytest.mark.parametrize("vocab_size", [1, 2, 255, 257, 513])
def test_ends_of_the_range_and_odd_vocabularies(vocab_size):
    logits = np.zeros((4, vocab_size))
    options = sample_rows(uniform=[0.0, 1 - 2.0**-53, 1 - 2.0**-53, 0.5], top_k=[0, 0, 1, 0])
    tokens, ok = run(logits, options)
    # All are equal: top_k lets all that tie through.
    assert tokens == [0, vocab_size - 1, vocab_size - 1, vocab_size // 2]
    assert all(ok)


def test_batch_mates_do_not_change_a_draw():
    rng = np.random.default_rng(0)
    logits = rng.normal(0, 2, (8, 500)).astype(np.float32)
    options = [
        {}, {"temperature": 0.0}, {"top_p": 0.999}, {"top_k": 2}, {"min_p": 0.2}, {"top_k": 400, "top_p": 0.7},
        {"repetition_penalty": 1.5}, {"logit_bias": ((9, 3.0),)},
    ]  # fmt: skip
    rows = [row(str(i), SamplingParams(9, seed=i, **o)) for i, o in enumerate(options)]
    together, _ = draw(logits, rows)
    assert together[2:6] == [draw(logits[i : i + 1], [rows[i]])[0][0] for i in range(2, 6)]
    order = rng.permutation(8)
    assert [together[i] for i in order] == draw(logits[order], [rows[i] for i in order])[0]
    wide = SamplingTiling(tile=512, candidates=512, block=256)
    assert together == draw(logits, rows, tiling=wide)[0]
    assert together == torch_draw(logits, rows)[0]


def test_a_row_that_cannot_be_drawn_fails_alone():
    logits = np.zeros((10, 300), np.float32)
    logits[:, 299] = 1
    logits[1, 2] = np.nan
    logits[2, 270] = np.inf
    logits[3, 3] = -np.inf
    logits[6, 5] = -np.inf
    logits[7, 6] = -np.inf
    logits[8] = np.nan
    greedy = SamplingParams(9, temperature=0.0)
    bars_all = SamplingParams(9, min_tokens=1, stop_token_ids=tuple(range(300)))
    rows = [
        row("0", greedy),
        row("1", SamplingParams(9, top_p=0.5)),
        row("2", SamplingParams(9, top_k=3)),
        row("3", SamplingParams(9)),
        row("4", bars_all),
        row("5", SamplingParams(9, temperature=0.0, min_tokens=1, stop_token_ids=(299,))),
        # -inf where a bias or a penalty comes to is the model's error as well.
        row("6", SamplingParams(9, min_tokens=1, stop_token_ids=(5,))),
        row("7", SamplingParams(9, repetition_penalty=1.3), prompt=(6,)),
        row("8", SamplingParams(9, top_k=1)),
        row("9", greedy),
    ]
    tokens, ok = draw(logits, rows)
    assert ok == [True, False, False, False, False, True, False, False, False, True]
    assert tokens == [299, 0, 0, 0, 0, 0, 0, 0, 0, 299]
    assert (tokens, ok) == torch_draw(logits, rows)


def test_masks_over_several_tiles():
    """Where the program finds the largest logits; the logits that it bars are gone for those that follow."""
    size, vocab_size = 5, 603
    rng = np.random.default_rng(8)
    logits = rng.normal(0, 2, (size, vocab_size)).astype(np.float32)
    logits[4, 600] = np.nan
    options = [{}, {"top_k": 5}, {"temperature": 0.0, "logit_bias": ((3, 50.0),)}, {"top_p": 0.8}, {}]
    rows = [row(str(i), SamplingParams(9, seed=i, **option)) for i, option in enumerate(options)]
    allowed = rng.random((size, 32 * 19)) < 0.1
    allowed[2, 3] = False
    masked = [0, 1, 2, 4]
    bits = np.packbits(allowed[masked], axis=1, bitorder="little").view(np.int32)
    places = [0, 1, 2, -1, 3]

    def masks(device):
        return TokenMasks(*(torch.tensor(part, device=device) for part in (masked, places, bits)))

    x, last = torch.tensor(logits, device=DEVICE), torch.zeros(size, dtype=torch.int64, device=DEVICE)
    sampling = TritonSampling(size, vocab_size, DEVICE, tiling=TILES)
    tokens, ok = (part.tolist() for part in sampling.draw(x, plan(rows, vocab_size), last, masks(DEVICE)))
    assert ok == [True] * 4 + [False]
    assert all(allowed[s, tokens[s]] for s in (0, 1, 2))
    cpu = torch.device("cpu")
    asked = plan(rows, vocab_size, cpu)
    want, _ = sampler.sample(torch.tensor(logits), asked, torch.zeros(size, dtype=torch.int64), masks(cpu))
    assert tokens == want.tolist()


@pytest.mark.parametrize("temperature", [1e-45, 1e-30, 1e-6, 1e30, float("inf")])
def test_extreme_temperatures(temperature):
    logits = np.array([[1.0, 1.5, -3e38, 3.0], [3.4e38, -3.4e38, 0.0, 1.0]])
    barred = {"min_tokens": 1, "ignore_eos": True, "stop_token_ids": (1,)}
    rows = [row(str(i), SamplingParams(9, temperature=temperature, seed=i, **barred)) for i in range(2)]
    tokens, ok = draw(logits, rows)
    assert ok == [True, True]
    assert all(0 <= t < 4 and t != 1 for t in tokens)
    if temperature < 1:
        assert tokens == [3, 0]


def test_greedy_takes_the_first_of_the_largest():
    logits = np.zeros((2, 600))
    logits[0, [250, 300, 599]] = 5
    logits[1, 599] = 5
    rows = [row(str(i), SamplingParams(9, temperature=0.0, top_k=1, top_p=0.1)) for i in range(2)]
    assert draw(logits, rows) == ([250, 599], [True, True])
    # Beside a row that is drawn as well.
    rows[1] = row("1", SamplingParams(9, top_k=1))
    assert draw(logits, rows) == ([250, 599], [True, True])


def test_a_pending_token_that_occurred_counts_once_more():
    params = SamplingParams(9, temperature=0.0, frequency_penalty=1.0)
    rows = [row("0", params, output=(1,), pending=1), row("1", params, output=(1,))]
    assert draw([[0.0, 1.5, -1.0, 0.2]] * 2, rows, [1, 0], ONE_TILE)[0] == [3, 1]


def test_long_histories_and_many_biases():
    """More than a program takes at a time, with the pending token among them or not."""
    rng = np.random.default_rng(5)
    vocab_size = 2500
    logits = rng.normal(0, 1, (3, vocab_size)).astype(np.float32)
    params = SamplingParams(
        9, temperature=0.0, repetition_penalty=1.4, frequency_penalty=0.2, presence_penalty=0.3,
        logit_bias=tuple((int(t), 0.5) for t in rng.permutation(vocab_size)[:1500]),
    )  # fmt: skip
    output = tuple(rng.integers(0, 1900, 2200).tolist())
    rows = [
        row("0", params, output=output, pending=output[0]),
        row("1", params, output=output, pending=2222),
        row("2", params, output=output),
    ]
    logits[1, 2222] = 3.1  # the largest except what is pending
    pending = [output[0], 2222, 0]
    assert draw(logits, rows, pending) == torch_draw(logits, rows, pending)


def test_counts_follow_a_growing_sequence():
    counts = RowMemory(10)
    item = row("a", SamplingParams(9), prompt=(1, 2, 99), output=(2,))
    assert counts.entries(item).tolist() == [1, 2 | 1 << 20]
    item = row("a", SamplingParams(9), prompt=(1, 2, 99), output=(2, 5, 5, -1, 2))
    assert counts.entries(item).tolist() == [1, 2 | 2 << 20, 5 | 2 << 20]
    for _ in range(100):
        counts.begin_step([])
    assert counts.entries(item).tolist() == [1, 2 | 2 << 20, 5 | 2 << 20]


def test_options_are_read_where_they_lie(monkeypatch):
    """As a recorded launch does: other numbers in the same memory give other draws, and the host reads none."""
    logits = np.random.default_rng(1).normal(0, 1, (3, 300)).astype(np.float32)
    options = sample_rows(temperature=[0.0, 1.0, 1.0], uniform=[0.5, 0.2, 0.9], top_k=[0, 0, 299])
    starts = torch.tensor([0, 0, 0, 0], device=DEVICE)
    tokens = torch.tensor([0, 0], device=DEVICE)
    biases = Biases(starts, tokens, torch.zeros(2, device=DEVICE))
    options = SampleRows(3, options.options, biases=biases)
    sampling = TritonSampling(4, 300, DEVICE, tiling=TILES)
    x = torch.tensor(logits, device=DEVICE)
    last = torch.zeros(3, dtype=torch.int64, device=DEVICE)
    with monkeypatch.context() as patch:
        for name in ("item", "tolist", "nonzero", "__bool__"):
            patch.setattr(torch.Tensor, name, lambda *a: pytest.fail("the host reads what the device holds"))
        first, _ = sampling.draw(x.clone(), options, last)
        starts.copy_(torch.tensor([0, 1, 1, 2]))
        tokens.copy_(torch.tensor([7, 8]))
        biases.values.fill_(50.0)
        options.options.device[1, Option.TEMPERATURE] = 0.0
        options.options.device[2, Option.TOP_K] = 1
        second, _ = sampling.draw(x.clone(), options, last)
    assert first[0] == logits[0].argmax()
    assert second.tolist() == [7, logits[1].argmax(), 8]


def test_warming_up_launches_every_form_of_every_program(monkeypatch):
    """Those with penalties, with biases, with both and with neither; greedy and drawn."""
    launches = set()

    def watched(name):
        true = getattr(triton_sampling, name)

        def launcher(grid):
            def launch(*args, **options):
                forms = {
                    key: value
                    for key, value in options.items()
                    if key in ("EDITED", "DRAWN", "ADD", "MASKED")
                }
                launches.add((name, *sorted(forms.items())))
                true[grid](*args, **options)

            return launch

        return type("Watched", (), {"__class_getitem__": staticmethod(launcher)})

    for name in ("penalise", "add_bias", "peaks", "weigh", "gather", "select", "sum_kept", "pick"):
        monkeypatch.setattr(triton_sampling, name, watched(name))
    TritonSampling(1, 70, DEVICE, tiling=ONE_TILE).warm_up()
    warm = set(launches)
    launches.clear()
    for edits in ({}, {"presence_penalty": 1.0}, {"logit_bias": ((1, 1.0),)}):
        for more in ({}, {"logit_bias": ((2, 1.0),)}):
            for draws in ({"temperature": 0.0}, {"top_p": 0.9}):
                draw(
                    np.zeros((1, 70)), [row("0", SamplingParams(9, **edits | more | draws))], tiling=ONE_TILE
                )
    assert {launch for launch in warm if ("MASKED", True) not in launch} == launches
    assert ("peaks", ("MASKED", True)) in warm
    assert len(warm) == 17


def test_operands_that_do_not_fit_are_refused():
    sampling = TritonSampling(2, 10, DEVICE, tiling=ONE_TILE)
    x, last = torch.zeros(2, 10, device=DEVICE), torch.zeros(2, dtype=torch.int64, device=DEVICE)
    for logits, options, tokens in (
        (x[:, :9], SampleRows(2), last),
        (x.double(), SampleRows(2), last),
        (x, SampleRows(1), last),
        (x, SampleRows(2), last[:1]),
        (torch.zeros(3, 10), SampleRows(3), torch.zeros(3, dtype=torch.int64)),
    ):
        with pytest.raises(ValueError, match="do not fit"):
            sampling.draw(logits, options, tokens)
    with pytest.raises(ValueError, match="can be drawn from"):
        TritonSampling(1, MAX_VOCAB + 1, DEVICE)
    tokens, ok = sampling.draw(x[:0], SampleRows(0), last[:0])
    assert tokens.shape == ok.shape == (0,)


def test_log_sum_exp_and_scores():
    x = torch.tensor(np.random.default_rng(2).normal(0, 5, (7, 1030)), dtype=torch.float32, device=DEVICE)
    x[1, 3], x[2, 4], x[3, 5], x[4, :300], x[5] = (
        float("nan"),
        float("inf"),
        -float("inf"),
        -float("inf"),
        -3e38,
    )
    got, want = log_sum_exp(x, tile=256), x.double().logsumexp(-1, keepdim=True)
    assert not got[1:3].isfinite().any()
    fine = [0, 3, 4, 5, 6]
    torch.testing.assert_close(got[fine].double(), want[fine], rtol=1e-6, atol=2e-6)
    tokens = torch.arange(7, device=DEVICE)
    got = score_tokens(x, tokens, 20, log_sum_exp=lambda x: log_sum_exp(x, tile=256))
    want = score_tokens(x, tokens, 20)
    assert torch.equal(got.ids[fine], want.ids[fine])
    torch.testing.assert_close(got.values[fine], want.values[fine], rtol=1e-6, atol=2e-6)
    assert log_sum_exp(x[:0]).shape == (0, 1)
    with pytest.raises(ValueError, match="log-sum-exp"):
        log_sum_exp(x.T)
