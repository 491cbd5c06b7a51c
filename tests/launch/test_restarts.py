"""A run that loses ranks: started again by itself, judged in one sentence, and in the end the same run."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import psutil
import pytest

from shardwise.checkpoint import Written
from shardwise.cli.train import duration, node_range
from shardwise.drill.network import CABLE, MEETING_POINT, Machine, two_machines, why_there_are_none
from shardwise.engine.shutdown import Stop, seconds_to_leave
from shardwise.errors import LaunchError
from shardwise.launch.environment import attempt
from shardwise.launch.nodes import Nodes
from shardwise.parallel.membership import Member
from shardwise.watch.exit_codes import TIME_IS_UP
from tests.cli.program import BIN, SHARDWISE, Program, run_program, shardwise, started
from tests.cli.test_train import checksums, curve
from tests.tasks import Faulty

RAGGED = """
task: tests.tasks:{task}
name: ragged
training:
  batch_size: 3
  max_epochs: 2
  checkpoint_every_n_steps: 2
  log_every_n_steps: 1
  optimizer: {{lr: 0.01}}
  hang_timeout: 8
"""


def write(folder: Path, task: str = "Faulty") -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "ragged.yaml").write_text(RAGGED.format(task=task))
    return folder


def verdicts(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "runs/ragged/verdicts.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The undisturbed run."""
    folder = write(tmp_path_factory.mktemp("undisturbed") / "whole")
    assert shardwise(folder, "train", "ragged.yaml").returncode == 0
    return folder


def test_after_a_kill_a_pause_a_hang_a_crash_and_an_error_it_is_bit_for_bit_the_undisturbed_run(
    tmp_path: Path, whole: Path
) -> None:
    torn = write(tmp_path / "torn")
    done = shardwise(
        torn, "train", "ragged.yaml", "--max-restarts", "5", FAULTS="kill:1:2,stop:0:4,hang:1:4,crash:0:3,raise:1:4"
    )
    assert done.returncode == 0, done.stderr
    assert curve(torn) == curve(whole)
    assert checksums(torn) == checksums(whole)
    kinds = [(verdict["kind"], verdict["guilty"]) for verdict in verdicts(torn)]
    assert kinds == [("killed", [1]), ("paused", [0]), ("hang", [1]), ("crash", [0]), ("error", [1])]
    assert done.stderr.count("restart ") == 5 and "Traceback" not in done.stderr
    assert "restart 1 of 5: from the beginning, there is no checkpoint yet" in done.stderr
    # It is chance whether the last checkpoint before a fault is in place already: it is written while training goes on.
    again = r"restart 2 of 5: (going on from step [24]|from the beginning, there is no checkpoint yet)$"
    assert re.search(again, done.stderr, re.MULTILINE)
    hang = verdicts(torn)[2]["sentence"]
    assert hang.startswith("rank 1 is in the computation of step") and "(tests/tasks.py:" in hang
    assert "; rank 0 waits in the reduction of gradients of step" in hang
    assert "time.sleep" not in hang and (torn / "runs/ragged/ranks/rank-0001.stack").exists()
    assert "OSError: a passing trouble (tests/tasks.py:" in verdicts(torn)[4]["sentence"]


class Edited(Faulty):
    """Its config file is changed when it begins, and gone when it begins again."""

    def prepare_data(self) -> None:
        if os.environ["RANK"] == "0":
            file = Path("ragged.yaml")
            if attempt():
                file.unlink(missing_ok=True)
            else:
                file.write_text(file.read_text().replace("lr: 0.01", "lr: 0.5"))
        super().prepare_data()


def test_restarted_ranks_train_the_config_that_the_run_began_with(tmp_path: Path, whole: Path) -> None:
    torn = write(tmp_path / "torn")
    task = "task=tests.launch.test_restarts:Edited"
    done = shardwise(torn, "train", "ragged.yaml", "--set", task, FAULTS="kill:1:4,kill:0:4")
    assert done.returncode == 0, done.stderr
    assert not (torn / "ragged.yaml").exists() and done.stderr.count("restart ") == 2
    assert curve(torn) == curve(whole)
    assert checksums(torn) == checksums(whole)


