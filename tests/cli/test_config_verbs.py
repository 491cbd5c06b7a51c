"""`config advise` and `config show`: they say what `train` would say, before anything is started."""

from __future__ import annotations

import pytest

from shardwise.cli import main
from tests.conftest import REPOSITORY

TINY = str(REPOSITORY / "configs" / "chess-tiny.yaml")


@pytest.mark.parametrize("options", [["--gpus", "0"], ["--memory", "nan"], ["--memory", "-1"], ["--nodes", "0"]])
def test_nonsense_about_devices_is_refused(options: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "advise", TINY, "--set", "data.num_games=20", *options]) == 2
    assert "--memory a number above 0" in capsys.readouterr().err


def test_advice_names_the_strategy_its_reasons_and_the_lines_to_write(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "advise", TINY, "--set", "data.num_games=20", "--gpus", "8", "--memory", "80"]) == 0
    said = capsys.readouterr().out
    assert "a whole copy fits" in said and said.rstrip().endswith("strategy: ddp")


@pytest.mark.parametrize(
    ("heads", "devices", "nodes", "ending"),
    [
        (8, 8, 1, "tensor: {size: 8}"),
        (6, 8, 1, "tensor: {size: 2}"),  # 4 and 8 would cut a head in two
        (3, 12, 1, "tensor: {size: 3}"),  # 8 would not divide the devices either
        (3, 8, 1, "shows what is used."),
        (4, 8, 8, "shows what is used."),
    ],
)
def test_only_a_tensor_size_that_the_model_accepts_is_advised(
    heads: int, devices: int, nodes: int, ending: str, capsys: pytest.CaptureFixture[str]
) -> None:
    sets = ["--set", "data.num_games=20", "--set", f"model.num_heads={heads}"]
    machines = ["--gpus", str(devices), "--nodes", str(nodes), "--memory", "0.0005"]
    assert main(["config", "advise", TINY, *sets, *machines]) == 0
    said = capsys.readouterr().out
    assert "it must be split itself" in said
    assert said.rstrip().endswith(ending), said
    assert ("the model cannot be split by 2 or 4 or 8" in said) == ((heads, devices) == (3, 8))
    assert ("no machine has two devices" in said) == (nodes == 8)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["pipeline.stages=3", "num_gpus=4"], "3 does not go with 4 rank(s)"),
        (["pipeline.stages=2", "num_gpus=2", "ddp.comm_hook=fp16"], "not under pipeline"),
        (["tensor.size=2", "num_gpus=2", "precision=16-mixed"], "use bf16-mixed"),
    ],
)
def test_show_refuses_what_train_would(overrides: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    sets = [part for each in overrides for part in ("--set", f"training.{each}")]
    assert main(["config", "show", TINY, *sets]) == 2
    assert message in capsys.readouterr().err
