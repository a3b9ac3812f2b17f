"""Rows of a step for drafted tokens: who gets them, how many, and what they leave behind."""

from collections import Counter

import pytest

from loraplex.engine.config import Charges
from loraplex.engine.scheduling.drafting import Draft, Drafter
from loraplex.engine.scheduling.speculation import Speculation
from loraplex.engine.scheduling.timing.step_costs import StepCosts
from loraplex.engine.types import Sequence
from support.engine.scheduler_bench import Bench, sizes

RIGHT, WRONG = 7, 8
FREE = StepCosts((1.0,) * 64)
DEAR = StepCosts(tuple(float(rows) for rows in range(1, 65)))
IN_FOURS = StepCosts(tuple(1.0 + (rows - 1) // 4 for rows in range(1, 65)))


class Planted(Drafter):
    """Proposes `token` for all sequences, each time with the gain that `gains` has for its tenant."""

    def __init__(self, token: int = RIGHT, gains: dict[str, float] | None = None) -> None:
        super().__init__(bytes_per_tenant=1 << 20, total_bytes=1 << 20)
        self._token = token
        self._gains = gains or {}
        self.learned: Counter[tuple[str, int, int]] = Counter()

    def propose(self, seq: Sequence, most: int) -> Draft | None:
        assert most >= 1
        gain = self._gains.get(seq.request.tenant_id, 0.9)
        return Draft((self._token,) * most, tuple(gain**place for place in range(1, most + 1)), "own")

    def verified(self, seq, source, num_drafted, num_accepted):
        self.learned[seq.request_id, num_drafted, num_accepted] += 1


def bench(drafter: Drafter | None = None, costs: StepCosts = FREE, **sizes: int) -> Bench:
    return Bench(speculation=Speculation(drafter or Planted(), costs), **sizes)


def begin(made: Bench, *names: str, num_prompt: int = 16, **options) -> list[Sequence]:
    seqs = [
        made.add(name, num_prompt, tenant=name[0], first=1000 * place, **options)
        for place, name in enumerate(names)
    ]
    while any(not seq.num_outputs for seq in seqs):
        made.step()
    return seqs


def test_accepted_drafts_advance_a_sequence_by_several_tokens():
    made = bench()
    (seq,) = begin(made, "a", max_tokens=30)
    assert sizes(made.plan()) == {"a": 9}
    made = bench()
    (seq,) = begin(made, "a", max_tokens=30)
    before = seq.num_outputs
    made.step()
    assert seq.num_outputs == before + 9
    assert seq.num_computed == len(seq.token_ids) - 1


def test_a_rejected_draft_is_computed_again_and_charged_as_a_prompt():
    prices = Charges(prefill=1.0, decode=10.0)
    drafter = Planted(WRONG)
    made = Bench(charges=prices, speculation=Speculation(drafter, FREE))
    (seq,) = begin(made, "a")
    counter = made.scheduler.queue.counter("a")
    assert made.step() == {"a": 9}
    assert seq.num_computed == len(seq.token_ids) - 1
    assert made.scheduler.queue.counter("a") == pytest.approx(counter + 10.0 + 8.0)
    assert drafter.learned["a", 8, 0] >= 1


def test_no_draft_goes_beyond_the_last_token():
    made = bench()
    (seq,) = begin(made, "a", max_tokens=4)
    assert seq.num_outputs == 1
    assert made.step() == {"a": 3}
    assert "a" not in made.live
    made = bench()
    begin(made, "a", max_tokens=2)
    assert made.step() == {"a": 1}, "the last token needs no draft"


def test_rows_that_cost_as_much_as_steps_are_not_taken():
    made = bench(costs=DEAR)
    begin(made, "a", "b")
    assert made.step() == {"a": 1, "b": 1}


def test_drafts_fill_a_tile_that_is_begun_and_begin_none_that_does_not_pay():
    made = bench(Planted(gains={"a": 0.3}), costs=IN_FOURS)
    begin(made, "a")
    assert made.step() == {"a": 4}
    made = bench(Planted(gains={"a": 0.01}), costs=IN_FOURS)
    begin(made, "a")
    assert made.step() == {"a": 1}, "a gain of a hundredth is not worth its risk"


def test_tenants_take_turns_however_many_sequences_they_have():
    made = bench(costs=FREE, seqs=8)
    begin(made, "a1", "a2", "a3", "b1", max_tokens=40)
    rows = sizes(made.plan())
    drafted = Counter({name: count - 1 for name, count in rows.items()})
    assert drafted["b1"] == drafted["a1"] + drafted["a2"] + drafted["a3"] == 2
    assert sum(rows.values()) == 8, "no more rows are sampled than sequences may run"


def test_rows_that_pay_only_together_are_not_taken_by_halves():
    costs = StepCosts(tuple(1.0 if rows <= 4 else 1.5 for rows in range(1, 65)))
    names = ("a", "b", "c", "d")
    made = bench(costs=costs, seqs=16)
    begin(made, *names)
    assert sum(made.step().values()) == 16
    made = bench(costs=costs, seqs=5)
    begin(made, *names)
    assert made.step() == dict.fromkeys(names, 1), "there is room for one row, and it begins a tile"


def test_the_likelier_draft_of_a_tenant_goes_first():
    class Uneven(Planted):
        def propose(self, seq, most):
            gain = 0.9 if seq.request_id == "a2" else 0.4
            return Draft((RIGHT,) * most, tuple(gain**place for place in range(1, most + 1)), "own")

    made = bench(Uneven(), costs=IN_FOURS)
    begin(made, "a1", "a2")
    assert made.step() == {"a1": 1, "a2": 3}


def test_drafts_preempt_nobody_and_leave_a_block_for_each_sequence():
    made = bench(blocks=4)
    first, second = begin(made, "a", "b", num_prompt=15, max_tokens=17)
    # Both stand at the end of their only block, and two blocks are free: each may need one.
    assert made.scheduler.blocks.num_free == 2
    while made.live:
        made.step()
    assert made.scheduler.num_preemptions == 0
    assert first.num_outputs == second.num_outputs == 17


def test_no_draft_takes_the_block_that_another_sequence_may_need_next():
    made = bench(blocks=5)
    begin(made, "a", "b", "c", num_prompt=15, max_tokens=17)
    assert made.scheduler.blocks.num_free == 2
    assert made.step() == {"a": 1, "b": 1, "c": 1}


def test_a_request_without_speculation_is_never_drafted_for():
    made = bench()
    begin(made, "a", speculation=False)
    assert made.step() == {"a": 1}


def test_a_chunk_of_a_prompt_leaves_drafts_what_a_small_step_has():
    made = bench(tokens=512)
    begin(made, "a")
    made.add("b", 300, first=5000)
    assert made.step() == {"a": 1, "b": 300}, "the step is large already"
    made.add("c", 60, first=9000)
    rows = made.step()
    assert rows["c"] == 60
    assert sum(rows.values()) == 64


def test_a_step_whose_tokens_are_used_up_has_no_drafts():
    made = bench(tokens=16, seqs=8)
    begin(made, "a")
    made.add("b", 300, first=5000)
    assert made.step() == {"a": 1, "b": 15}


def test_accepted_drafts_are_found_as_a_prefix_like_all_else():
    made = bench()
    (seq,) = begin(made, "a", num_prompt=10, max_tokens=30)
    while made.live:
        made.step()
    follow = made.add("next", 1, tenant="a")
    follow.token_ids[:] = seq.token_ids
    assert len(made.scheduler.blocks.find(follow)) == (len(seq.token_ids) - 1) // 16


def test_a_block_with_a_rejected_draft_is_not_found_as_a_prefix():
    made = bench(Planted(WRONG))
    (seq,) = begin(made, "a", num_prompt=10, max_tokens=60)
    while len(seq.token_ids) < 32:
        made.step()
    assert len(seq.token_ids) == 32, "the last position holds what was drafted for it until the next step"
    made.finish(seq)
    follow = made.add("next", 1, tenant="a")
    follow.token_ids[:] = [*seq.token_ids, 1]
    assert len(made.scheduler.blocks.find(follow)) == 1


def test_what_is_known_of_a_sequence_ends_with_it():
    speculation = Speculation(Planted(), FREE)
    made = Bench(speculation=speculation)
    (seq,) = begin(made, "a")
    made.collect(made.plan())
    plan = made.plan()
    assert plan.scheduled[0].drafted
    made.finish(seq)
    assert not speculation._sources


@pytest.mark.parametrize("fault", ["propose", "verified", "finished", "closed"])
def test_a_drafter_that_fails_ends_drafts_and_nothing_else(fault, monkeypatch, caplog):
    drafter = Planted()
    made = bench(drafter)
    (seq,) = begin(made, "a", max_tokens=60)

    def fail(*given):
        raise IndexError("planted")

    monkeypatch.setattr(drafter, fault, fail)
    while made.live:
        made.step()
    assert seq.num_outputs == 60
    if fault == "finished":
        made.scheduler.answered(seq)
    assert "no token is drafted any more" in caplog.text
    monkeypatch.undo()
    begin(made, "b")
    assert made.step() == {"b": 1}


def test_a_drafter_that_fails_leaves_nothing_behind(monkeypatch):
    drafter = Drafter(bytes_per_tenant=1 << 20, total_bytes=1 << 20)
    made = bench(drafter)
    (seq,) = begin(made, "a", max_tokens=60)
    made.step()
    made.scheduler.answered(seq)
    drafted = drafter.num_drafted["own"]
    assert drafter.num_bytes > 0
    assert seq in drafter._sequences

    def fail(*given):
        raise IndexError("planted")

    monkeypatch.setattr(drafter, "propose", fail)
    made.step()
    assert drafter.num_bytes == 0
    assert not drafter._sequences
    assert drafter.num_drafted["own"] == drafted


def of_mixture(experts: int, top_k: int, share: float) -> StepCosts:
    """Costs of steps that are bound by reading weights: `share` of those of one row are experts, and rows choose any
    alike."""
    touched = [experts * (1 - (1 - top_k / experts) ** rows) / top_k for rows in range(1, 65)]
    return StepCosts(tuple(1 - share + share * each for each in touched))


def test_drafts_of_a_mixture_pay_for_the_experts_that_they_touch():
    """Four rows of one sequence read 3.6 times the experts of one, of 128 with 8 for each row."""
    costs = of_mixture(128, 8, share=0.8)
    assert costs.cost(4) == pytest.approx(1 + 0.8 * 2.65, abs=0.05)
    for gain, drafted in ((0.4, 0), (0.7, 0), (0.98, 8)):
        made = bench(Planted(gains={"a": gain}), costs)
        begin(made, "a", max_tokens=30)
        assert sizes(made.plan()) == {"a": 1 + drafted}, gain
    # A dense base of as many bytes drafts at the same chances.
    made = bench(Planted(gains={"a": 0.4}), StepCosts(tuple(1 + 0.01 * rows for rows in range(64))))
    begin(made, "a", max_tokens=30)
    assert sizes(made.plan())["a"] > 1
