"""In memory or streaming, on any number of ranks and workers: the same cells, the held-out ones never."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardwise.config import Batching
from shardwise.data import Cursor, Reader, StepLoader, shares
from shardwise.tasks.cells.config import CellsTokenizer
from shardwise.tasks.cells.rows import SparseRows, gather
from shardwise.tasks.cells.samples import LINE, Split, StreamedCells
from shardwise.tasks.cells.task import CellsTask
from shardwise.tasks.cells.tokens import CellTokenizer
from tests.cells_task.files import random_counts, write_cells
from tests.cells_task.test_h5ad import config_for

CPU = torch.device("cpu")
CELLS = 5000


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two files in which the first gene's count, with the second's, tells every cell from every other."""
    counts = random_counts(CELLS, 12)
    counts[:, 0], counts[:, 1] = 1 + np.arange(CELLS) // 100, 1 + np.arange(CELLS) % 100
    folder = tmp_path_factory.mktemp("cells")
    return [
        write_cells(folder / "a.h5ad", counts[:3000], labels=["x"] * 3000),
        write_cells(folder / "b.h5ad", counts[3000:], labels=["y"] * 2000),
    ]


def task_for(files: list[Path], **data: Any) -> CellsTask:
    return CellsTask(config_for(*files, overrides=["tokenizer.strategy=continuous_projection"], **data))


def streaming(files: list[Path], **data: Any) -> CellsTask:
    sizes = {"streaming_chunk_size": 200, "streaming_shuffle_buffer": 1200, **data}
    return task_for(files, streaming="true", **sizes)


