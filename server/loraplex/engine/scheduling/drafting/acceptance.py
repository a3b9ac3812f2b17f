"""How likely guessed tokens are accepted, learned from what became of earlier ones. No clock and no chance.

Each cell has the tried and the accepted tokens of one kind of draft, of the first token and of later ones apart, with
weights that shrink by each draft. A draft that a scheduler finds too poor teaches nothing, so a cell whose drafts are
left out for long is tried again: one token, after 32 matches, then 64, and so on up to 1,024.
"""

from __future__ import annotations

from array import array

_KEPT = 0.97
"""The share of older drafts' weight that each draft leaves: about the last thirty count."""
_PRIOR_WEIGHT = 2.0
_PRIORS = ((0.3, 0.7), (0.45, 0.8), (0.6, 0.85), (0.75, 0.9))
"""Chances of the first token, and of one behind an accepted one, by the class of the match's length."""
_CLASSES = (0, 0, 0, 1, 1, 2, 2, 2, 3)
"""The class of a match by its length: 2, 3 and 4, 5 to 7, 8."""
_FIRST_WAIT, _LAST_WAIT = 32.0, 1024.0
TRIAL_GAIN = 1.0
"""The promise of a trial, so that it is worth a row beside many sequences too."""
_TRIED, _ACCEPTED, _LATER_TRIED, _LATER_ACCEPTED, _WAITED, _WAIT = range(6)
_NUM_FIELDS = 6


def cell_of(source: int, length: int, *, lucky: bool) -> int:
    """The cell of a draft from source 0 or 1, behind a match of `length` tokens. `lucky`: the sequence's last draft was
    accepted at least in part, or there was none."""
    return (source * 4 + _CLASSES[length]) * 2 + lucky


class Acceptance:
    """The cells of one namespace."""

    __slots__ = ("_cells",)

    def __init__(self) -> None:
        cells = array("d")
        for first, later in _PRIORS * 2:
            row = (
                _PRIOR_WEIGHT,
                first * _PRIOR_WEIGHT,
                _PRIOR_WEIGHT,
                later * _PRIOR_WEIGHT,
                0.0,
                _FIRST_WAIT,
            )
            cells.extend(row * 2)
        self._cells = cells

    def chances(self, cell: int) -> tuple[float, float]:
        """The estimated probability that the first token is accepted, and that one is behind an accepted one."""
        cells, at = self._cells, cell * _NUM_FIELDS
        return (
            cells[at + _ACCEPTED] / cells[at + _TRIED],
            cells[at + _LATER_ACCEPTED] / cells[at + _LATER_TRIED],
        )

    def is_due(self, cell: int) -> bool:
        """Count a match. Returns whether as many as the cell waits for were found since its last draft."""
        at = cell * _NUM_FIELDS
        self._cells[at + _WAITED] += 1
        if self._cells[at + _WAITED] < self._cells[at + _WAIT]:
            return False
        self._cells[at + _WAITED] = 0
        return True

    def learn(self, cell: int, num_drafted: int, num_accepted: int, *, is_trial: bool) -> None:
        """Count the outcome of a draft. That of a trial counts more: what is known is old by then."""
        cells, at = self._cells, cell * _NUM_FIELDS
        kept = _KEPT
        cells[at + _WAITED] = 0
        if is_trial:
            cells[at + _WAIT] = min(2 * cells[at + _WAIT], _LAST_WAIT)
            kept = min(kept, _PRIOR_WEIGHT / cells[at + _TRIED])
        elif num_accepted:
            cells[at + _WAIT] = _FIRST_WAIT
        cells[at + _TRIED] = cells[at + _TRIED] * kept + 1
        cells[at + _ACCEPTED] = cells[at + _ACCEPTED] * kept + (num_accepted > 0)
        # A token behind a rejected one tells nothing.
        later = min(num_drafted, num_accepted + 1) - 1
        if later > 0:
            cells[at + _LATER_TRIED] = cells[at + _LATER_TRIED] * _KEPT + later
            cells[at + _LATER_ACCEPTED] = cells[at + _LATER_ACCEPTED] * _KEPT + num_accepted - 1
