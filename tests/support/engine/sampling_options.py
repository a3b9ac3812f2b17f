"""Options of sampling to try."""

from __future__ import annotations

from hypothesis import strategies as st

from loraplex.engine.types import SamplingParams

sampling_params = st.builds(
    SamplingParams,
    max_tokens=st.just(9),
    temperature=st.sampled_from([0.0, 0.3, 1.0, 2.5]),
    top_p=st.sampled_from([1.0, 0.9, 0.5, 0.05]),
    top_k=st.sampled_from([0, 1, 3, 40, 1000]),
    min_p=st.sampled_from([0.0, 0.1, 0.9]),
    repetition_penalty=st.sampled_from([1.0, 1.3, 0.8]),
    presence_penalty=st.sampled_from([0.0, 0.7, -1.0]),
    frequency_penalty=st.sampled_from([0.0, 0.4, -0.3]),
    seed=st.integers(0, 2**63),
    logit_bias=st.sampled_from([(), ((5, 4.0),), ((0, -100.0), (7, 1.5))]),
    stop_token_ids=st.sampled_from([(), (6, 7)]),
    min_tokens=st.sampled_from([0, 2, 5]),
    ignore_eos=st.booleans(),
)
token_lists = st.lists(st.integers(0, 59), max_size=6).map(tuple)