def test_under_torchrun_a_hang_is_judged_and_the_restarted_ranks_go_on(tmp_path: Path, whole: Path) -> None:
    torn = write(tmp_path / "torn")
    # Alone on this machine, which torch 2.13 takes for granted: torch 2.11 would keep one store for all attempts.
    command = [str(BIN / "torchrun"), "--standalone", "--nproc-per-node", "2", "--max-restarts", "1"]
    command += ["-m", "shardwise", "train", "ragged.yaml"]
    # With the store that torchrun shares by default, a restarted rank may dial a dead one (torch 2.13).
    done = run_program(command, torn, FAULTS="hang:1:4", TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1")
    assert done.returncode == 0, done.stderr
    assert "verdict: rank 1 is in the computation of step 4 (tests/tasks.py:" in done.stderr
    assert curve(torn) == curve(whole)


@contextmanager
def launcher(folder: Path, *arguments: str, within: Sequence[str] = ()) -> Iterator[tuple[Program, Any]]:
    """A launcher, and a way to wait for a line of it. `within`: a command that runs it, such as `ip netns exec`."""
    process = started([*within, SHARDWISE, "train", "ragged.yaml", *arguments], folder)
    lines: list[str] = []
    news = threading.Condition()

    def read() -> None:
        assert process.stdout is not None
        for line in process.stdout:
            with news:
                lines.append(line)
                news.notify_all()

    reader = threading.Thread(target=read)
    reader.start()

    def wait_for(text: str) -> None:
        with news:
            come = news.wait_for(lambda: any(text in line for line in lines), timeout=90)
            assert come, f"{text!r} never came:\n{''.join(lines)}"
            lines.clear()

    try:
        yield process, wait_for
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()
        reader.join()


SAME = [
    "--set",
    "training.scheduler={name: constant}",
    "--set",
    "training.max_epochs=99",
    "--set",
    "training.num_gpus=1",
]


def assert_the_curve_of_one_machine(whole: Path, parts: Path) -> None:
    """Every step once, and its loss that of a run that was never on more machines than one."""
    b = curve(parts)
    assert shardwise(whole, "train", "ragged.yaml", *SAME, "--set", f"training.max_steps={len(b)}").returncode == 0
    a = curve(whole)
    assert [step for step, *_ in a] == [step for step, *_ in b]
    assert [loss for _, loss, *_ in a] == pytest.approx([loss for _, loss, *_ in b], rel=1e-3)


def test_machines_come_and_go_and_every_step_is_made_once_with_the_same_samples(tmp_path: Path) -> None:
    """Two launchers as two machines, one rank each: one joins, leaves by a signal, joins again, and is killed."""
    whole, parts = write(tmp_path / "whole", "Ragged"), write(tmp_path / "parts", "Slow")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    meeting = ["--nodes", "1:2", "--rendezvous", f"127.0.0.1:{port}", *SAME]
    alone, both = (
        "batch 3 per device × 1 accumulation × 1 devices = 3",
        "batch 3 per device × 1 accumulation × 2 devices → 3",
    )
    with launcher(parts, *meeting, "--node-host") as (host, host_says):
        host_says(alone)
        with launcher(parts, *meeting) as (guest, guest_says):
            host_says("another machine joins: the ranks save, leave and start again with it")
            guest_says("joined as rank 1; the run's lines stand where rank 0 is, on 127.0.0.1")
            host_says("2 devices now, 1 when the run began: accumulation 1, the global batch stays 3")
            host_says(both)
            host_says("checkpoint runs/ragged/checkpoints/step")
            guest.terminate()
            assert guest.wait(timeout=60) == 75
        host_says("other machines have left or joined")
        host_says(alone)
        with launcher(parts, *meeting) as (guest, _):
            host_says(both)
            host_says("checkpoint runs/ragged/checkpoints/step")
            family = psutil.Process(guest.pid).children(recursive=True)
            guest.kill()
            host_says("rank 0 lost the connection to rank 1, whose machine or link is gone")
            _, alive = psutil.wait_procs(family, timeout=10)
            assert not alive
        host_says(alone)
        host_says("checkpoint runs/ragged/checkpoints/step")
        host.terminate()
        assert host.wait(timeout=60) == 75
    assert_the_curve_of_one_machine(whole, parts)


@pytest.fixture
def machines() -> Iterator[tuple[Machine, Machine]]:
    if (reason := why_there_are_none()) is not None:
        pytest.skip(reason)
    with two_machines() as made:
        yield made


def test_both_ends_of_a_cut_link_are_judged_one_goes_on_and_the_other_joins_again_when_it_is_back(
    tmp_path: Path, machines: tuple[Machine, Machine]
) -> None:
    """Nothing is reset or refused: what was sent never arrives, and only silence tells."""
    whole, parts = write(tmp_path / "whole", "Ragged"), write(tmp_path / "parts", "Slow")
    meeting = ["--nodes", "1:2", "--rendezvous", MEETING_POINT, *SAME]
    here, there = (machine.within() for machine in machines)
    with launcher(parts, *meeting, "--node-host", within=here) as (host, host_says):
        host_says("batch 3 per device × 1 accumulation × 1 devices = 3")
        with launcher(parts, *meeting, within=there) as (guest, guest_says):
            host_says("batch 3 per device × 1 accumulation × 2 devices → 3")
            host_says("checkpoint runs/ragged/checkpoints/step")
            subprocess.run([*there, "ip", "link", "set", CABLE, "down"], check=True)
            host_says("rank 1, of which nothing is seen here: the machine, or the link to it, is lost or hangs")
            guest_says("rank 0, of which nothing is seen here: the machine, or the link to it, is lost or hangs")
            host_says("batch 3 per device × 1 accumulation × 1 devices = 3")
            host_says("checkpoint runs/ragged/checkpoints/step")
            machines[1].put_the_cable_back()
            host_says("batch 3 per device × 1 accumulation × 2 devices → 3")
            host_says("checkpoint runs/ragged/checkpoints/step")
            guest.terminate()
            assert guest.wait(timeout=60) == 75
        host_says("batch 3 per device × 1 accumulation × 1 devices = 3")
        host.terminate()
        assert host.wait(timeout=60) == 75
    # On a busy machine the guest may take so long to start that the host misses it for that.
    cut = [verdict for verdict in verdicts(parts) if "start-up" not in verdict["sentence"]]
    assert [verdict["kind"] for verdict in cut] == ["lost", "lost"]
    assert sorted(verdict["guilty"] for verdict in cut) == [[0], [1]]
    assert_the_curve_of_one_machine(whole, parts)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("1h50m", 6600),
        ("90s", 90),
        ("2h", 7200),
        ("1:50:00", 6600),
        ("5:30", 330),
        ("45", 45),
        ("1d2h", 93600),
        ("1.5s", 1.5),
    ],
)
def test_times_are_written_as_people_do(text: str, seconds: float) -> None:
    assert duration(text) == seconds


