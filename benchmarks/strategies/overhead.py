"""What the engine costs over the same loop written by hand, and beside Accelerate and Lightning: two CPU ranks, gloo.

python benchmarks/strategies/overhead.py [--rounds 5] [--write benchmarks/strategies/DATE-overhead.md]
python benchmarks/strategies/overhead.py --tiny          a few steps of a tiny model, to try the script

The same Llama, the same random tokens, AdamW, clipping, one micro-batch of 8 × 128 tokens per rank and step. First every
contender in turn with ours, step by step in the same two processes, which is what a shared machine can compare; then each in
processes of its own, several rounds. Needs: pip install accelerate lightning
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import itertools
import json
import os
import platform
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

VOCABULARY, LENGTH, BATCH, STEPS, SKIPPED = 2000, 128, 8, 24, 4
Times = list[float]
WIDTH, LAYERS = 128, 4
TOOLS = ("accelerate", "lightning")
"""Packages of other tools. A contender whose tool is not installed has a row that says so."""


def shrink() -> None:
    """Everything that makes the script take long, to try it."""
    global VOCABULARY, LENGTH, BATCH, STEPS, SKIPPED, WIDTH, LAYERS
    VOCABULARY, LENGTH, BATCH, STEPS, SKIPPED, WIDTH, LAYERS = 50, 16, 2, 4, 1, 16, 1


def build() -> Any:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY, hidden_size=WIDTH, intermediate_size=3 * WIDTH, num_hidden_layers=LAYERS,
            num_attention_heads=4,
            use_cache=False, tie_word_embeddings=False,
        )
    )  # fmt: skip


def samples(ranks: int) -> list[Any]:
    import torch

    generator = torch.Generator().manual_seed(1)
    return list(torch.randint(0, VOCABULARY, ((STEPS + SKIPPED) * BATCH * ranks, LENGTH), generator=generator))


def next_tokens(model: Any, ids: Any) -> Any:
    from torch.nn import functional as F

    logits = model(input_ids=ids).logits[:, :-1]
    return F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())


# ---------------------------------------------------------------- the contenders: each gives the seconds of its steps


def by_hand(wrap: Callable[[Any], Any], clip: Callable[[Any], Any]) -> Times:
    import torch.distributed as dist

    dist.init_process_group("gloo")
    loader, step = hand_written(wrap, clip)
    return timed(loader, step)


def hand_written(wrap: Callable[[Any], Any], clip: Callable[[Any], Any]) -> tuple[Any, Callable[[Any], None]]:
    import torch
    import torch.distributed as dist
    from torch.utils.data import DataLoader, DistributedSampler

    model = wrap(build())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    data = samples(dist.get_world_size())
    loader = DataLoader(data, BATCH, sampler=DistributedSampler(data))  # type: ignore[arg-type]

    def step(ids: Any) -> None:
        loss = next_tokens(model, ids)
        loss.backward()
        clip(model)
        optimizer.step()
        optimizer.zero_grad()
        loss.item()

    return loader, step


def plain_ddp() -> tuple[Callable[[Any], Any], Callable[[Any], Any]]:
    import torch

    return (
        lambda model: torch.nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True),
        lambda model: torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0),
    )


def plain_fsdp() -> tuple[Callable[[Any], Any], Callable[[Any], Any]]:
    import torch
    from torch.distributed.fsdp import fully_shard

    def wrap(model: Any) -> Any:
        for layer in model.model.layers:
            fully_shard(layer)
        return fully_shard(model)

    return wrap, lambda model: torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).full_tensor()


def shardwise(strategy: str, measure: Callable[[Any, Any], Times] | None = None) -> Times:
    """`measure` is given our batches and our step; alone, they are timed."""
    from shardwise import Loss, Session
    from shardwise.config import parse_config

    options = f"strategy: {strategy}, batch_size: {BATCH}, gradient_clip: 1.0, scheduler: {{name: constant}}"
    text = f"task: own\ntraining: {{{options}}}"
    with Session(parse_config(text)) as session:
        session.prepare(
            model=build(),
            data=samples(session.world.size),
            loss=lambda model, ids: Loss(next_tokens(model, ids) * ids[:, 1:].numel(), ids[:, 1:].numel()),
            count=lambda ids: ids[:, 1:].numel(),
        )
        return (measure or timed)(session.batches(), session.step)


def in_turn(strategy: str, contender: Callable[[], tuple[Any, Callable[[Any], Any]]]) -> Times:
    """Every step of ours is followed, or in turn preceded, by one of theirs in the same process: what ours took in excess."""
    return shardwise(strategy, lambda batches, step: excess(batches, step, *contender()))


def excess(ours: Any, our_step: Any, theirs: Any, their_step: Any) -> Times:
    both = [(iter(ours), our_step), (iter(theirs), their_step)]
    found = []
    for number in range(STEPS + SKIPPED):
        seconds = [0.0, 0.0]
        for which in (0, 1) if number % 2 else (1, 0):
            began = time.perf_counter()
            batches, step = both[which]
            step(next(batches))
            seconds[which] = time.perf_counter() - began
        found.append(seconds[0] / seconds[1] - 1)
    return found[SKIPPED:]


def accelerate() -> tuple[Any, Callable[[Any], None]]:
    import torch
    from accelerate import Accelerator
    from torch.utils.data import DataLoader

    accelerator = Accelerator(cpu=True)
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loader = DataLoader(samples(accelerator.num_processes), BATCH, shuffle=True)  # type: ignore[arg-type]
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

    def step(ids: Any) -> None:
        loss = next_tokens(model, ids)
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        loss.item()

    return loader, step


def lightning(between: Callable[[], float] | None = None) -> Times:
    """Seconds of its steps; with `between`, which it calls after each and which gives ours, what ours took in excess."""
    import logging
    import warnings

    import lightning as L
    import torch
    from torch.utils.data import DataLoader

    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    times: Times = []
    began = time.perf_counter()

    class Module(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = build()

        def training_step(self, ids: Any, index: int) -> Any:
            return next_tokens(self.model, ids)

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=1e-3)

        def on_train_batch_end(self, *args: Any) -> None:
            nonlocal began
            seconds = time.perf_counter() - began
            times.append(between() / seconds - 1 if between else seconds)
            began = time.perf_counter()

    trainer = L.Trainer(
        accelerator="cpu", devices=int(os.environ["WORLD_SIZE"]), strategy="ddp", max_epochs=1, gradient_clip_val=1.0,
        logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(Module(), DataLoader(samples(int(os.environ["WORLD_SIZE"])), BATCH, shuffle=True))  # type: ignore[arg-type]
    return times[SKIPPED:]


def in_turn_with_lightning() -> Times:
    def measure(batches: Any, step: Any) -> Times:
        ours = iter(batches)

        def one() -> float:
            began = time.perf_counter()
            step(next(ours))
            return time.perf_counter() - began

        return lightning(one)

    return shardwise("ddp", measure)


def timed(batches: Any, step: Callable[[Any], Any]) -> Times:
    """From one batch in hand to the next: loading is a part of a step."""
    marks = []
    for batch in batches:
        step(batch)
        marks.append(time.perf_counter())
    return [after - before for before, after in itertools.pairwise(marks)][SKIPPED:]


CONTENDERS: dict[str, Callable[[], Times]] = {
    "DDP by hand": lambda: by_hand(*plain_ddp()),
    "shardwise ddp": lambda: shardwise("ddp"),
    "Accelerate, DDP": lambda: timed(*accelerate()),
    "Lightning, DDP": lightning,
    "fully_shard by hand": lambda: by_hand(*plain_fsdp()),
    "shardwise fsdp": lambda: shardwise("fsdp"),
}
IN_TURN: dict[str, Callable[[], Times]] = {
    "ddp, over DDP by hand": lambda: in_turn("ddp", lambda: hand_written(*plain_ddp())),
    "ddp, over Accelerate": lambda: in_turn("ddp", accelerate),
    "ddp, over Lightning": in_turn_with_lightning,
    "fsdp, over fully_shard by hand": lambda: in_turn("fsdp", lambda: hand_written(*plain_fsdp())),
}


# ---------------------------------------------------------------- all of them


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--write", type=Path)
    parser.add_argument("--tiny", action="store_true", help="a few steps of a tiny model, to try the script")
    parser.add_argument("--one", choices=[*CONTENDERS, *IN_TURN], nargs="+", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.tiny:
        shrink()
    if args.one:
        times = [measured(name, port) for name, port in zip(args.one, os.environ["PORTS"].split(","), strict=True)]
        if os.environ["RANK"] == "0":
            print(json.dumps(times))
        return
    absent = [tool for tool in TOOLS if importlib.util.find_spec(tool) is None]
    contenders, in_turn = (
        [name for name in every if not any(tool in name.lower() for tool in absent)] for every in (CONTENDERS, IN_TURN)
    )
    rounds: dict[str, list[float]] = {name: [] for name in contenders}
    overheads: dict[str, list[float]] = {name: [] for name in in_turn}
    if args.tiny:
        args.rounds = 1
        for name, times in zip([*in_turn, *contenders], launch([*in_turn, *contenders], tiny=True), strict=True):
            if name in overheads:
                overheads[name] += times
            else:
                rounds[name].append(statistics.median(times))
    for _ in range(0 if args.tiny else 2 * args.rounds):
        for name in in_turn:
            overheads[name] += launch([name])[0]
    for name, shares in overheads.items():
        print(f"{name:<30} {statistics.median(shares):+.1%}", flush=True)
    for _ in range(0 if args.tiny else args.rounds):
        for name in contenders:
            rounds[name].append(statistics.median(launch([name])[0]))
            print(f"{name:<22} {rounds[name][-1] * 1e3:.1f} ms", flush=True)
    text = report(rounds, overheads, args.rounds)
    print(text)
    if args.write:
        args.write.write_text(text)


def measured(name: str, port: str) -> Times:
    """In a rank's process."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    os.environ["MASTER_PORT"] = port
    times = (CONTENDERS | IN_TURN)[name]()
    if dist.is_initialized():  # another may follow
        dist.destroy_process_group()
    return times


