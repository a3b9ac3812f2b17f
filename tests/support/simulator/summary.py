"""What a random history, or many, consisted of."""

from __future__ import annotations

from dataclasses import dataclass, field, fields


@dataclass
class Summary:
    """What a history, or many, consisted of."""

    histories: int = 0
    events: int = 0
    steps: int = 0
    requests: int = 0
    tokens: int = 0
    preemptions: int = 0
    prefix_hits: int = 0
    restored: int = 0
    states_restored: int = 0
    from_disk: int = 0
    late_reads: int = 0
    loads: int = 0
    overlapped: int = 0
    out_of_memory: int = 0
    poisoned: int = 0
    cut_prompts: int = 0
    grammar_ends: int = 0
    measured: int = 0
    held_for_grammar: int = 0
    from_copies: int = 0
    damaged_copies: int = 0
    deletions: int = 0
    restarts: int = 0
    resumed: int = 0
    drafted: int = 0
    accepted: int = 0
    endings: dict[str, int] = field(default_factory=dict)

    def add(self, other: Summary) -> None:
        for count in fields(self):
            if count.name != "endings":
                setattr(self, count.name, getattr(self, count.name) + getattr(other, count.name))
        for ending, count in other.endings.items():
            self.endings[ending] = self.endings.get(ending, 0) + count

    def __str__(self) -> str:
        endings = ", ".join(f"{count} {ending}" for ending, count in sorted(self.endings.items()))
        return (
            f"{self.histories} histories, {self.events} events, {self.steps} steps, {self.requests} requests "
            f"({endings}), {self.tokens} tokens, {self.preemptions} preemptions, {self.prefix_hits} tokens found in "
            f"the prefix cache, {self.restored} blocks restored from host memory, "
            f"{self.states_restored} states, "
            f"{self.from_disk} from a disk, {self.late_reads} requests that went on without it, {self.loads} loads, "
            f"{self.overlapped} copies that a step could read before they were done, {self.out_of_memory} steps out of "
            f"memory, {self.poisoned} rows with KV that is not finite, "
            f"{self.cut_prompts} prompts aborted while they were scored, "
            f"{self.grammar_ends} answers ended by their grammar, {self.held_for_grammar} requests held for theirs, "
            f"{self.measured} adapters measured, {self.from_copies} loads of laid-out copies, "
            f"{self.damaged_copies} copies damaged, {self.deletions} versions deleted, {self.restarts} restarts, "
            f"{self.resumed} answers that went on behind one, {self.accepted} of {self.drafted} drafts accepted"
        )
