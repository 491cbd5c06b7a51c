"""benchmarks/gpu/contenders: everybody trains the same, time is taken at the ends of windows, and nothing ends the script."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from benchmarks.gpu.contenders.__main__ import main
from benchmarks.gpu.contenders.curves import study
from benchmarks.gpu.contenders.llama import LLAMA_1B, LLAMA_7B, LLAMA_8B, Shape, llama_1b
from benchmarks.gpu.contenders.meter import Meter, Plan
from benchmarks.gpu.contenders.problem import Contender, Options, Row
from benchmarks.gpu.contenders.tokens import SUCCESSORS, learnable_tokens
from benchmarks.gpu.contenders.turns import take_turn

PLAN = Plan(warmup=1, windows=2, steps=1)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """The script asks for one where models are tiny."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def plain() -> list[float]:
    return losses_of("plain loop")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Accelerate", "shardwise", "shardwise, fsdp"])
def test_tools_have_the_losses_of_the_plain_loop(name: str, plain: list[float]) -> None:
    if name == "Accelerate":
        pytest.importorskip("accelerate")
    assert losses_of(name) == pytest.approx(plain, rel=1e-4)
    assert plain[0] != pytest.approx(plain[-1], rel=1e-4)


def losses_of(name: str) -> list[float]:
    contender = next(each for each in llama_1b(Options(tiny=True)).contenders if each.name == name)
    row = take_turn(contender)
    assert row.figures is not None, row.failed
    return row.figures.losses


def test_a_contender_that_fails_has_a_row_that_says_why() -> None:
    def run(meter: Meter) -> None:
        raise ValueError("no room\nand more")

    assert take_turn(Contender("bad", run, 1, PLAN)).failed == "ValueError: no room"


@pytest.mark.slow
def test_a_contender_that_stops_early_has_failed() -> None:
    row = take_turn(Contender("lazy", lambda meter: meter.done(1.0, 1), 1, PLAN))
    assert "made 1 of 3 steps" in row.failed


@pytest.mark.slow
def test_what_was_found_is_in_the_files_and_no_time_means_no_contender(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "found.md"
    words = ["--tiny", "--works", "llama-8b", "--only", "plain loop", "--out", str(out)]
    monkeypatch.setattr(sys, "argv", ["contenders", *words])
    main()
    found = json.loads(out.with_suffix(".json").read_text())["works"]["llama-8b"]["contenders"]
    assert [each["name"] for each in found] == ["plain loop, gradient checkpointing"]
    assert found[0]["units_per_second"] > 0 and len(found[0]["losses"]) == 3
    assert "| plain loop, gradient checkpointing | 2 | " in out.read_text()
    assert str(tmp_path) not in out.read_text()

    monkeypatch.setattr(sys, "argv", ["contenders", "--tiny", "--works", "llama-1b", "--minutes", "0"])
    main()
    assert capsys.readouterr().out.count("left out, the time is up") == len(llama_1b(Options(tiny=True)).contenders)


def test_time_is_taken_at_the_ends_of_windows_only(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = iter(range(100))
    monkeypatch.setattr(Meter, "_now", lambda self: float(next(asked)))
    meter = Meter(Plan(warmup=3, windows=2, steps=4), torch.device("cpu"))
    meter.ready()
    for step in range(11):
        meter.done(float(step), units=10)
    figures = meter.figures()
    assert next(asked) == 6  # begun, ready, first step, end of the warm-up, two windows
    assert figures.windows == [1.0, 1.0] and figures.seconds_per_step == 0.25 and figures.units_per_second == 40
    assert (figures.first_step_seconds, figures.warmup_seconds) == (1, 2)


def test_kernels_are_listed_in_a_window_that_is_not_timed() -> None:
    meter = Meter(Plan(warmup=1, windows=2, steps=2, profile=True), torch.device("cpu"))
    meter.ready()
    for _ in range(7):
        torch.ones(50, 50) @ torch.ones(50, 50)
        meter.done(1.0, units=10)
    figures = meter.figures()
    assert len(figures.windows) == 2 and len(figures.losses) == 7
    assert "aten::mm" in dict(figures.kernels) and all(seconds >= 0 for _, seconds in figures.kernels)


@pytest.mark.parametrize(("shape", "parameters"), [(LLAMA_1B, 1.26e9), (LLAMA_7B, 6.74e9), (LLAMA_8B, 8.03e9)])
def test_the_models_have_the_sizes_they_are_called_by(shape: Shape, parameters: float) -> None:
    from benchmarks.gpu.contenders.llama import _build

    with torch.device("meta"):
        found = sum(parameter.numel() for parameter in _build(shape, False).parameters())
    assert found == pytest.approx(parameters, rel=2e-3)
    assert found == pytest.approx(shape.weights + shape.vocabulary * shape.hidden, rel=1e-3)


def test_a_token_is_followed_by_few_others() -> None:
    rows = learnable_tokens(200, 50, 20)
    followers = {tuple(pair) for pair in torch.stack([rows[:, :-1], rows[:, 1:]], dim=-1).flatten(0, 1).tolist()}
    by_token = [sum(first == token for first, _ in followers) for token in rows.unique().tolist()]
    assert 1 < max(by_token) <= SUCCESSORS


@pytest.mark.slow
def test_curves_are_compared_with_the_plain_loop(tmp_path: Path) -> None:
    def row(name: str, scale: float) -> Row:
        def run(meter: Meter) -> None:
            for step in range(12):
                meter.done(scale * (12 - step), 1)

        return take_turn(Contender(name, run, 1, Plan(warmup=1, windows=1, steps=11)))

    text = "\n".join(study([row("plain loop", 1.0), row("other", 1.02)], tmp_path / "found.md"))
    assert "| other | 2.000% | 2.000% | 5.6100 | +2.000% |" in text
    assert (tmp_path / "found-curves.png").is_file()