def batches(
    task: CellsTask, *, world: int = 1, workers: int = 0, start: Cursor | None = None, epochs: int = 1
) -> list[list[dict[str, Any]]]:
    """For every step, what each rank got."""
    data: Any = task.train_data()
    options = task.config.data.model_copy(update={"num_workers": workers})
    reader = Reader(data, task.collate, task.count, task.config.seed)
    order = data.order(task.config.seed)
    ranks = [
        StepLoader(reader, order, Batching(world, 64 // world, 1), rank, CPU, options, start=start, epochs=epochs)
        for rank in range(world)
    ]
    return [[step.micro[0].inputs for step in steps] for steps in zip(*ranks, strict=True)]


def cells_in(step: list[dict[str, Any]]) -> list[int]:
    return sorted(cell for inputs in step for cell in inputs["cells"].tolist())


@given(st.integers(2, 3000), st.floats(0.001, 0.9), st.integers(1, 500), st.integers(0, 100))
def test_training_rows_and_held_out_rows_are_all_rows_once(rows: int, share: float, most: int, seed: int) -> None:
    split = Split.of(rows, share, most, seed)
    training = split.training_rows(np.arange(split.kept))
    assert 1 <= len(split.held_out) <= most and split.kept >= 1
    assert sorted([*training.tolist(), *split.held_out.tolist()]) == list(range(rows))


def test_the_cells_held_out_are_spread_over_the_files_and_follow_from_the_seed() -> None:
    split = Split.of(10_000, 0.05, 10_000, seed=0)
    assert (split.held_out // 20 == np.arange(500)).all(), "one from every twenty"
    assert (Split.of(10_000, 0.05, 10_000, seed=0).held_out == split.held_out).all()
    assert (Split.of(10_000, 0.05, 10_000, seed=1).held_out != split.held_out).any()


@pytest.mark.parametrize("stream", [False, True])
def test_no_held_out_cell_is_ever_trained_on(files: list[Path], stream: bool) -> None:
    task = streaming(files) if stream else task_for(files)
    trained = [cell for step in batches(task, epochs=2) for cell in cells_in(step)]
    held_out = [cell for batch in [task.valid_data().read(np.arange(250), 0)] for cell in batch["cells"].tolist()]
    assert not set(trained) & set(held_out)
    assert Counter(trained) == Counter({cell: 2 for cell in range(CELLS) if cell not in set(held_out)})


def test_streaming_hands_out_what_is_in_the_file(files: list[Path]) -> None:
    """And so does memory: a cell's tokens and masks are the same in both."""
    streamed = {cell: row for step in batches(streaming(files)) for cell, row in by_cell(step[0]).items()}
    in_memory = {cell: row for step in batches(task_for(files)) for cell, row in by_cell(step[0]).items()}
    assert streamed == in_memory and len(streamed) == 4750


def by_cell(inputs: dict[str, Any]) -> dict[int, Any]:
    rows: dict[int, Any] = {}
    for row, cell in enumerate(inputs["cells"].tolist()):
        length = int((inputs["genes"][row] > 0).sum())
        rows[cell] = tuple(tuple(inputs[name][row, :length].tolist()) for name in ("genes", "values", "targets"))
    return rows


@pytest.mark.parametrize(("world", "workers"), [(1, 2), (2, 0), (2, 3), (4, 1)])
def test_any_number_of_ranks_and_workers_gives_the_same_global_batches(
    files: list[Path], world: int, workers: int
) -> None:
    alone = batches(streaming(files), epochs=2)
    together = batches(streaming(files), world=world, workers=workers, epochs=2)
    assert len(alone) == len(together) == 2 * 75
    for one, many in zip(alone, together, strict=True):
        assert by_cell(one[0]) == {cell: row for inputs in many for cell, row in by_cell(inputs).items()}


@pytest.mark.parametrize("consumed", [0, 64, 1216, 3008, 4736])
def test_a_resumed_stream_goes_on_where_it_was(files: list[Path], consumed: int) -> None:
    whole = batches(streaming(files), epochs=2)
    rest = batches(streaming(files), world=2, epochs=2, start=Cursor(0, consumed))
    assert [cells_in(step) for step in rest] == [cells_in(step) for step in whole[consumed // 64 :]]


class Counting:
    """A source that remembers which rows were read, and how many rows it handed out."""

    origin = "counted"

    def __init__(self, source: Any) -> None:
        self.source = source
        self.read_rows: list[tuple[int, int]] = []

    def __len__(self) -> int:
        return len(self.source)

    def read(self, first: int, last: int) -> SparseRows:
        self.read_rows.append((first, last))
        return self.source.read(first, last)

    def numbers(self, rows: Any) -> Any:
        return self.source.numbers(rows)

    def labels(self) -> None:
        return None

    @property
    def rows(self) -> int:
        return sum(last - first for first, last in self.read_rows)


class Constant:
    """A million cells with one gene each, in no file."""

    origin = "constant"

    def __len__(self) -> int:
        return 1_000_000

    def read(self, first: int, last: int) -> SparseRows:
        return SparseRows(
            np.arange(last - first + 1), np.zeros(last - first, np.int32), np.ones(last - first, np.float32)
        )

    def numbers(self, rows: Any) -> Any:
        return rows


def stream_of(source: Any, chunk: int = 2048, buffer: int = 65_536) -> StreamedCells:
    split = Split.of(len(source), 0.05, 1000, seed=0)
    tokenizer = task_tokenizer()
    return StreamedCells(source, split, tokenizer, chunk=chunk, buffer=buffer, seed=0)


def task_tokenizer() -> Any:
    return CellTokenizer(CellsTokenizer(), 1, 1, None, 0)


def test_memory_is_bounded_by_the_shuffle_buffer_however_long_the_file() -> None:
    cells = stream_of(Constant())
    order = cells.order(0)
    most = 0
    for batch in order.batches(Cursor(), 256, 1):
        cells.rows(batch.indices, 0)
        most = max(most, len(cells._lines._numbers) * LINE)
    # A window of the buffer, the start of the next, and what is around the edges of its chunks.
    assert 65_536 <= most <= 2.1 * 65_536
    assert len(cells) > 10 * most


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 4])
def test_each_rank_reads_about_its_share_of_the_file(world: int) -> None:
    sources = [Counting(Constant()) for _ in range(world)]
    ranks = [stream_of(source) for source in sources]
    batching = Batching(world, 256 // world, 1)

    for batch in ranks[0].order(0).batches(Cursor(), 256, 1):
        for rank, cells in enumerate(ranks):
            cells.rows(shares(batch.indices, batching, rank)[0], 0)
    assert [source.rows * world / len(source) for source in sources] == pytest.approx([1.0] * world, abs=0.1)


def test_resuming_reads_one_window_and_nothing_before_it() -> None:
    source = Counting(Constant())
    cells = stream_of(source)
    batch = next(iter(cells.order(0).batches(Cursor(0, 700_000 // 256 * 256), 256, 1)))
    cells.rows(batch.indices, 0)
    assert source.rows <= 2 * 65_536 + 64 * 2 * LINE


def test_held_out_cells_are_gathered_without_reading_the_file_in_one_piece() -> None:
    source = Counting(Constant())
    rows = np.arange(0, 200_000, 20)
    found = gather(source, rows)
    assert len(found) == len(rows)
    assert max(last - first for first, last in source.read_rows) <= 8192
    scattered = Counting(Constant())
    gather(scattered, np.arange(0, 1_000_000, 1000))
    assert scattered.rows == 1000, "far apart, each is read alone"


@pytest.mark.parametrize("genes", [np.int32, np.uint16, np.int64])
@pytest.mark.parametrize("longest", [2**31 - 1, 0])
def test_rows_are_taken_in_any_order_whatever_their_types_and_however_long_the_arrays(
    monkeypatch: pytest.MonkeyPatch, longest: int, genes: type
) -> None:
    """Arrays too long for 32-bit places, which `longest: 0` stands for, are read in another way."""
    monkeypatch.setattr("shardwise.tasks.cells.rows.LARGEST_INT32", longest)
    lengths = [3, 0, 2, 1]
    rows = SparseRows(
        np.cumsum([0, *lengths]), np.array([5, 7, 9, 1, 2, 65535], genes), np.arange(6, dtype=np.float32) / 4
    )
    found = rows.take(np.array([3, 0, 1, 0]))
    assert found.starts.tolist() == [0, 1, 4, 4, 7]
    assert found.genes.tolist() == [65535, 5, 7, 9, 5, 7, 9]
    assert found.values.tolist() == [1.25, 0, 0.25, 0.5, 0, 0.25, 0.5]
    assert len(rows.take(np.empty(0, np.int64))) == 0
