"""What each strategy holds and sends per rank, against theory, and how long a step takes; on CPU ranks over gloo.

unshare --net bash -c 'ip link set lo up; python benchmarks/strategies/strategies.py [--write benchmarks/strategies/DATE.md]'
python benchmarks/strategies/strategies.py --tiny        a tiny model on two ranks, to try the script

Bytes sent are read from the loopback device, so it must be the program's own: hence the network namespace. A small Llama
with untied weights; every rank has one thread; 16 games per step in all, in one micro-batch, in a pipeline in two per stage.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import platform
import socket
import statistics
import sys
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from queue import Empty
from typing import Any

import torch.multiprocessing as mp

CONFIG = """
task: chess
data: {source: synthetic, num_games: 400, max_plies: 40}
model: {architecture: llama, hidden_dim: 128, num_layers: 4, num_heads: 4, tie_embeddings: false}
training:
  total_batch_size: 16
  gradient_clip: 1.0
  optimizer: {name: adamw, lr: 1.0e-3}
"""


@dataclass(frozen=True)
class Size:
    keys: list[str]
    """Of the config, set otherwise."""
    ranks: tuple[int, ...]
    steps: int
    in_one_process: bool
    """All ways one after the other, where it does not matter what the one before leaves behind."""


USUAL = Size([], (2, 4), 8, False)
TINY = Size(["data.max_plies=6", "model.hidden_dim=16"], (2,), 2, True)
WAYS = {
    "ddp": ["strategy=ddp"],
    "ddp, fp16 gradients": ["strategy=ddp", "ddp.comm_hook=fp16"],
    "ddp, powersgd rank 2": ["strategy=ddp", "ddp.comm_hook=powersgd", "ddp.powersgd_warmup_steps=2"],
    "zero1": ["strategy=zero1"],
    "fsdp FULL_SHARD": ["fsdp.sharding_strategy=FULL_SHARD"],
    "fsdp SHARD_GRAD_OP": ["fsdp.sharding_strategy=SHARD_GRAD_OP"],
    "fsdp HYBRID_SHARD of 2": ["fsdp.sharding_strategy=HYBRID_SHARD", "fsdp.shard_size=2"],
    "fsdp NO_SHARD": ["fsdp.sharding_strategy=NO_SHARD"],
    "tensor": ["strategy=tensor"],
    "pipeline 1f1b": ["strategy=pipeline"],
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--write", type=Path)
    parser.add_argument("--tiny", action="store_true", help="a tiny model on two ranks, to try the script")
    args = parser.parse_args()
    size = TINY if args.tiny else USUAL
    lines = [
        "# Strategies on CPU ranks: what each holds and sends",
        "",
        f"{os.cpu_count()} cores, gloo over loopback, torch {importlib.metadata.version('torch')}, "
        f"Python {platform.python_version()}, "
        f"{time.strftime('%Y-%m-%d')}. Made by `benchmarks/strategies/strategies.py`. Of the rank that holds most: parameters, "
        "gradients and optimizer state, as a share of the whole model's, and by theory; MB sent per rank and step, averaged over "
        f"{size.steps} steps, and by theory; median seconds per step (16 samples in all, so more ranks have less each).",
    ]
    for ranks in size.ranks:
        lines += ["", f"## {ranks} ranks", ""]
        lines += ["| | parameters | gradients | optimizer | in theory | MB sent | in theory | s per step |"]
        lines += ["|---|---|---|---|---|---|---|---|"]
        ways = [way for way in WAYS if not (way.endswith("of 2") and ranks == 2)]
        for together in [ways] if size.in_one_process else [[way] for way in ways]:
            for way, results in zip(together, measure([WAYS[way] for way in together], ranks, size), strict=True):
                lines.append(row(way, results, ranks))
                print(lines[-1], flush=True)
    text = "\n".join(lines) + "\n"
    if args.write:
        args.write.write_text(text)


def measure(ways: list[list[str]], ranks: int, size: Size) -> list[list[dict[str, Any]]]:
    """These, one after the other, in new processes: what every rank has found, by way."""
    context = mp.get_context("spawn")
    queue = context.Queue()
    ports = free_ports(len(ways))
    processes = [context.Process(target=work, args=(rank, ranks, ports, ways, size, queue)) for rank in range(ranks)]
    for process in processes:
        process.start()
    results: list[list[dict[str, Any]]] = []
    while len(results) < ranks:
        try:
            results.append(queue.get(timeout=1))
        except Empty:
            if any(process.exitcode for process in processes):
                for process in processes:
                    process.kill()
                sys.exit("a rank failed")
    for process in processes:
        process.join()
    return [list(found) for found in zip(*results, strict=True)]


def free_ports(number: int) -> list[str]:
    """One for each group: that of a group that has ended may be held for a while."""
    with ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(number)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [str(probe.getsockname()[1]) for probe in probes]


def work(rank: int, world: int, ports: list[str], ways: list[list[str]], size: Size, queue: Any) -> None:
    import torch

    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), MASTER_ADDR="127.0.0.1")
    torch.set_num_threads(1)
    found = []
    for port, overrides in zip(ports, ways, strict=True):
        os.environ["MASTER_PORT"] = port
        found.append(measured(overrides, world, size))
    queue.put(found)


def measured(overrides: list[str], world: int, size: Size) -> dict[str, Any]:
    """By one rank."""
    import psutil

    from shardwise import Session
    from shardwise.checkpoint.state import local_part
    from shardwise.config import parse_config
    from shardwise.parallel import strategy_for
    from shardwise.parallel.compression import gradient_bytes

    keys = [*size.keys, *(f"training.{each}" for each in overrides)]
    copies = strategy_for(parse_config(CONFIG, keys), world).copies(world)
    micro_batches = 2 * world if "strategy=pipeline" in overrides else 1
    config = parse_config(CONFIG, [*keys, f"training.batch_size={16 // (copies * micro_batches)}"])
    with Session(config) as session:
        session.prepare()
        gradients: list[int] = []
        # When the update begins, gradients are as they stay between steps: the rank's own.
        session.parts.optimizer.register_step_pre_hook(
            lambda *_: gradients.append(sum(_held(p.grad) for p in session.parts.parameters if p.grad is not None))
        )
        times = []
        for batch in session.batches():
            if session.steps_done == 3:
                session.world.sum(0.0)
                sent = psutil.net_io_counters(pernic=True)["lo"].bytes_sent
            began = time.perf_counter()
            session.step(batch)
            times.append(time.perf_counter() - began)
            if session.steps_done == 3 + size.steps:
                break
        session.world.sum(0.0)
        sent = psutil.net_io_counters(pernic=True)["lo"].bytes_sent - sent
        state = local_part(session.parts.optimizer).state
        whole = sum(parameter.numel() * 4 for parameter in session.parts.strategy.whole.parameters())
        from torch.distributed.fsdp import FSDPModule

        for module in session.model.modules():  # the outermost unit stays gathered after the backward pass of a step
            if isinstance(module, FSDPModule):
                module.reshard()
        return {
            "parameters": sum(_held(parameter) for parameter in session.parts.parameters) / whole,
            "gradients": gradients[-1] / whole,
            "optimizer": sum(_held(t) for each in state.values() for t in each.values() if t.ndim) / (2 * whole),
            "sent": sent / size.steps / world / 1e6,
            "whole": whole / 1e6,
            "compressed": gradient_bytes(session.parts.strategy.whole, config.training.ddp)[1] / 1e6,
            "outside": 1
            - sum(p.numel() * 4 for b in session.task.blocks(session.parts.strategy.whole) for p in b.parameters())
            / whole,
            "seconds": statistics.median(times[3:]),
        }


def _held(tensor: Any) -> int:
    from torch.distributed.tensor import DTensor

    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return int(local.numel() * local.element_size())


def row(way: str, results: list[dict[str, Any]], ranks: int) -> str:
    most = {key: max(result[key] for result in results) for key in results[0]}
    held, sent = theory(way, ranks, most["whole"], most["outside"], most["compressed"])
    return (
        f"| {way} | {most['parameters']:.1%} | {most['gradients']:.1%} | {most['optimizer']:.1%} | {held} | {most['sent']:.2f} | "
        f"{sent} | {most['seconds']:.3f} |"
    )


def theory(way: str, n: int, whole: float, outside: float, compressed: float) -> tuple[str, str]:
    """What is held of parameters, gradients and optimizer state; MB that a rank sends per step, on a ring.

    Blocks are gathered twice under FULL_SHARD, what is `outside` them once. gloo's reduce-scatter sends what an all-reduce
    does, twice as much as NCCL's.
    """
    ring = (n - 1) / n * whole  # one all-gather of the whole model
    if way == "ddp" or way.endswith("NO_SHARD"):
        return "100, 100, 100%", f"{2 * ring:.2f}"
    if way == "ddp, fp16 gradients":
        return "100, 100, 100%", f"{ring:.2f}"
    if way.startswith("ddp, powersgd"):
        return "100, 100, 100%", f"{2 * (n - 1) / n * compressed:.2f}"
    if way == "zero1":
        return f"100, 100, {1 / n:.0%}", f"{3 * ring:.2f}"
    if way == "fsdp FULL_SHARD":
        return ", ".join([f"{1 / n:.0%}"] * 3), f"{(4 - outside) * ring:.2f}"
    if way == "fsdp SHARD_GRAD_OP":
        return ", ".join([f"{1 / n:.0%}"] * 3), f"{3 * ring:.2f}"
    if way.startswith("fsdp HYBRID"):
        across = 2 * (n // 2 - 1) / (n // 2) * whole / 2
        return "50%, 50%, 50%", f"{(4 - outside) * whole / 2 + across:.2f}"
    return "by blocks", "activations"


if __name__ == "__main__":
    main()