@pytest.mark.parametrize("text", ["", "soon", "1h50", "-5s", "1:2:3:4", "h"])
def test_what_is_no_time_is_answered(text: str) -> None:
    with pytest.raises(Exception, match="is no time: write 1h50m"):
        duration(text)


def test_numbers_of_machines() -> None:
    assert node_range("1:4") == (1, 4) and node_range("2") == (2, 2)
    for wrong in ("0:2", "3:2", "many", ":2"):
        with pytest.raises(Exception, match="must be MIN:MAX"):
            node_range(wrong)


def test_a_machine_is_reached_by_the_address_that_leads_to_the_rendezvous_address() -> None:
    member = Member(b"the key of this run", {})
    own = Nodes(1, 2, "127.0.0.1:29400", "job", member)
    assert own.address == "127.0.0.1" and own.interface == "lo" and own.hosts_rendezvous is None
    assert Nodes(1, 2, "127.0.0.1:29400", "job", member, keeps=True).hosts_rendezvous is True
    with pytest.raises(LaunchError, match=r"nowhere[.]invalid is not known"):
        _ = Nodes(1, 2, "nowhere.invalid:29400", "job", member).address


def test_what_cannot_go_together_is_said_before_anything_starts(tmp_path: Path) -> None:
    from shardwise.cli import main

    (tmp_path / "ragged.yaml").write_text(RAGGED.format(task="Ragged"))
    config = str(tmp_path / "ragged.yaml")
    for arguments in (
        ["--nodes", "1:2"],
        ["--rendezvous", "host:1"],
        ["--nodes", "1:2", "--rendezvous", "host"],
        ["--nodes", "1:2", "--rendezvous", "host:1", "--fresh"],
        ["--nodes", "1:2", "--rendezvous", "host:1", "--resume", "latest"],
        ["--max-restarts", "-1"],
    ):
        assert main(["train", config, *arguments]) == 2


def written(seconds: float) -> Written:
    return Written(1, Path("step-00000001"), 0.0, seconds)


def test_the_time_is_up_when_a_save_and_two_steps_would_no_longer_fit() -> None:
    import time

    def stop(left: float) -> Stop:
        """Of 100 seconds, of which 5 are kept in reserve."""
        made = Stop(after=100.0, began=time.monotonic() - 100.0 + left)
        made.stepped(10.0)
        made.saved(cast(Any, None), written(20.0))
        return made

    assert not stop(left=20 + 2 * 10 + 5 + 1).requested
    assert stop(left=20 + 2 * 10 + 5 - 1).requested
    assert not Stop().requested


def test_before_the_first_checkpoint_its_time_is_guessed_from_its_size() -> None:
    import time

    def stop(left: float) -> Stop:
        made = Stop(after=1000.0, began=time.monotonic() - 1000.0 + left)
        made.state_bytes = 20_000_000_000  # 200 seconds on a slow disk; 30 are kept in reserve
        return made

    assert not stop(left=200 + 30 + 1).requested
    late = stop(left=200 + 30 - 1)
    assert late.requested
    late.saved(cast(Any, None), written(2.0))
    assert late.exit_code == TIME_IS_UP, "it is faster than was thought, but that is why this rank left"
    fast = stop(left=200)
    fast.saved(cast(Any, None), written(2.0))
    assert not fast.requested, "from then on, what it took is what counts"
    assert seconds_to_leave(100.0, step=10.0, save=20.0) == 20 + 2 * 10 + 5
    assert seconds_to_leave(7200.0, step=0.0, save=0.0) == 30


def test_how_often_ranks_were_started_before_is_what_the_launcher_or_torchrun_says() -> None:
    assert attempt({}) == 0
    assert attempt({"TORCHELASTIC_RESTART_COUNT": "2"}) == 2
    assert attempt({"TORCHELASTIC_RESTART_COUNT": "0", "SHARDWISE_ATTEMPT": "3"}) == 3
