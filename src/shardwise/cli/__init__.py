"""The command line: one file per verb. Nothing heavy is imported before the verb is known."""

from __future__ import annotations

import argparse
import importlib
import io
import sys
from collections.abc import Sequence

import shardwise
from shardwise.errors import ShardwiseError

VERBS = {
    "train": "run it: one process, all local devices, or a rank of a bigger job",
    "verify": "prove that N ranks compute what one would",
    "drill": "train with faults at random moments, and prove that nothing is lost",
    "config": "check a config, show it resolved, print its schema",
    "data": "write a sharded copy of cells for full speed, and check one",
    "bench": "measure: whether the data keeps up",
    "checkpoint": "list, check and repair the checkpoints of a run",
    "fetch": "download model and data ahead, for machines without internet",
    "export": "write trained weights as safetensors, in Hugging Face layout where the model has one",
}
LATER = {
    "plan": "what fits, how fast, what it costs",
    "lint": "mistakes of distributed training, found without running",
    "submit": "Slurm, SageMaker, Kubernetes",
    "report": "one HTML file about a run",
    "top": "live view in the terminal",
}


def main(argv: Sequence[str] | None = None) -> int:
    arguments = list(sys.argv[1:] if argv is None else argv)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal without × shows ? instead of a traceback
    if arguments and arguments[0] in LATER:
        print(f"error: shardwise {arguments[0]} ({LATER[arguments[0]]}) is not built yet", file=sys.stderr)
        return 2
    try:
        parsed = _parser(arguments).parse_args(arguments)
        return int(importlib.import_module(f"shardwise.cli.{parsed.verb}").run(parsed))
    except ShardwiseError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader of our output has left, as in `| head`
        sys.stderr.close()
        return 141


def _parser(arguments: Sequence[str]) -> argparse.ArgumentParser:
    later = "\n".join(f"  {name:<10} {text}" for name, text in LATER.items())
    parser = argparse.ArgumentParser(
        prog="shardwise",
        description="Train PyTorch models on one device, many devices or many machines from one YAML file.",
        epilog=f"still to come:\n{later}\n\nThe first thing to try:  shardwise train configs/chess-tiny.yaml",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"shardwise {shardwise.__version__}")
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", required=True)
    for name, text in VERBS.items():
        verb = verbs.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
        if arguments and arguments[0] == name:
            importlib.import_module(f"shardwise.cli.{name}").add_arguments(verb)
    return parser
