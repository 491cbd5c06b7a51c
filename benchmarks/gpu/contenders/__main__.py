"""shardwise beside other tools on one GPU: the same weights, samples, precision, optimizer, clipping and batch.

python -m benchmarks.gpu.contenders --works llama-1b,cells --out found.md --minutes 9
python -m benchmarks.gpu.contenders --tiny                one contender of each tool for each work, to try it on a CPU
python -m benchmarks.gpu.contenders --tiny --works vit    every contender of this work, for seconds each
"""

from __future__ import annotations

import argparse
import importlib
import shlex
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import torch

from benchmarks.gpu.contenders.problem import DEVICE, Contender, Options, Row, Work
from benchmarks.gpu.contenders.table import Report, line, record, table
from benchmarks.gpu.contenders.turns import take_turn
from shardwise.watch.rates import device_name

WORKS = {
    "llama-1b": "llama:llama_1b",
    "llama-7b": "llama:llama_7b",
    "llama-8b": "llama:llama_8b",
    "chess": "games:chess",
    "segresnet": "volumes:segresnet",
    "swin": "volumes:swin",
    "cells": "cells:cells",
    "vit": "pictures:vit",
    "curves": "curves:curves",
}
"""Each with the function that makes it; imported when its turn comes, because each needs packages of its own."""


def main() -> None:
    arguments = _arguments()
    first_only = arguments.tiny and arguments.works is None and not arguments.only
    chosen = arguments.works.split(",") if arguments.works else list(_of_each_file() if first_only else WORKS)
    if unknown := [name for name in chosen if name not in WORKS]:
        sys.exit(f"--works: there is no {', '.join(unknown)}; there is {', '.join(WORKS)}")
    plan = {name: value for name in ("warmup", "windows", "steps") if (value := getattr(arguments, name)) is not None}
    plan |= {"profile": True} if arguments.profile else {}
    options = Options(arguments.tiny, arguments.batch_7b, arguments.batch_8b, tuple(arguments.set), plan)
    ends = time.monotonic() + 60 * arguments.minutes
    report = Report(arguments.out, _command())
    warnings.filterwarnings("ignore")
    if arguments.tiny:
        torch.set_num_threads(1)  # a tiny model has no work for more
    print(f"{device_name(DEVICE)}: {', '.join(chosen)}", flush=True)
    for name in chosen:
        _compare(name, options, arguments.only, arguments.without, ends, report, first_only=first_only)
    print(f"\n{report.text()}")


def _compare(
    name: str,
    options: Options,
    only: list[str],
    without: list[str],
    ends: float,
    report: Report,
    *,
    first_only: bool,
) -> None:
    """`first_only`: of each tool, its first contender."""
    try:
        work = _work(name, options)
    except Exception as error:
        print(f"{name}: cannot be made: {type(error).__name__}: {error}", flush=True)
        report.add(name, [f"## {name}", "", f"failed: {type(error).__name__}: {error}"], {"failed": str(error)})
        return
    rows: list[Row] = []
    for contender in _first_of_each_tool(work.contenders) if first_only else work.contenders:
        if (only and not _named(contender.name, only)) or _named(contender.name, without):
            continue
        if time.monotonic() > ends:
            print(f"{name}: {contender.name}: left out, the time is up", flush=True)
            continue
        began = time.monotonic()
        rows.append(take_turn(contender))
        print(f"{name}: {line(rows[-1])} {time.monotonic() - began:.0f} s in all", flush=True)
        report.add(name, [*table(name, work, rows), *work.study(rows, report.out)], record(work, rows))


def _of_each_file() -> list[str]:
    """The first work of each: works of one file differ in their sizes."""
    return list({where.partition(":")[0]: name for name, where in reversed(WORKS.items())}.values())[::-1]


def _first_of_each_tool(contenders: list[Contender]) -> list[Contender]:
    return list({each.name.partition(",")[0]: each for each in reversed(contenders)}.values())[::-1]


def _named(name: str, parts: list[str]) -> bool:
    return any(part.lower() in name.lower() for part in parts)


def _work(name: str, options: Options) -> Work:
    module, _, function = WORKS[name].partition(":")
    make: Callable[[Options], Work] = getattr(importlib.import_module(f"benchmarks.gpu.contenders.{module}"), function)
    return make(options)


def _command() -> str:
    """As it was given, but where its results went."""
    kept, words = [], iter(sys.argv[1:])
    for word in words:
        if word == "--out":
            next(words)
        elif not word.startswith("--out="):
            kept.append(word)
    return f"python -m benchmarks.gpu.contenders {shlex.join(kept)}".strip()


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu.contenders",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--works", help=f"which, with commas between; default: all: {', '.join(WORKS)}")
    parser.add_argument("--only", action="append", default=[], help="contenders whose name has this in it; repeatable")
    parser.add_argument(
        "--without", action="append", default=[], help="contenders with this in their name are left out"
    )
    parser.add_argument("--out", type=Path, help="a markdown file, with a JSON of the same name beside it")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="after these, no contender is begun")
    parser.add_argument("--tiny", action="store_true", help="small models and few steps, to try the script")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="in every config of shardwise")
    parser.add_argument("--batch-7b", type=int, default=Options.batch_7b, help="the larger batch of llama-7b")
    parser.add_argument("--batch-8b", type=int, default=Options.batch_8b, help="the batch of llama-8b")
    parser.add_argument("--profile", action="store_true", help="list the kernels of one more window")
    parser.add_argument("--warmup", type=int, help="steps before the timed ones")
    parser.add_argument("--windows", type=int, help="windows of timed steps")
    parser.add_argument("--steps", type=int, help="steps of a window")
    return parser.parse_args()


if __name__ == "__main__":
    main()
