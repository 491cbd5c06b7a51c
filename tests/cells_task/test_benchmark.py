"""The benchmark of cells hands over what it says, and has a row for a peer that is not there."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import pytest

from benchmarks.data import cells


@pytest.mark.parametrize("contender", [cells.shardwise_rows, cells.shardwise_tokens])
def test_every_cell_to_train_on_is_handed_over_once(tmp_path: Path, contender: object) -> None:
    file = cells.make_file(tmp_path, 300, None)
    for path in (file, cells.make_copy(file)):
        numbers = np.concatenate(list(contender(path, 0)))  # type: ignore[operator]
        assert len(numbers) == len(set(numbers.tolist())) == 285


def test_a_copy_of_an_older_version_is_made_anew(tmp_path: Path) -> None:
    copy = cells.make_copy(cells.make_file(tmp_path, 300, None))
    (copy / "manifest.json").write_text("{}")
    assert (cells.make_copy(copy.with_suffix(".h5ad")) / "train-00000.arrow").is_file()


def test_a_peer_that_is_not_installed_is_a_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    row = cells._row("scDataset, block 16, fetch 16", tmp_path, 1, tiny=True, alone=False)
    assert row == "not installed: scdataset | | |"
