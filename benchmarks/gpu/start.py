"""How long it takes from `shardwise train` to the first step of a 1.26B Llama, with an empty compile cache and with a full one.

python -m benchmarks.gpu.start --out found.md
python -m benchmarks.gpu.start --tiny            a small model that is not compiled, to try the script on a CPU
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import yaml

from benchmarks.gpu.contenders.llama import LLAMA_1B, TINY, Tokens, shardwise_blocks
from shardwise.tasks.chess.task import ChessTask

SAID = {"samples on": "ready", "compiled": "blocks compiled", "step 1/": "first step"}
"""What the program prints, in this order, and what is over then."""


class Texts(Tokens):
    """The weights are made where a run makes them: on the host, the same for every device."""

    build_model = ChessTask.build_model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--warm", type=int, default=2, help="starts with a full cache")
    arguments = parser.parse_args()
    if arguments.tiny:
        arguments.warm = 1
        del SAID["compiled"]
    head = f"| seconds from the start of the program | {' | '.join(SAID.values())} | until ready |"
    lines = [head, "|---|" + "---|" * (len(SAID) + 1)]
    with tempfile.TemporaryDirectory() as folder:
        config = _config(Path(folder), arguments.tiny)
        for number in range(1 + arguments.warm):
            found = _start(config, Path(folder))
            name = f"full cache, {number}" if number else "empty cache"
            spent = json.loads((Path(folder) / "run" / "run.json").read_text())["start"]
            cells = [name, *(f"{found[what]:.1f}" for what in SAID.values())]
            cells.append(", ".join(f"{what} {seconds:.1f}" for what, seconds in spent.items()))
            lines.append(f"| {' | '.join(cells)} |")
            print(lines[-1], flush=True)
    print("\n".join(lines))
    if arguments.out is not None:
        arguments.out.write_text("\n".join(lines) + "\n")


def _config(folder: Path, tiny: bool) -> Path:
    shape, batch = (TINY, 2) if tiny else (LLAMA_1B, 16)
    blocks = shardwise_blocks(shape, 4 * batch)
    training = {
        "strategy": "single",
        "precision": "bf16-mixed",
        "batch_size": batch,
        "max_steps": 4,
        "gradient_clip": 1.0,
        "compile": not tiny,  # which takes a CPU most of a minute
    }
    file = folder / "start.yaml"
    file.write_text(
        yaml.safe_dump(
            {**blocks, "task": "benchmarks.gpu.start:Texts", "run_dir": str(folder / "run"), "training": training}
        )
    )
    return file


def _start(config: Path, folder: Path) -> dict[str, float]:
    """Ended after its first step: what follows is not asked for here."""
    caches = {"TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"), "TRITON_CACHE_DIR": str(folder / "triton")}
    began = time.monotonic()
    found: dict[str, float] = {}
    with subprocess.Popen(
        [sys.executable, "-u", "-m", "shardwise", "train", str(config), "--fresh"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, **caches, "SHARDWISE_CACHE": str(folder / "shardwise")},
    ) as program:
        assert program.stdout is not None
        said = []
        for line in program.stdout:
            said.append(line)
            for part, what in SAID.items():
                if part in line:
                    found.setdefault(what, time.monotonic() - began)
            if "first step" in found:
                break
        program.kill()
    if missing := [what for what in SAID.values() if what not in found]:
        sys.exit(f"not seen: {', '.join(missing)}. It said:\n{''.join(said)}")
    return found


if __name__ == "__main__":
    main()
