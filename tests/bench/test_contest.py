"""The clockwork: warm-up, rounds, ratios and the table's verdicts, on an imitated clock."""

import time

import pytest

from sparkgpt.bench import contest
from sparkgpt.bench.aims import AIMS, SENSES, table
from sparkgpt.bench.contest import Contestant, WarmUp, ratio, run_rounds, spread, timed, warm_up


class Clock:
    """Wall and processor seconds that pass only when a contestant's work says so."""

    def __init__(self, monkeypatch):
        self.wall = self.cpu = 0.0
        self.log = []
        monkeypatch.setattr(time, "perf_counter", lambda: self.wall)
        monkeypatch.setattr(time, "process_time", lambda: self.cpu)

    def contestant(self, name, seconds_of, preparing=0.0):
        """Works `seconds_of(index)` on two cores, and prepares for `preparing` seconds before."""

        def ready(index):
            self.wall += preparing

            def work():
                self.log.append((name, index))
                self.wall += seconds_of(index)
                self.cpu += 2 * seconds_of(index)

            return work

        return Contestant(name, ready)


@pytest.fixture
def clock(monkeypatch):
    return Clock(monkeypatch)


def test_only_the_work_is_timed(clock):
    sample = timed(clock.contestant("a", lambda index: 3.0, preparing=50.0).ready(0))
    assert sample == (3.0, 6.0)


def test_warm_up_goes_on_while_steps_get_faster(clock):
    falling = lambda index: max(8.0 - index, 1.0)
    warm = warm_up(clock.contestant("a", falling), WarmUp(least=4))
    # Steps 0.. take 8 7 6 5 4 3 2 1 1 1 1: the first two pairs of equal medians end at the 11th.
    assert warm["settled"] and warm["steps"] == 11
    assert warm["seconds"] == [falling(index) for index in range(11)]


def test_warm_up_of_a_steady_step_is_short(clock):
    assert warm_up(clock.contestant("a", lambda index: 1.0), WarmUp(least=6))["steps"] == 6


def test_warm_up_that_never_settles_says_so(clock):
    warm = warm_up(clock.contestant("a", lambda index: 0.5**index), WarmUp(least=4, most=9))
    assert warm["steps"] == 9 and not warm["settled"]


def test_rounds_are_interleaved_on_equal_indices(clock):
    slow = clock.contestant("slow", lambda index: 2.0)
    fast = clock.contestant("fast", lambda index: max(1.0, 6.0 - index))  # warms up for longer
    warmed, samples = run_rounds([slow, fast], 3, WarmUp(least=2))
    first = warmed["fast"]["steps"]
    assert first > warmed["slow"]["steps"]
    rounds = clock.log[warmed["slow"]["steps"] + first :]
    assert rounds == [(n, first + i) for i in range(3) for n in ("slow", "fast")]
    assert [sample.wall for sample in samples["slow"]] == [2.0] * 3
    assert [sample.cpu for sample in samples["fast"]] == [2.0] * 3


def test_spread_and_ratio():
    assert spread([5.0, 1.0, 3.0, 2.0, 4.0, 6.0]) == pytest.approx(
        {"median": 3.5, "p20": 2.0, "p80": 5.0}
    )
    assert spread([7.0]) == {"median": 7.0, "p20": 7.0, "p80": 7.0}
    # A load that slows whole rounds down is in both, and leaves the ratio alone.
    load = [1.0, 4.0, 2.0]
    top, bottom = [3.0 * x for x in load], [2.0 * x for x in load]
    assert ratio(top, bottom) == {"median": 1.5, "p20": 1.5, "p80": 1.5}


def test_garbage_collection_is_left_as_it_was(clock):
    run_rounds([clock.contestant("a", lambda index: 1.0)], 1, WarmUp(least=2))
    assert contest.gc.get_freeze_count() == 0


def test_verdicts():
    by_name = {aim.figure: aim for aim in AIMS}
    assert len(by_name) == len(AIMS)
    bare = by_name["ratio_to_bare"]
    assert (bare.verdict(1.01), bare.verdict(1.0)) == ("met", "not met")
    memory = by_name["peak_rss_ratio"]
    assert (memory.verdict(1.3), memory.verdict(1.31)) == ("met", "not met")
    assert bare.verdict(None) == "not measured" and bare.verdict(float("nan")) == "not met"
    assert by_name["share_gemm"].verdict(0.5) == ""
    assert {aim.sense for aim in AIMS} <= SENSES.keys() | {""}


def test_table_shows_every_figure_of_its_sections():
    machine = {"platform": {"cpu": "Abacus", "cores": 2, "threads": 1}}
    record = {"machine": machine, "load_before": (0.25, 0, 0), "load_after": (1.0, 0, 0)}
    record |= {"ratio_to_bare": 0.5, "help_seconds": 0.05}
    text = table(record, ["step", "startup"])
    lines = text.splitlines()
    assert lines[-1] == "Abacus, 2 cores, 1 threads; load 0.2 before, 1.0 after"
    assert len(lines) == 3 + sum(aim.section != "data" for aim in AIMS)
    (bare,) = [line for line in lines if line.startswith("bare kernels")]
    assert bare.split()[-5:] == ["0.50x", ">", "1.00x", "not", "met"]
    (help_,) = [line for line in lines if line.startswith("sparkgpt --help")]
    assert help_.endswith("< 0.15 s  met")
    assert "not measured" in text
