"""How long training stands still for a checkpoint: written while it goes on, or before it goes on.

python benchmarks/reliability/stall.py [--parameters 25] [--ranks 2] [--write benchmarks/reliability/DATE-stall.md]   CPU
python benchmarks/reliability/stall.py --parameters 1260 --ranks 1                                                     GPU
python benchmarks/reliability/stall.py --tiny          a few saves of a small model, to try the script

A model of linear layers with AdamW (12 bytes per parameter), steps in between. Training stands still while `session.save()`
runs; on a GPU, where the copies run beside the next step, it is what save and step together took longer than a step does. On a
CPU the thread that writes also takes processor time from the steps that follow: that is the last column. A synchronous save is
the same save waited for. The first asynchronous one is told apart, because it may have to take memory for the copy.
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

STEPS_BETWEEN, SAVES = 4, 8


def rank(millions: float, saves: int, strategy: str, folder: str) -> None:
    import torch
    from torch import nn

    from shardwise import Loss, Session
    from shardwise.config import parse_config

    on_gpu = torch.cuda.is_available()
    width, batch, precision = (4096, 32768, "bf16-mixed") if on_gpu else (1024, 4, "32-true")
    if millions * 1e6 < width**2:
        width = round((millions * 1e6) ** 0.5)
    layers = max(1, round(millions * 1e6 / width**2))
    options = (
        f"strategy: {strategy}, batch_size: 4, precision: {precision}, scheduler: {{name: constant}}, save_top_k: 0, "
        "max_epochs: 99"
    )
    torch.manual_seed(0)
    with Session(parse_config(f"task: own\nrun_dir: {folder}\ntraining: {{{options}}}")) as session:
        model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers)))
        inputs = torch.randn(batch, width, device=session.world.device)
        # The batch stands for the inputs: reading data is not what is measured.
        session.prepare(
            model=model,
            data=[torch.zeros(())] * 512,
            loss=lambda model, batch: Loss(model(inputs).float().square().sum(), len(batch)),
            loss_is_a_sum=False,
        )
        stalls: dict[str, list[float]] = {"sync": [], "async": []}
        slower: dict[str, list[float]] = {"sync": [], "async": []}
        behind: list[float] = []
        session.checkpoints.on_written = lambda written: behind.append(written.seconds)
        batches = session.batches()
        batch_of = iter(batches)
        not_async = session.config.training.model_copy(update={"async_checkpoint": False})

        def seconds_of(action: Callable[[], object], *, settled: bool = True) -> float:
            began = time.perf_counter()
            action()
            if on_gpu and settled:
                torch.cuda.synchronize()
            return time.perf_counter() - began

        for kind in ["async"] * (saves + 1) + ["sync"] * saves:
            if kind == "sync":
                session.config = session.config.model_copy(update={"training": not_async})
            # The first step after a pause is not counted: the next batch is not there yet.
            usual = statistics.median(
                [seconds_of(lambda: session.step(next(batch_of))) for _ in range(STEPS_BETWEEN)][1:]
            )
            saving = seconds_of(session.save, settled=False)
            after = seconds_of(lambda: session.step(next(batch_of)))
            excess = max(0.0, saving + after - usual)
            stalls[kind].append(excess if on_gpu and kind == "async" else saving)
            slower[kind].append(max(0.0, after - usual))
            session.wait()
        if session.world.is_first:
            device = torch.cuda.get_device_name() if session.world.device.type == "cuda" else f"{os.cpu_count()} cores"
            first, *rest = stalls["async"]
            size = sum(file.stat().st_size for file in next(session.checkpoints.store.folder.glob("step-*")).iterdir())
            print(
                f"| {device}, {session.world.size} × {strategy} | {layers * width**2 / 1e6:.3g} M, {size / 1e6:.3g} MB | "
                f"{statistics.median(stalls['sync']):.3f} s | {first:.3f} s | {statistics.median(rest):.3f} s "
                f"({min(rest):.3f}–{max(rest):.3f}) | {statistics.median(rest) / statistics.median(stalls['sync']):.1%} | "
                f"{statistics.median(behind):.2f} s | {statistics.median(slower['async'][1:]):.3f} s |",
                flush=True,
            )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--parameters", type=float, default=25, help="millions")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--strategies", nargs="+", default=["ddp", "fsdp"])
    parser.add_argument("--write", type=Path)
    parser.add_argument("--saves", type=int, default=SAVES, help="of each kind")
    parser.add_argument("--tiny", action="store_true", help="a few saves of a small model, to try the script")
    parser.add_argument("--rank", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.tiny:
        args.parameters, args.saves = 0.01, 2
    if args.rank:
        rank(args.parameters, args.saves, *args.rank)
        return
    rows = []
    for strategy in args.strategies:
        folder = tempfile.mkdtemp(prefix="shardwise-stall-")
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = str(free.getsockname()[1])
        command = [
            sys.executable,
            "-W",
            "ignore",
            __file__,
            "--parameters",
            str(args.parameters),
            "--saves",
            str(args.saves),
            "--rank",
            strategy,
            folder,
        ]
        ranks = [
            subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={
                **os.environ, "RANK": str(number), "LOCAL_RANK": str(number), "WORLD_SIZE": str(args.ranks),
                "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port,
                "OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // args.ranks))})
            for number in range(args.ranks)
        ]  # fmt: skip
        outputs = [each.communicate(timeout=900)[0] for each in ranks]
        shutil.rmtree(folder)
        if any(each.returncode for each in ranks):
            sys.exit(f"{strategy} failed")
        rows.append(outputs[0].strip().splitlines()[-1])
        print(rows[-1], flush=True)
    import torch

    text = "\n".join(
        [
            "# How long training stands still for a checkpoint",
            "",
            f"torch {torch.__version__}, Python {platform.python_version()}, {time.strftime('%Y-%m-%d')}. Made by "
            f"`benchmarks/reliability/stall.py`: AdamW, {args.saves} saves of each kind, medians; rank 0's clock.",
            "",
            "| where | checkpoint | synchronous | first asynchronous | next ones | of that | in place after | next step slower |",
            "|---|---|---|---|---|---|---|---|",
            *rows,
        ]
    )
    if args.write:
        args.write.write_text(text + "\n")


if __name__ == "__main__":
    main()
