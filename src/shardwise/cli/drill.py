"""`shardwise drill CONFIG`."""

from __future__ import annotations

import argparse
import json
import logging
import os
import platform
import random
import shutil
import time
from pathlib import Path
from typing import TYPE_CHECKING

from shardwise.cli.arguments import add_config_arguments, path_text
from shardwise.cli.output import show
from shardwise.config.commands import command, overriding

if TYPE_CHECKING:
    from shardwise.drill.faults import Kind

log = logging.getLogger(__name__)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_config_arguments(parser)
    parser.add_argument("--count", type=int, default=13, metavar="N", help="how many faults (13)")
    parser.add_argument(
        "--faults",
        metavar="KIND,…",
        help="which kinds; default: all that are possible here. `--faults list` shows them",
    )
    parser.add_argument("--seed", type=int, metavar="S", help="when and where they come; default: by chance, and said")
    parser.add_argument("--ranks", type=int, default=2, metavar="N", help="ranks of the runs (2)")
    parser.add_argument("--steps", type=int, default=40, metavar="N", help="steps of a run, at most (40)")
    parser.add_argument(
        "--folder", type=path_text, metavar="FOLDER", help="where the runs are made; default: runs/NAME-drill"
    )
    parser.add_argument("--json", action="store_true", help="print the result as JSON, for machines")
    parser.add_argument("--report", type=path_text, metavar="FILE", help="write the result as Markdown")


def run(args: argparse.Namespace) -> int:
    from shardwise.config import load_config
    from shardwise.config.load import config_values
    from shardwise.drill.faults import Kind, schedule
    from shardwise.errors import ConfigError

    if args.faults == "list":
        for kind in Kind:
            show(f"  {kind.value:<10} {kind.words}")
        return 0
    unknown = sorted(set((args.faults or "").split(",")) - {*Kind, ""})
    if unknown:
        raise ConfigError(f"--faults: {', '.join(unknown)}: there is {', '.join(Kind)}")
    if min(args.count, args.ranks, args.steps) < 1:
        raise ConfigError("--count, --ranks and --steps: at least 1")
    config = load_config(args.config, args.set)
    chosen, left_out = _kinds(args.faults, args.ranks, config.training.device)
    seed = random.SystemRandom().randrange(1_000_000) if args.seed is None else args.seed

    from shardwise.drill.conduct import conduct
    from shardwise.drill.report import as_data, as_table, as_words
    from shardwise.drill.run import DrillSpec

    folder = Path(args.folder or f"{config.run_folder}-drill").resolve()
    if folder.exists():
        shutil.rmtree(_only_a_drill(folder))
    folder.mkdir(parents=True)
    (folder / "drill.json").write_text(json.dumps({"seed": seed, "count": args.count, "config": args.config}) + "\n")
    often = config.training.checkpoint_every_n_steps
    saved_every = often if often and often <= args.steps // 4 else max(2, args.steps // 20)
    overrides = tuple(_overrides(config.training.max_steps, saved_every, args))
    spec = DrillSpec(config_values(config), overrides, args.ranks, folder, HANG_SECONDS)

    for sentence in left_out:
        log.info(sentence)
    log.info(f"{args.count} faults, seed {seed} (the same --seed makes the same ones)")
    result = conduct(spec, schedule(seed, args.count, chosen, args.ranks, saved_every), log.info)
    if args.json:
        show(json.dumps(as_data(result, seed), indent=1))
    else:
        show(f"\n{as_words(result)}")
    if args.report:
        import torch

        again = _same_again(args, seed)
        Path(args.report).write_text(
            f"# A drill\n\n`{again}`, {os.cpu_count()} cores, torch {torch.__version__}, Python {platform.python_version()}, "
            f"{time.strftime('%Y-%m-%d')}.\n\n```\n{as_words(result)}\n```\n\n{as_table(result)}\n\n"
            "Went on after: from the fault until the next step was made. Noticed: until it was decided to start again (of a "
            f"hang, beyond the {HANG_SECONDS:.0f} seconds that it is waited for; of a link, from the moment that it is back). "
            "Processes: until rank 0 ran. Resumed: until the first step was made, with the model prepared and the checkpoint "
            "checked and read.\n"
        )
    return 1 if result.problems else 0


def _same_again(args: argparse.Namespace, seed: int) -> str:
    """The command that makes the same faults in the same runs."""
    options = {"--count": args.count, "--seed": seed, "--ranks": args.ranks, "--steps": args.steps}
    if args.faults:
        options["--faults"] = args.faults
    words = [str(word) for option in options.items() for word in option]
    return command("drill", args.config, *words, *overriding(*args.set))


def _kinds(faults: str | None, ranks: int, device: str) -> tuple[list[Kind], list[str]]:
    """The kinds of faults to come, and what is to be said of those that are left out."""
    from shardwise.drill.faults import Kind
    from shardwise.errors import ConfigError

    named = [Kind(name) for name in (faults or "").split(",") if name]
    kinds, left_out = list[Kind](), list[str]()
    for kind in named or Kind:
        if (reason := _impossible(kind, ranks, device)) is None:
            kinds.append(kind)
        elif named:
            raise ConfigError(f"--faults {kind}: {kind.words}: not possible here: {reason}")
        else:
            left_out.append(f"left out: {kind} ({kind.words}): {reason}")
    return kinds, left_out


def _impossible(kind: Kind, ranks: int, device: str) -> str | None:
    """Why this kind of fault cannot happen here."""
    from shardwise.drill.faults import Kind
    from shardwise.drill.network import why_there_are_none

    if kind is Kind.SKIP and ranks == 1:
        return "one rank has nobody to agree with"
    if not kind.needs_two_machines:
        return None
    if ranks < 2:
        return "one rank cannot be on two machines: --ranks 2"

    import torch

    if device != "cpu" and torch.cuda.is_available():
        return "GPUs of one machine speak with each other past the network: --set training.device=cpu"
    return why_there_are_none()


HANG_SECONDS = 6.0
"""Drills do not wait as long for a sign of life as trainings do."""


def _overrides(max_steps: int | None, saved_every: int, args: argparse.Namespace) -> list[str]:
    """What makes a training into one that can be drilled in minutes."""
    return [
        f"training.num_gpus={args.ranks}",
        f"training.max_steps={min(args.steps, max_steps or args.steps)}",
        f"training.checkpoint_every_n_steps={saved_every}",
        "training.log_every_n_steps=1",
        f"training.hang_timeout={HANG_SECONDS}",
        "training.keep_last=3",
        "training.logger=none",
    ]


def _only_a_drill(folder: Path) -> Path:
    from shardwise.errors import ConfigError

    if not (folder / "drill.json").is_file():
        raise ConfigError(f"--folder {folder} is there already, and no earlier drill made it: name another")
    return folder
