"""`shardwise verify` on the four tiny configs under every strategy: clean runs must pass. Verdicts and seconds as a table.

python benchmarks/verify/matrix.py [--write benchmarks/verify/DATE.md]
python benchmarks/verify/matrix.py --tiny                one strategy, one config, few steps, to try the script
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
import time
from pathlib import Path

TASKS = ("chess", "cells", "segmentation", "images")
WAYS: dict[str, tuple[int, list[str]]] = {
    # name: (ranks, overrides)
    "single": (1, ["strategy=single"]),
    "dp": (1, ["strategy=dp"]),
    "ddp": (2, ["strategy=ddp"]),
    "ddp on 4, accumulation 2": (4, ["strategy=ddp", "gradient_accumulation=2"]),
    "zero1": (2, ["strategy=zero1"]),
    "fsdp FULL_SHARD": (2, ["fsdp.sharding_strategy=FULL_SHARD"]),
    "fsdp SHARD_GRAD_OP": (2, ["fsdp.sharding_strategy=SHARD_GRAD_OP"]),
    "fsdp HYBRID_SHARD of 2, on 4": (4, ["fsdp.sharding_strategy=HYBRID_SHARD", "fsdp.shard_size=2"]),
    "fsdp NO_SHARD": (2, ["fsdp.sharding_strategy=NO_SHARD"]),
    "fsdp, offloaded, recomputed": (2, ["fsdp.cpu_offload=true", "fsdp.activation_checkpointing=true"]),
    "pipeline 1f1b": (2, ["pipeline.schedule=1f1b", "gradient_accumulation=2"]),
    "pipeline and fsdp, on 4": (4, ["pipeline.stages=2", "fsdp.min_num_params=0", "gradient_accumulation=2"]),
    "tensor": (2, ["tensor.size=2"]),
    "tensor and fsdp, on 4": (4, ["tensor.size=2", "fsdp.min_num_params=0"]),
}
SMALLER = ["training.batch_size=2"]
"""So that four ranks of each fit on two cores; the models and the data are those of the files."""

TINY = ["--steps", "4", "--set", "data.num_games=40", "--set", "data.max_plies=6", "--set", "model.hidden_dim=16"]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--write", type=Path)
    parser.add_argument("--only", help="a part of a name of a strategy")
    parser.add_argument("--tiny", action="store_true", help="one strategy, one config, few steps, to try the script")
    args = parser.parse_args()
    tasks = TASKS[:1] if args.tiny else TASKS
    lines = [
        "# verify on clean runs",
        "",
        f"The four tiny configs with batches of 2 per rank; {os.cpu_count()} cores, torch {importlib.metadata.version('torch')}, "
        f"Python {platform.python_version()}, {time.strftime('%Y-%m-%d')}. Made by `benchmarks/verify/matrix.py`. Verdict, "
        "seconds; `refused`: the strategy cannot take this model, with the reason below.",
        "",
        "| | " + " | ".join(tasks) + " |",
        "|---|" + "---|" * len(tasks),
    ]
    reasons: dict[str, str] = {}
    for way, (ranks, overrides) in WAYS.items():
        if (args.only and args.only not in way) or (args.tiny and way != "ddp"):
            continue
        cells = []
        for task in tasks:
            verdict, reason = verify(task, ranks, overrides, TINY if args.tiny else [])
            cells.append(verdict)
            if reason:
                reasons[f"{task}, {way}"] = reason
        lines.append(f"| {way} | " + " | ".join(cells) + " |")
        print(lines[-1], flush=True)
    lines += ["", *(f"- {case}: {reason}" for case, reason in reasons.items())]
    print("\n".join(lines[-len(reasons) :]))
    if args.write:
        args.write.write_text("\n".join(lines) + "\n")


def verify(task: str, ranks: int, overrides: list[str], more: list[str]) -> tuple[str, str]:
    sets = [part for each in [*SMALLER, *(f"training.{o}" for o in overrides)] for part in ("--set", each)]
    command = [
        sys.executable,
        "-m",
        "shardwise",
        "verify",
        f"configs/{task}-tiny.yaml",
        "--ranks",
        str(ranks),
        "--json",
        *sets,
        *more,
    ]
    began = time.monotonic()
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    seconds = f"{time.monotonic() - began:.0f} s"
    if done.returncode == 2:
        return "refused", done.stderr.strip().splitlines()[-1].removeprefix("error: ")
    failed = [check for check in json.loads(done.stdout)["checks"] if check["verdict"] == "fail"]
    return (f"pass, {seconds}" if done.returncode == 0 else f"**FAIL**, {seconds}"), "; ".join(
        str(check) for check in failed
    )


if __name__ == "__main__":
    main()
