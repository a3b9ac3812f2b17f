"""What is taken for a hang and what is not, by a clock of the test's own."""

from __future__ import annotations

import pytest

from loraplex.engine.heartbeat import StepHeartbeat
from loraplex.engine.ipc.protocol import Heartbeat
from loraplex.serving.supervision.watchdog import MARGIN_S, TICK_S, Watchdog, WatchdogPolicy

POLICY = WatchdogPolicy(hang_timeout_s=10.0, new_step_timeout_s=300.0, start_silence_s=60.0)


class Watched:
    """An engine whose main thread beats once a second, and a watchdog that looks every `TICK_S`."""

    def __init__(self) -> None:
        self.now = 100.0
        self.watchdog = Watchdog(POLICY, self.now)

    def hear(self, stalled_s: float = 0.0, longest_s: float = 0.0, *, unusual: bool = False) -> str | None:
        self.watchdog.heard(self.now)
        self.watchdog.beat(Heartbeat(stalled_s, longest_s, unusual))
        return self.watchdog.verdict(self.now)

    def silence(self, seconds: float) -> float | None:
        """Seconds of silence until the verdict; None if there was none."""
        start = self.now
        while self.now < start + seconds:
            self.now += TICK_S
            if self.watchdog.verdict(self.now) is not None:
                return self.now - start
        return None


def test_silence_is_noticed_within_the_time_out_and_not_long_before() -> None:
    engine = Watched()
    engine.watchdog.ready()
    engine.now += 1.0 - TICK_S  # the stop came just before the next sign of life
    noticed = engine.silence(20)
    assert noticed is not None
    assert 7 <= noticed <= 10


def test_silent_start_is_allowed_a_longer_bounded_time() -> None:
    engine = Watched()
    engine.watchdog.heard(engine.now)
    noticed = engine.silence(100)
    assert noticed is not None
    assert 60 <= noticed <= 61


def test_silence_while_we_ourselves_were_held_up_does_not_count() -> None:
    engine = Watched()
    engine.hear()
    engine.now += 120  # this process was stopped, or its machine slept
    assert engine.watchdog.verdict(engine.now) is None
    assert engine.silence(7) is None
    assert engine.silence(4) is not None


@pytest.mark.parametrize(
    ("stalled_s", "longest_s", "unusual", "hangs"),
    [
        (8.0, 0.1, False, False),
        (10.0 - MARGIN_S + 0.01, 0.1, False, True),
        (200.0, 0.1, True, False),  # the first step of its size may compile
        (301.0, 0.1, True, True),
        (30.0, 8.0, False, False),  # slow, as it was before
        (33.0, 8.0, False, True),
    ],
)
def test_stuck_steps_are_recognised(stalled_s: float, longest_s: float, unusual: bool, hangs: bool) -> None:
    assert (Watched().hear(stalled_s, longest_s, unusual=unusual) is not None) is hangs


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_progress_tells_a_stall_from_rest_and_a_new_step_from_a_usual_one() -> None:
    clock = Clock()
    heartbeat = StepHeartbeat(clock)
    clock.now += 50
    assert heartbeat.vitals().stalled_s == 0, "nothing has begun"
    heartbeat.work()
    heartbeat.step_submitted(8)
    assert heartbeat.vitals().unusual
    for _ in range(3):  # layers
        clock.now += 2
        heartbeat.mark()
    heartbeat.step_collected(computed=True)
    assert heartbeat.vitals().stalled_s == 0
    assert 1.9 < heartbeat.vitals().longest_s <= 2
    heartbeat.rest()
    clock.now += 1000
    assert heartbeat.vitals().stalled_s == 0
    heartbeat.work()
    assert heartbeat.vitals().longest_s <= 2, "rest is no stall"
    heartbeat.step_submitted(16)
    clock.now += 7
    vitals = heartbeat.vitals()
    assert (vitals.stalled_s, vitals.unusual) == (7, False)
    heartbeat.step_submitted(17)
    assert heartbeat.vitals().unusual
    heartbeat.step_collected(computed=False)
    heartbeat.step_collected(computed=True)
    heartbeat.step_submitted(34)
    assert not heartbeat.vitals().unusual


def test_one_slow_step_is_forgotten_in_time() -> None:
    clock = Clock()
    heartbeat = StepHeartbeat(clock)
    heartbeat.work()
    clock.now += 60
    heartbeat.mark()
    for _ in range(300):
        heartbeat.step_submitted(1)
        heartbeat.step_collected(computed=True)
    assert heartbeat.vitals().longest_s < 0.2
