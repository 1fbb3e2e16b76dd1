"""How often readers are woken, by how busy the event loop is."""

from __future__ import annotations

import pytest

from octavo.engine.output.output_pace import MOST_TIMES, OutputPace


class Loop:
    """An event loop whose thread uses a share of a core."""

    def __init__(self) -> None:
        self.now_s = self.cpu_s = 0.0

    def run(self, pace: OutputPace, seconds: float, share: float) -> list[float]:
        intervals = []
        for _ in range(round(seconds * 1000)):
            self.now_s += 0.001
            self.cpu_s += 0.001 * share
            intervals.append(pace.interval_s(self.now_s))
        return intervals


def test_a_loop_with_time_keeps_the_interval() -> None:
    loop = Loop()
    pace = OutputPace(0.005, lambda: loop.cpu_s)
    assert set(loop.run(pace, 1.0, share=0.2)) == {0.005}


def test_a_busy_loop_stretches_it_up_to_a_limit_and_gives_it_back() -> None:
    loop = Loop()
    pace = OutputPace(0.005, lambda: loop.cpu_s)
    busy = loop.run(pace, 1.0, share=0.9)
    assert busy == sorted(busy)
    assert busy[-1] == pytest.approx(0.005 * MOST_TIMES)
    assert loop.run(pace, 0.5, share=0.3)[-1] == busy[-1]
    calm = loop.run(pace, 1.0, share=0.1)
    assert calm == sorted(calm, reverse=True)
    assert calm[-1] == 0.005


def test_no_interval_stays_none() -> None:
    loop = Loop()
    pace = OutputPace(0.0, lambda: loop.cpu_s)
    assert set(loop.run(pace, 1.0, share=1.0)) == {0.0}