def launch(names: list[str], *, tiny: bool = False) -> list[Times]:
    """These, one after the other, in two processes of their own."""
    command = [sys.executable, "-W", "ignore", __file__, *(["--tiny"] if tiny else []), "--one", *names]
    common = {
        "MASTER_ADDR": "127.0.0.1",
        "PORTS": ",".join(free_ports(len(names))),
        "WORLD_SIZE": "2",
        "NODE_RANK": "0",
        "OMP_NUM_THREADS": "1",
    }
    ranks = [
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                         env={**os.environ, **common, "RANK": str(rank), "LOCAL_RANK": str(rank)})
        for rank in range(2)
    ]  # fmt: skip
    outputs = [rank.communicate(timeout=300) for rank in ranks]
    if any(rank.returncode for rank in ranks):
        sys.exit(f"{', '.join(names)}: {outputs[0][1][-2000:]}")
    return [list(times) for times in json.loads(outputs[0][0].splitlines()[-1])]


def free_ports(number: int) -> list[str]:
    """One for each group: that of a group that has ended may be held for a while."""
    with ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(number)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [str(probe.getsockname()[1]) for probe in probes]


def report(rounds: dict[str, list[float]], overheads: dict[str, list[float]], number: int) -> str:
    def against(name: str, base: str) -> str:
        """The median over the rounds of what one took in excess of the other in the same round."""
        ratios = [mine / theirs - 1 for mine, theirs in zip(rounds[name], rounds[base], strict=True)]
        return f"{statistics.median(ratios):+.1%} ({min(ratios):+.1%} to {max(ratios):+.1%})"

    found = [name for name in ("torch", *TOOLS) if importlib.util.find_spec(name) is not None]
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in found)
    lines = [
        "# The engine against the same loop by hand, Accelerate and Lightning",
        "",
        f"{os.cpu_count()} cores, two CPU ranks of one thread, gloo; {versions}, Python {platform.python_version()}, "
        f"{time.strftime('%Y-%m-%d')}. Made by `benchmarks/strategies/overhead.py`, {number} rounds of {STEPS} steps each, all "
        "contenders in turn; milliseconds per step, the median of a round's steps, then of the rounds.",
        "",
        "| | ms per step | over the loop by hand |",
        "|---|---|---|",
    ]
    for name in CONTENDERS:
        if name not in rounds:
            lines.append(f"| {name} | not installed | |")
            continue
        base = "fully_shard by hand" if "fsdp" in name or "fully" in name else "DDP by hand"
        excess = "" if name == base else against(name, base)
        lines.append(f"| {name} | {statistics.median(rounds[name]) * 1e3:.1f} | {excess} |")
    lines += [
        "",
        "The machine is shared, and differs more from run to run than contenders do. So a step of ours and one of theirs in "
        "turn, in the same two processes, and what ours took in excess:",
        "",
    ]
    for name in IN_TURN:
        if name not in overheads:
            lines.append(f"- {name}: not installed")
            continue
        shares = overheads[name]
        quarters = statistics.quantiles(shares, n=4)
        lines.append(
            f"- {name}: {quarters[1]:+.1%} (median of {len(shares)} steps; half of them between "
            f"{quarters[0]:+.1%} and {quarters[2]:+.1%})"
        )
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
