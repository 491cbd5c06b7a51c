"""The same training with the sources of two commits, in turn: are the curves the same to the digit, and the steps as fast?

git worktree add ../before COMMIT
python benchmarks/strategies/before_after.py ../before . [--pairs 6] [--steps 120] [--write FILE]
python benchmarks/strategies/before_after.py --tiny      this tree and itself, on a tiny model, to try the script

Two CPU ranks each, one thread per rank, the config chess-tiny (ddp) and the same under fsdp. Which of the two begins changes from
pair to pair, so that a machine that gets slower does not count for one of them.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).parents[2]
CONFIG = HERE / "configs" / "chess-tiny.yaml"
WAYS = {"ddp": [], "fsdp": ["training.fsdp={min_num_params: 100000}"]}
SKIPPED = 10
"""Steps at the beginning that are not counted."""
TINY = ["data.num_games=24", "data.max_plies=6", "model.hidden_dim=16", "training.batch_size=2", "training.num_gpus=1"]
"""One rank, in the program's own process: most of the time is spent on starting."""


def train(tree: Path, folder: Path, steps: int, way: list[str], skipped: int) -> tuple[list[Any], list[float]]:
    """The curve and rank 0's seconds of each step."""
    options = [f"run_dir={folder}", f"training.max_steps={steps}", "training.log_every_n_steps=1", *way]
    command = [sys.executable, "-m", "shardwise", "train", str(CONFIG), "--fresh"]
    command += [part for option in options for part in ("--set", option)]
    environment = {**os.environ, "PYTHONPATH": str(tree.resolve() / "src"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=folder.parent)
    if done.returncode:
        sys.exit(f"{tree}: {done.stderr}")
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    curve = [record.get("eval") or (record["loss"], record["grad_norm"], record["lr"]) for record in records]
    rank = [json.loads(line) for line in (folder / "ranks" / "rank-0000.jsonl").read_text().splitlines()]
    seconds = [each["seconds"] for each in rank if "seconds" in each]
    return curve, [sum(each[phase] for phase in ("agree", "compute", "update")) for each in seconds][skipped:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", type=Path, nargs="?", help="a checkout")
    parser.add_argument("after", type=Path, nargs="?", help="another")
    parser.add_argument("--pairs", type=int, default=6)
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--write", type=Path, help="a file for the table")
    parser.add_argument("--tiny", action="store_true", help="this tree and itself, on a tiny model, to try the script")
    args = parser.parse_args()
    smaller, skipped, ranks = (TINY, 1, "one rank") if args.tiny else ([], SKIPPED, "two ranks, one thread each")
    if args.tiny:
        args.before, args.after, args.pairs, args.steps = args.before or HERE, args.after or HERE, 1, 5
    elif args.after is None:
        parser.error("two checkouts are needed, or --tiny")
    lines = ["| way | before, ms per step | after | change (median of pairs) | curves |", "|---|---|---|---|---|"]
    with tempfile.TemporaryDirectory() as scratch:
        for name, way in WAYS.items():
            medians: dict[str, list[float]] = {"before": [], "after": []}
            curves = []
            for pair in range(args.pairs):
                for which in ("before", "after") if pair % 2 == 0 else ("after", "before"):
                    folder = Path(scratch) / f"{name}-{pair}-{which}"
                    curve, seconds = train(getattr(args, which), folder, args.steps, [*way, *smaller], skipped)
                    medians[which].append(1000 * statistics.median(seconds))
                    curves.append(curve)
                print(
                    f"{name} pair {pair}: " + ", ".join(f"{key} {values[-1]:.2f} ms" for key, values in medians.items())
                )
            changes = [after / before - 1 for before, after in zip(*medians.values(), strict=True)]
            same = "the same to the digit" if all(curve == curves[0] for curve in curves) else "DIFFERENT"
            lines.append(
                f"| {name} | {statistics.median(medians['before']):.2f} | {statistics.median(medians['after']):.2f} | "
                f"{statistics.median(changes):+.1%} ({min(changes):+.1%} to {max(changes):+.1%}) | {same} |"
            )
    about = (
        f"{time.strftime('%Y-%m-%d')}, {os.cpu_count()} cores, Python {platform.python_version()}, "
        f"{args.pairs} pairs of {args.steps} steps, {ranks}"
    )
    text = "\n".join([about, "", *lines])
    print(text)
    if args.write:
        args.write.write_text(f"# Before and after\n\n{text}\n")


if __name__ == "__main__":
    main()
