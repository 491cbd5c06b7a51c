"""The shipped configs of the cells task, through the program as a user runs it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from shardwise.tasks.cells.export import load_encoder
from tests.cells_task.files import random_counts, write_cells
from tests.cli.program import SHARDWISE, run_program
from tests.conftest import REPOSITORY

SMALL = [
    "training.max_steps=3",
    "training.num_gpus=2",
    "model.hidden_dim=16",
    "model.num_layers=2",
    "model.num_heads=2",
]


@pytest.mark.parametrize("name", ["cells-tiny", "cells-large"])
def test_the_shipped_configs_train_and_export(tmp_path: Path, name: str) -> None:
    (tmp_path / "data").mkdir()
    write_cells(tmp_path / "data" / "cells.h5ad", random_counts(1200, 30), labels=["T", "B"] * 600)
    small = [
        *SMALL,
        *(["data.num_cells=1200"] if name == "cells-tiny" else ["data.num_workers=1", "training.batch_size=4"]),
    ]
    config = str(REPOSITORY / "configs" / f"{name}.yaml")
    done = run_program([SHARDWISE, "train", config, *(word for key in small for word in ("--set", key))], tmp_path)
    assert done.returncode == 0, done.stderr
    assert "knn agreement" in done.stdout
    run = tmp_path / "runs" / name
    assert (run / "pictures" / "step-00000003-cells.png").is_file()
    assert any("eval" in json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines())
    done = run_program([SHARDWISE, "export", str(run), "--to", "encoder"], tmp_path)
    assert done.returncode == 0, done.stderr
    model, tokenizer, genes = load_encoder(tmp_path / "encoder")
    assert tokenizer.genes == len(genes) and sum(p.numel() for p in model.parameters()) > 1000


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_bad_file_is_one_line_and_leaves_nothing(tmp_path: Path, ranks: int) -> None:
    counts = random_counts(40, 5).astype(np.float32)
    counts[3, 1] = np.nan
    path = write_cells(tmp_path / "bad.h5ad", counts)
    (tmp_path / "cells.yaml").write_text(f"task: cells\ndata: {{source: local, paths: [{path}], streaming: true}}\n")
    done = run_program([SHARDWISE, "train", "cells.yaml", "--set", f"training.num_gpus={ranks}"], tmp_path)
    assert done.returncode == 2, done.stderr
    assert f"{path}: cell 3 has a value that is no number" in done.stderr
    assert "Traceback" not in done.stderr + done.stdout
    assert sorted(file.name for file in tmp_path.iterdir() if file.name != "cache") == ["bad.h5ad", "cells.yaml"]
