"""Bugs to plant into the scheduler, its blocks, its prefix index and its fair queue."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from loraplex.adapters.cache.tenant_memory import TenantMemory
from loraplex.engine.kv import prefix_keys, sequence_blocks
from loraplex.engine.kv.blocks import BlockManager
from loraplex.engine.kv.layers import PrefixNeeds
from loraplex.engine.kv.sequence_blocks import SequenceBlocks
from loraplex.engine.scheduling import step_draft
from loraplex.engine.scheduling.fair_queue import FairQueue
from loraplex.engine.scheduling.scheduler import Scheduler
from loraplex.engine.scheduling.tenant_turns import TenantTurns
from loraplex.engine.types import ScheduledSequence, Sequence
from loraplex.kernels.attention import BLOCK_SIZE


def lease_released_twice(patch: pytest.MonkeyPatch) -> None:
    stop = Scheduler._stop

    def twice(self: Scheduler, seq: Sequence) -> None:
        lease = self.running[seq]
        stop(self, seq)
        if lease is not None:
            self._cache.release(lease)

    patch.setattr(Scheduler, "_stop", twice)


def lease_kept_by_a_preempted_sequence(patch: pytest.MonkeyPatch) -> None:
    preempt = Scheduler._preempt

    def keep(self: Scheduler, draft: Any, seq: Sequence) -> None:
        if self.running[seq] is not None:
            self.running[seq] = None
        preempt(self, draft, seq)

    patch.setattr(Scheduler, "_preempt", keep)


def prefix_key_without_digest(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(prefix_keys, "namespace", lambda request: (request.tenant_id, None))


def prefix_key_without_tenant(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(
        prefix_keys,
        "namespace",
        lambda request: ("", None if request.adapter is None else request.adapter.digest),
    )


def prefix_key_of_the_block_alone(patch: pytest.MonkeyPatch) -> None:
    link = prefix_keys.next_link
    patch.setattr(prefix_keys, "next_link", lambda _, token_ids: link(b"", token_ids))


def prefix_key_without_the_place(patch: pytest.MonkeyPatch) -> None:
    link = prefix_keys.next_link
    patch.setattr(prefix_keys, "next_link", lambda before, token_ids: link(before, token_ids[:BLOCK_SIZE]))


def slot_before_the_place(patch: pytest.MonkeyPatch) -> None:
    schedule = Scheduler._schedule

    def keep(self: Scheduler, draft: Any, seq: Sequence, **limits: int | None) -> None:
        schedule(self, draft, seq, **limits)
        if seq in draft.scheduled:
            draft.scheduled[seq].slot = seq.slot

    patch.setattr(Scheduler, "_schedule", keep)


def blocks_leaked_by_an_early_end(patch: pytest.MonkeyPatch) -> None:
    stop = Scheduler._stop

    def leak(self: Scheduler, seq: Sequence) -> None:
        if not seq.num_outputs:
            seq.block_ids = ()
        stop(self, seq)

    patch.setattr(Scheduler, "_stop", leak)


def blocks_freed_twice(patch: pytest.MonkeyPatch) -> None:
    release = BlockManager.release

    def twice(self: BlockManager, block_ids: tuple[int, ...]) -> None:
        release(self, block_ids)
        release(self, [block for block in block_ids if self._refs[block]])

    patch.setattr(BlockManager, "release", twice)


def content_of_a_reused_block_not_forgotten(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(BlockManager, "_drop_key", lambda self, block: None)


def one_block_too_few(patch: pytest.MonkeyPatch) -> None:
    missing = SequenceBlocks.missing_to

    def fewer(self: SequenceBlocks, seq: Sequence, end: int) -> int:
        return missing(self, seq, max(1, end // BLOCK_SIZE * BLOCK_SIZE))

    patch.setattr(SequenceBlocks, "missing_to", fewer)


def a_windows_block_given_back_too_early(patch: pytest.MonkeyPatch) -> None:
    unseen = sequence_blocks.blocks_unseen
    patch.setattr(
        sequence_blocks,
        "blocks_unseen",
        lambda window, num_blocks: unseen(max(1, window - BLOCK_SIZE), num_blocks),
    )


def prefix_found_without_a_windows_blocks(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(PrefixNeeds, "seeing_last", lambda self: [])


def prefix_key_without_the_group(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(prefix_keys, "of_group", lambda key, group: key)


def a_block_still_held_given_out(patch: pytest.MonkeyPatch) -> None:
    allocate = BlockManager.allocate

    def share(self: BlockManager, count: int) -> list[int]:
        held = [block for block, refs in enumerate(self._refs) if refs and self._key_of[block] is None]
        if count == 1 and len(held) > 2:
            self._refs[held[0]] += 1
            return [held[0]]
        return allocate(self, count)

    patch.setattr(BlockManager, "allocate", share)


def preemption_without_epoch(patch: pytest.MonkeyPatch) -> None:
    preempt = Scheduler._preempt

    def stay(self: Scheduler, draft: Any, seq: Sequence) -> None:
        preempt(self, draft, seq)
        seq.epoch -= 1

    patch.setattr(Scheduler, "_preempt", stay)


def prefix_registered_for_a_former_life(patch: pytest.MonkeyPatch) -> None:
    def register(self: Scheduler, seq: Sequence, row: ScheduledSequence) -> None:
        keys = prefix_keys.extend_keys(seq)
        for index in range(row.start // 16, (row.start + row.num_tokens) // 16):
            if self.blocks._refs[row.block_ids[index]]:
                self.blocks.register(row.block_ids[index], keys[index])

    patch.setattr(Scheduler, "computed", register)


def prefix_registered_before_it_was_computed(patch: pytest.MonkeyPatch) -> None:
    schedule = Scheduler._schedule

    def early(self: Scheduler, draft: Any, seq: Sequence, **limits: int | None) -> None:
        schedule(self, draft, seq, **limits)
        row = draft.scheduled.get(seq)
        if row is not None and not row.pending_input:
            self.computed(seq, row)

    patch.setattr(Scheduler, "_schedule", early)


def service_not_charged(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(FairQueue, "charge", lambda self, seq, units: None)


def weight_ignored(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(FairQueue, "set_weight", lambda self, tenant_id, weight: None)


def newcomers_not_lifted(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(FairQueue, "_lift", lambda self, tenant: None)


def found_prefix_not_scored(patch: pytest.MonkeyPatch) -> None:
    start = Scheduler._start

    def skip(self: Scheduler, draft: Any, seq: Sequence, *rest: Any) -> bool:
        if seq.num_scored < seq.num_to_score and not seq.num_scored:
            found = self.blocks.lookup(prefix_keys.extend_keys(seq)[: seq.num_prompt // 16])
            seq.num_scored = min(len(found) * 16, seq.num_to_score)
        return start(self, draft, seq, *rest)

    patch.setattr(Scheduler, "_start", skip)


def prompt_scored_again_after_a_preemption(patch: pytest.MonkeyPatch) -> None:
    preempt = Scheduler._preempt

    def forget(self: Scheduler, draft: Any, seq: Sequence) -> None:
        preempt(self, draft, seq)
        seq.num_scored = 0

    patch.setattr(Scheduler, "_preempt", forget)


def parked_requests_never_asked_for_again(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(TenantTurns, "first", lambda self, count: [])


def found_prefix_not_pooled(patch: pytest.MonkeyPatch) -> None:
    find = SequenceBlocks.find

    def of_any_request(self: SequenceBlocks, seq: Sequence) -> list[int]:
        if seq.request.pooling != "mean":
            return find(self, seq)
        findable = (seq.num_tokens - 1) // 16
        return self.lookup(prefix_keys.extend_keys(seq)[:findable])

    patch.setattr(SequenceBlocks, "find", of_any_request)


def prompt_pooled_again_after_a_preemption(patch: pytest.MonkeyPatch) -> None:
    start_of = step_draft.pool_start

    def again(seq: Sequence, start: int, end: int) -> int:
        return start if seq.epoch and seq.request.pooling == "mean" else start_of(seq, start, end)

    patch.setattr(step_draft, "pool_start", again)


def cap_on_device_memory_ignored(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(TenantMemory, "excess", lambda self, tenant_id, num_bytes: 0)


def adapter_above_the_cap_waits_without_end(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(TenantMemory, "refusal", lambda self, ref: "")


def departed_adapters_kv_kept_like_others(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(BlockManager, "set_resident", lambda self, digest, is_resident: None)


def kv_of_an_adapter_that_came_back_evicted_first(patch: pytest.MonkeyPatch) -> None:
    set_resident = BlockManager.set_resident

    def only_leaves(self: BlockManager, digest: str, is_resident: bool) -> None:
        if not is_resident:
            set_resident(self, digest, is_resident)

    patch.setattr(BlockManager, "set_resident", only_leaves)


def part_of_a_measurement_skipped(patch: pytest.MonkeyPatch) -> None:
    draft_part = step_draft.draft_part

    def skips(draft: step_draft.StepDraft, *rest: Any) -> Sequence | None:
        seq = draft_part(draft, *rest)
        if seq is not None and seq.num_computed == 3:
            seq.num_computed += 1
        return seq

    patch.setattr(step_draft, "draft_part", skips)


SCHEDULING_BUGS: tuple[Callable[[pytest.MonkeyPatch], None], ...] = (
    lease_released_twice,
    lease_kept_by_a_preempted_sequence,
    prefix_key_without_digest,
    prefix_key_without_tenant,
    prefix_key_without_the_place,
    slot_before_the_place,
    prefix_key_of_the_block_alone,
    blocks_leaked_by_an_early_end,
    blocks_freed_twice,
    content_of_a_reused_block_not_forgotten,
    one_block_too_few,
    a_windows_block_given_back_too_early,
    prefix_found_without_a_windows_blocks,
    prefix_key_without_the_group,
    a_block_still_held_given_out,
    preemption_without_epoch,
    prefix_registered_for_a_former_life,
    prefix_registered_before_it_was_computed,
    service_not_charged,
    weight_ignored,
    newcomers_not_lifted,
    found_prefix_not_scored,
    prompt_scored_again_after_a_preemption,
    found_prefix_not_pooled,
    prompt_pooled_again_after_a_preemption,
    part_of_a_measurement_skipped,
    parked_requests_never_asked_for_again,
    cap_on_device_memory_ignored,
    adapter_above_the_cap_waits_without_end,
    departed_adapters_kv_kept_like_others,
    kv_of_an_adapter_that_came_back_evicted_first,
)
