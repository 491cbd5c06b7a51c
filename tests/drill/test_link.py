"""`shardwise drill --faults link`: two machines lose each other, find together again, and nothing is lost."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from shardwise.cli import main
from shardwise.drill import conduct, network
from shardwise.drill.conduct import Result
from shardwise.drill.faults import Fault, Kind
from shardwise.drill.network import NAMES, two_machines, why_there_are_none
from tests.cli.program import environment
from tests.drill.test_drill import CONFIG, drill


@pytest.fixture
def networks() -> None:
    if (reason := why_there_are_none()) is not None:
        pytest.skip(reason)


@pytest.mark.usefixtures("networks")
def test_after_two_cuts_of_the_link_both_machines_come_back_by_themselves_and_nothing_is_lost(tmp_path: Path) -> None:
    code, result, said = drill(tmp_path, "Ragged", "--count", "2", "--faults", "link", "--seed", "1", "--steps", "20")
    assert (code, result["problems"]) == (0, []), said
    assert [each["fault"]["kind"] for each in result["recoveries"]] == ["link", "link"]
    assert all(
        "nothing is seen here: the machine, or the link to it" in each["verdict"] for each in result["recoveries"]
    )
    file = tmp_path / "runs/toy-drill/round-1/run/verdicts.jsonl"
    # On a busy machine ranks may start so late that they are missed for that.
    verdicts = [json.loads(line) for line in file.read_text().splitlines() if "start-up" not in line]
    assert [verdict["kind"] for verdict in verdicts] == ["lost"] * 4
    assert sorted(verdict["guilty"] for verdict in verdicts) == [[0], [0], [1], [1]], (
        "each misses the other, both times"
    )
    assert not _left_behind()


# ---------------------------------------------------------------- the two machines


@pytest.mark.usefixtures("networks")
def test_the_networks_are_gone_after_an_error_or_ctrl_c_and_a_killed_drill_s_are_swept_by_the_next(
    tmp_path: Path,
) -> None:
    with pytest.raises(KeyboardInterrupt), two_machines() as machines:
        assert all((NAMES / machine.network).exists() for machine in machines)
        raise KeyboardInterrupt
    assert not any((NAMES / machine.network).exists() for machine in machines)

    program = "import time; from shardwise.drill.network import two_machines\nwith two_machines() as made:\n"
    program += "    print(*[machine.network for machine in made], flush=True); time.sleep(600)"
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, env=environment())
    assert process.stdout is not None
    names = process.stdout.readline().split()
    with two_machines():
        assert len(names) == 2 and all((NAMES / name).exists() for name in names), (
            "those of a living drill are left alone"
        )
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert sorted(_left_behind()) == names
    with two_machines():
        assert not _left_behind()


def _left_behind() -> list[str]:
    """Of processes that are gone."""
    names = [file.name for file in NAMES.glob("shardwise-*")] if NAMES.is_dir() else []
    return [name for name in names if not Path("/proc", re.split("-", name)[1]).exists()]


# ---------------------------------------------------------------- where it is not possible


def test_named_where_it_is_not_possible_it_is_refused_with_the_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = _write(tmp_path)
    assert main(["drill", config, "--faults", "link", "--ranks", "1"]) == 2
    assert "--faults link" in (said := capsys.readouterr().err) and "one rank cannot be on two machines" in said
    assert main(["drill", config, "--faults", "skip", "--ranks", "1"]) == 2
    assert "one rank has nobody to agree with" in capsys.readouterr().err

    def forbidden(*words: str) -> None:
        raise network.NoNetworks("mount --make-shared /run/netns failed: Operation not permitted")

    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr("shutil.which", lambda name: "/sbin/ip")
    monkeypatch.setattr(network, "_ip", forbidden)
    assert main(["drill", config, "--faults", "kill,link"]) == 2
    assert "Operation not permitted" in capsys.readouterr().err
    monkeypatch.setattr("shutil.which", lambda name: None)
    assert main(["drill", config, "--faults", "link"]) == 2
    assert "need the program ip, of iproute2" in capsys.readouterr().err
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert main(["drill", config, "--faults", "link"]) == 2
    assert "not possible here: network namespaces need root" in capsys.readouterr().err
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    assert main(["drill", config, "--faults", "link"]) == 2
    assert "GPUs of one machine speak with each other past the network" in capsys.readouterr().err


def test_not_named_it_is_there_where_it_is_possible_and_otherwise_left_out_with_a_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    config, planned = _write(tmp_path), list[set[Kind]]()

    def note(spec: object, faults: Sequence[Fault], say: object) -> Result:
        planned.append({fault.kind for fault in faults})
        return Result()

    monkeypatch.setattr(conduct, "conduct", note)
    monkeypatch.setattr(network, "why_there_are_none", lambda: None)
    assert main(["drill", config, "--folder", str(tmp_path / "drill")]) == 0
    assert "left out" not in capsys.readouterr().err
    monkeypatch.setattr(network, "why_there_are_none", lambda: "network namespaces need root")
    assert main(["drill", config, "--folder", str(tmp_path / "drill")]) == 0
    sentence = "left out: link (the link between two machines cut): network namespaces need root"
    assert capsys.readouterr().err.count(sentence) == 1
    assert planned == [set(Kind), set(Kind) - {Kind.LINK}]


def _write(folder: Path) -> str:
    (folder / "toy.yaml").write_text(CONFIG.format(task="Ragged"))
    return str(folder / "toy.yaml")
