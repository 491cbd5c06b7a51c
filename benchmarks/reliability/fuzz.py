"""What shardwise answers when its metadata are wrong: manifests, indexes, headers, configs, run.json.

python benchmarks/reliability/fuzz.py [--number 10000] [--seed 0] [--write benchmarks/reliability/DATE-fuzz.md]
python benchmarks/reliability/fuzz.py --kind index --seed 42 --number 1 --say       one of them again, and what was said
python benchmarks/reliability/fuzz.py --tiny                                        some of each kind, to try the script

Each mutation follows from its kind and its seed (mutations.py). It is answered in a warm process of its own, which is ended when
it hangs and cannot take more than 500 MB above what it starts with. Right is one clear error, or a right result: fuzz_cases.py
says what that is. Of manifests, most have a right checksum all the same, and a changed index or header is listed in the manifest
as it is now: nothing behind the checksum would be reached otherwise.
"""

from __future__ import annotations

import argparse
import os
import platform
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.reliability.fuzz_runner import MEMORY, SECONDS, Result, WarmProcess, cases

KINDS = {
    "manifest": "`manifest.json`",
    "index": "`tensors.json`",
    "header": "a header of safetensors",
    "place": "a link, a pipe, a device, nothing … in the place of a checkpoint's file",
    "config": "a config",
    "run": "`run.json`, now and then another file of the run's folder",
}
TINY = 60
PATIENCE = 30.0
"""Seconds by the clock, beside whatever else runs."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--number", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0, help="of the first mutation of each kind")
    parser.add_argument("--kind", nargs="+", choices=list(KINDS), default=list(KINDS))
    parser.add_argument("--say", action="store_true", help="what was done to each file, and what was answered")
    parser.add_argument("--write", type=Path)
    parser.add_argument("--tiny", action="store_true", help="some of each kind, to try the script")
    args = parser.parse_args()
    number = TINY if args.tiny else args.number
    by_kind: dict[str, list[Result]] = defaultdict(list)
    with tempfile.TemporaryDirectory(prefix="shardwise-fuzz-") as folder:
        for result in WarmProcess(Path(folder), PATIENCE).results(cases(args.kind, args.seed, number)):
            by_kind[result.kind].append(result)
            if args.say or not result.is_right:
                print(f"{result.kind} {result.seed}: {result.done}: {result.what}\n{result.said}", flush=True)
    text = page(by_kind, args.seed, number)
    print(text)
    if args.write:
        args.write.write_text(text)
    return 0 if all(result.is_right for results in by_kind.values() for result in results) else 1


def page(by_kind: dict[str, list[Result]], seed: int, number: int) -> str:
    import torch

    rows = [
        f"| {KINDS[kind]} | {len(results)} | {sum(each.what == 'refused' for each in results)} | "
        f"{sum(each.what == 'right' for each in results)} | {sum(not each.is_right for each in results)} | "
        f"{max(each.processor for each in results):.2f} s | {max(each.seconds for each in results):.2f} s | "
        f"{max(each.memory for each in results) / 1e6:.0f} MB |"
        for kind, results in by_kind.items()
    ]
    return "\n".join(
        [
            "# What is answered when metadata are wrong",
            "",
            f"torch {torch.__version__}, Python {platform.python_version()}, {os.cpu_count()} CPU cores, "
            f"{time.strftime('%Y-%m-%d')}. Made by `benchmarks/reliability/fuzz.py`: {number} mutations, of each kind from seed "
            f"{seed} on. Wrong is whatever is neither one clear error nor a right result, or takes more than {SECONDS:g} s or "
            f"{MEMORY // 10**6} MB. An answer's time is that of the clock, without what other work on the machine took.",
            "",
            "| what was made wrong | mutations | one error | a right result | wrong | most processor time | longest answer | "
            "most memory so far |",
            "|---|---|---|---|---|---|---|---|",
            *rows,
            "",
        ]
    )


if __name__ == "__main__":
    sys.exit(main())
