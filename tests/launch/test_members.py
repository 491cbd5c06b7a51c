"""Ranks and launchers of the program agree on what they run, or say in what they differ: whoever started them."""

from __future__ import annotations

import re
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.cli.program import environment
from tests.launch.test_restarts import SAME, launcher, write


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_a_launcher_with_another_config_is_refused_and_the_run_goes_on(tmp_path: Path) -> None:
    folder = write(tmp_path / "run", "Slow")
    meeting = ["--nodes", "1:2", "--rendezvous", f"127.0.0.1:{free_port()}", *SAME]
    with launcher(folder, *meeting, "--node-host") as (host, host_says):
        host_says("checkpoint runs/ragged/checkpoints/step")
        with launcher(folder, *meeting, "--set", "training.optimizer.lr=0.5") as (guest, guest_says):
            guest_says(f"training.optimizer.lr: 0.01 on {socket.gethostname()}, 0.5 here")
            assert guest.wait(timeout=60) == 2
        elsewhere = write(tmp_path / "another run", "Slow")
        with launcher(elsewhere, *meeting) as (stranger, stranger_says):
            stranger_says("another run meets there, or one with another run folder")
            assert stranger.wait(timeout=60) == 2
        host_says("checkpoint runs/ragged/checkpoints/step")
        host.terminate()
        assert host.wait(timeout=60) == 75
    said = (folder / "runs/ragged/verdicts.jsonl").exists()
    assert not said, "nobody was disturbed"
    assert (folder / "runs/ragged/.key").stat().st_mode & 0o777 == 0o600


OWN_TASK = """
from tests.tasks import Ragged

class Mine(Ragged):
    '''{note}'''
"""


def begun_by_hand(folders: list[Path], arguments: Sequence[list[str]], port: int) -> list[subprocess.Popen[str]]:
    """One rank in each folder, as srun would start them."""
    programs = []
    for rank, folder in enumerate(folders):
        place = {
            "RANK": rank,
            "WORLD_SIZE": len(folders),
            "LOCAL_RANK": rank,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
        }
        command = [
            sys.executable,
            "-m",
            "shardwise",
            "train",
            "ragged.yaml",
            "--set",
            f"run_dir={folders[0] / 'shared'}",
        ]
        command += arguments[rank]
        given = environment(**{name: str(value) for name, value in place.items()})
        programs.append(
            subprocess.Popen(
                command, cwd=folder, env=given, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
            )
        )
    return programs


def ranks_by_hand(folders: list[Path], *arguments: list[str]) -> list[tuple[int, str]]:
    """Exit code of each, and what it said."""
    programs = begun_by_hand(folders, arguments or [[] for _ in folders], free_port())
    said = [program.communicate(timeout=120)[0] for program in programs]
    return [(program.returncode, text) for program, text in zip(programs, said, strict=True)]


def test_ranks_that_somebody_else_started_with_other_configs_are_refused_with_both_values(tmp_path: Path) -> None:
    folder = write(tmp_path / "run")
    different = [[], ["--set", "training.optimizer.lr=0.5", "--set", "seed=7"]]
    for code, said in ranks_by_hand([folder, folder], *different):
        assert code == 2, said
        assert "the ranks do not run the same:" in said and "Traceback" not in said
        assert re.search(r"seed: 0 on rank 0 \(\S+\), 7 on rank 1 \(\S+\)", said), said
        assert re.search(r"training[.]optimizer[.]lr: 0.01 on rank 0 \(\S+\), 0.5 on rank 1", said)
    assert not (folder / "shared/run.json").exists(), "nothing was begun"


def test_ranks_whose_sources_of_a_task_differ_are_refused_with_the_file(tmp_path: Path) -> None:
    folders = [tmp_path / "one", tmp_path / "two"]
    for folder in folders:
        write(folder)
        (folder / "mine.py").write_text(OWN_TASK.format(note=folder.name))
        config = folder / "ragged.yaml"
        config.write_text(config.read_text().replace("tests.tasks:Faulty", "mine:Mine"))
    for code, said in ranks_by_hand(folders):
        assert code == 2, said
        assert re.search(r"the source of mine: contents \w{8} on rank 0 \(\S+\), contents \w{8} on rank 1", said), said
    (folders[1] / "mine.py").write_bytes((folders[0] / "mine.py").read_bytes())
    for code, said in ranks_by_hand(folders):
        assert code == 0, said


def test_ranks_without_the_run_s_key_do_not_get_in(tmp_path: Path) -> None:
    folder, port = write(tmp_path / "run"), free_port()
    first, second = begun_by_hand([folder, folder], [[], ["--set", f"run_dir={tmp_path / 'elsewhere'}"]], port)
    said = second.communicate(timeout=120)[0]
    assert second.returncode == 2 and f"127.0.0.1:{port}: another run meets there" in said, said
    first.kill()
    assert "Traceback" not in first.communicate(timeout=60)[0]


def test_a_port_that_another_program_has_is_told(tmp_path: Path) -> None:
    folder = write(tmp_path / "run")
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen(8)
        port = other.getsockname()[1]
        first, second = begun_by_hand([folder, folder], [[], []], port)
        said = first.communicate(timeout=120)[0]
        second.kill()
        second.communicate(timeout=60)
    assert first.returncode == 2 and f"port {port} of 127.0.0.1 is in use already" in said, said
