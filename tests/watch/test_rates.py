from __future__ import annotations

import pytest

from shardwise.watch.rates import Rates, clock, peak_flops, short


class Clock:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        monkeypatch.setattr("time.perf_counter", lambda: self.now)


def test_throughput_is_what_was_done_over_the_time_it_took_without_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    watch = Clock(monkeypatch)
    measured = Rates(flops_per_count=10.0, peak=1000.0, began=watch.now)
    for _ in range(4):
        measured.add(samples=8, counts=100)
    watch.now += 13.0
    measured.pause(3.0)  # an evaluation
    reading = measured.read()
    assert reading["samples_per_second"] == pytest.approx(3.2)
    assert reading["counts_per_second"] == pytest.approx(40.0)
    assert reading["mfu"] == pytest.approx(0.4)  # 40 units/s of 10 FLOP each, of 1000 FLOP/s
    assert measured.seconds_left(6) == pytest.approx(15.0)  # 2.5 s per step


def test_a_reading_covers_only_the_steps_since_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    watch = Clock(monkeypatch)
    measured = Rates(None, None, began=watch.now)
    measured.add(10, 10)
    watch.now += 1.0
    measured.read()
    measured.add(30, 30)
    watch.now += 1.0
    assert measured.read()["samples_per_second"] == pytest.approx(30.0)
    assert measured.average_samples() == pytest.approx(20.0)


def test_no_mfu_is_claimed_without_a_formula_or_a_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    watch = Clock(monkeypatch)
    for formula, peak in ((None, 1e12), (1e6, None)):
        measured = Rates(formula, peak, began=watch.now)
        measured.add(1, 1)
        watch.now += 1.0
        assert measured.read()["mfu"] is None


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H200", 989e12),
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA H100 NVL", 835e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA L40S", 362e12),
        ("NVIDIA L4", 121e12),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None),
        ("NVIDIA GeForce RTX 4090", None),
        ("CPU", None),
    ],
)
def test_a_peak_is_known_or_it_is_not_never_guessed(name: str, peak: float | None) -> None:
    assert peak_flops(name) == peak


def test_numbers_are_written_for_people() -> None:
    assert [clock(seconds) for seconds in (5, 65, 3725)] == ["0:05", "1:05", "1:02:05"]
    assert [short(number) for number in (3.14, 1234, 5.6e6, 7e9)] == ["3.1", "1.2k", "5.6M", "7.0G"]
