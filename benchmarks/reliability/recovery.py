"""How long a run stands still after a rank was killed, and what a sign of life costs.

python benchmarks/reliability/recovery.py --kills 9
python benchmarks/reliability/recovery.py --tiny         one kill, to try the script
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

from shardwise.watch.heartbeats import Phase, beat, begin_heartbeats, end_heartbeats

REPOSITORY = Path(__file__).parents[2]
CONFIG = """
task: tests.tasks:Slow
name: killed
training: {batch_size: 3, max_epochs: 1000, checkpoint_every_n_steps: 2, log_every_n_steps: 1, eval_at_start: false}
"""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--kills", type=int, default=9)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--tiny", action="store_true", help="one kill, to try the script")
    given = parser.parse_args()
    if given.tiny:
        given.kills = 1
    print(f"a beat: {1e6 * cost_of_a_beat(1000 if given.tiny else 200_000):.1f} µs")
    seconds = recoveries(given.kills, given.ranks, given.workers)
    print(
        f"from SIGKILL to the next step, {given.ranks} ranks, {given.workers} workers each, {given.kills} kills: ",
        end="",
    )
    print(f"median {statistics.median(seconds):.2f} s, {min(seconds):.2f} to {max(seconds):.2f} s")


def cost_of_a_beat(number: int) -> float:
    with tempfile.TemporaryDirectory() as folder:
        begin_heartbeats(Path(folder), 0, 1)
        began = time.perf_counter()
        for step in range(number):
            beat(Phase.COMPUTE, step)
        end_heartbeats()
        return (time.perf_counter() - began) / number


def recoveries(kills: int, ranks: int, workers: int) -> list[float]:
    seconds = []
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "killed.yaml").write_text(CONFIG)
        changes = [f"training.num_gpus={ranks}", "training.device=cpu", f"data.num_workers={workers}"]
        command = [sys.executable, "-m", "shardwise", "train", "killed.yaml", "--max-restarts", str(kills)]
        process = subprocess.Popen(
            [*command, *(word for change in changes for word in ("--set", change))],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": f"{REPOSITORY / 'src'}:{REPOSITORY}"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        assert process.stdout is not None
        try:
            lines = iter(process.stdout)
            for number in range(kills):
                wait_for_steps(lines, 5)
                killed = time.monotonic()
                os.kill(rank_of(process.pid, number % ranks), signal.SIGKILL)
                next(line for line in lines if "resumed from" in line)
                wait_for_steps(lines, 1)
                seconds.append(time.monotonic() - killed)
        finally:
            process.kill()
            process.wait()
            process.stdout.close()
    return seconds


def wait_for_steps(lines: Iterator[str], number: int) -> None:
    for _ in range(number):
        next(line for line in lines if "loss" in line)


def rank_of(launcher: int, rank: int) -> int:
    """The ranks are the children of the server that they are forked from, in their order."""
    servers = [child for child in psutil.Process(launcher).children() if "forkserver" in " ".join(child.cmdline())]
    return sorted(child.pid for child in servers[0].children())[rank]


if __name__ == "__main__":
    main()
