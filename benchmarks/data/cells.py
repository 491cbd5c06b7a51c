"""Cells per second from one h5ad file, side by side: AnnLoader, scDataset, shardwise, and shardwise's sharded copy.

python benchmarks/data/cells.py [--cells 100000] [--folder /tmp/cells] [--write benchmarks/data/DATE.md]
python benchmarks/data/cells.py --tiny         a few cells, to try the script: its figures mean nothing

Batches of 64 cells, shuffled, two workers, the file in the page cache. Every contender hands over sparse rows; shardwise
also makes tokens and masks of them, ready to train on. Needs: pip install 'shardwise[cells]' scDataset==0.3.0 psutil. A
contender that is not installed has a row that says so.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

BATCH, WORKERS, GENES, DENSITY = 64, 2, 2000, 0.05
CHUNK, BUFFER = 1024, 32_768


# ---------------------------------------------------------------- the contenders: each yields the row numbers of a batch


def annloader(path: Path) -> Iterator[Any]:
    """Random access, 64 rows at a time. Without workers: with them it takes one row at a time, which is slower."""
    import anndata
    from anndata.experimental import AnnLoader

    data = anndata.read_h5ad(path, backed="r")
    for batch in AnnLoader(data, batch_size=BATCH, shuffle=True, use_cuda=False):
        yield _marks(batch.X)


def scdataset(path: Path, block: int, fetch: int) -> Iterator[Any]:
    import anndata
    from scdataset import BlockShuffling, scDataset
    from torch.utils.data import DataLoader

    # Sparse rows straight from the matrix: less work than its documented callback, which makes them dense.
    data = scDataset(
        anndata.read_h5ad(path, backed="r"),
        BlockShuffling(block_size=block),
        batch_size=BATCH,
        fetch_factor=fetch,
        fetch_callback=lambda adata, rows: adata.X[rows],
    )
    for batch in DataLoader(data, batch_size=None, num_workers=WORKERS, prefetch_factor=fetch + 1):
        yield _marks(batch)


def shardwise_rows(path: Path, workers: int = WORKERS) -> Iterator[Any]:
    """What the streaming loader reads, before tokens are made of it."""
    import torch

    from shardwise.tasks.cells.rows import SparseRows, stack
    from shardwise.tasks.cells.samples import StreamedCells

    class RowsOnly(StreamedCells):
        def read(self, ids: Any, epoch: int) -> Any:
            rows = self.rows(ids, epoch)
            return {
                "starts": torch.from_numpy(rows.starts),
                "genes": torch.from_numpy(rows.genes),
                "values": torch.from_numpy(rows.values),
            }

        def take_apart(self, batch: Any, sizes: list[int]) -> list[Any]:
            rows = SparseRows(*(batch[name].numpy() for name in ("starts", "genes", "values")))
            edges = np.cumsum([0, *sizes])
            parts = []
            for a, b in itertools.pairwise(edges.tolist()):
                first, last = int(rows.starts[a]), int(rows.starts[b])
                parts.append(
                    SparseRows(rows.starts[a : b + 1] - first, rows.genes[first:last], rows.values[first:last])
                )
            return parts

        def join(self, parts: list[Any]) -> Any:
            return stack(parts)

        def finish(self, batch: Any) -> Any:
            return batch  # rows, of which no tokens are made

    for inputs in _shardwise(path, RowsOnly, lambda batch: 1, workers):
        yield _row_numbers(inputs.values, inputs.starts[:-1])


def shardwise_tokens(path: Path, workers: int = WORKERS) -> Iterator[Any]:
    """What a training gets: tokens of the ranked genes, 15% of them hidden."""
    from shardwise.tasks.cells.samples import StreamedCells

    for inputs in _shardwise(path, StreamedCells, None, workers):
        yield inputs["cells"].numpy()


def _shardwise(path: Path, kind: Any, count: Callable[[Any], int] | None, workers: int) -> Iterator[Any]:
    import torch

    from shardwise.config import Batching, parse_config
    from shardwise.data import Reader, StepLoader
    from shardwise.tasks.cells.task import CellsTask

    source = "shards" if path.is_dir() else "local"
    config = parse_config(
        f"task: cells\ndata: {{source: {source}, paths: [{path}], streaming: true, num_workers: {workers}, "
        f"streaming_chunk_size: {CHUNK}, streaming_shuffle_buffer: {BUFFER}}}"
    )
    task = CellsTask(config)
    streamed: Any = task.train_data()
    data = kind(streamed.source, streamed.split, streamed.tokenizer, chunk=CHUNK, buffer=BUFFER, seed=0)
    reader = Reader(data, task.collate, count or task.count, 0)
    loader = StepLoader(reader, data.order(0), Batching(1, BATCH, 1), 0, torch.device("cpu"), config.data)
    for step in loader:
        yield step.micro[0].inputs


def _marks(rows: Any) -> Any:
    if hasattr(rows, "to_dense"):
        dense = rows.to_dense().numpy()
        return _row_numbers(dense.ravel(), np.arange(len(dense)) * dense.shape[1])
    rows = rows.tocsr()
    return _row_numbers(rows.data, rows.indptr[:-1])


def _row_numbers(values: Any, starts: Any) -> Any:
    """The first two values of a cell tell which row it is."""
    return (values[starts].astype(np.int64) - 1) * 1000 + values[starts + 1].astype(np.int64) - 1


CONTENDERS: dict[str, tuple[Callable[[Path], Iterator[Any]], bool, int | None]] = {
    # name: (how, from the sharded copy, batches to measure)
    "AnnLoader, random access": (annloader, False, 60),
    "scDataset, block 16, fetch 16": (lambda path: scdataset(path, 16, 16), False, None),
    "scDataset, block 16, fetch 256": (lambda path: scdataset(path, 16, 256), False, None),
    "scDataset, block 256, fetch 256": (lambda path: scdataset(path, 256, 256), False, None),
    "scDataset, block 1024, fetch 512": (lambda path: scdataset(path, 1024, 512), False, None),
    "shardwise streaming": (shardwise_rows, False, None),
    "shardwise streaming, tokens": (shardwise_tokens, False, None),
    "shardwise sharded copy": (shardwise_rows, True, None),
    "shardwise sharded copy, tokens": (shardwise_tokens, True, None),
    "shardwise streaming, no workers": (lambda path: shardwise_rows(path, 0), False, None),
    "shardwise streaming, tokens, no workers": (lambda path: shardwise_tokens(path, 0), False, None),
    "shardwise sharded copy, no workers": (lambda path: shardwise_rows(path, 0), True, None),
    "shardwise sharded copy, tokens, no workers": (lambda path: shardwise_tokens(path, 0), True, None),
}


NEEDS = {"scDataset": "scdataset", "AnnLoader": "anndata"}
"""The package of each peer, by how the contender's name begins."""


def missing_package(name: str) -> str | None:
    package = NEEDS.get(name.partition(",")[0])
    return package if package and importlib.util.find_spec(package) is None else None


# ---------------------------------------------------------------- one measurement, in a process of its own


def measure(name: str, path: Path) -> dict[str, float]:
    how, _, limit = CONTENDERS[name]
    batches = how(path)
    next(batches)  # the workers have started
    began = time.perf_counter()
    seen = list(itertools.islice(batches, limit))
    seconds = time.perf_counter() - began
    cells = sum(map(len, seen))
    neighbours = 0
    for rows in seen:
        beside = np.diff(np.sort(rows)) == 1
        neighbours += int((np.append(beside, False) | np.insert(beside, 0, False)).sum())
    return {"cells_per_second": cells / seconds, "neighbours": neighbours / cells}


def tokenizing(path: Path) -> dict[str, float]:
    """Microseconds of processor time per cell, in one process: to read, and to make tokens and masks."""
    from shardwise.config import parse_config
    from shardwise.data import Cursor
    from shardwise.tasks.cells.task import CellsTask

    costs = {}
    for strategy in ("rank_value", "binned_expression", "continuous_projection"):
        config = parse_config(
            f"task: cells\ndata: {{source: {'shards' if path.is_dir() else 'local'}, paths: [{path}], streaming: true, "
            f"streaming_chunk_size: {CHUNK}, streaming_shuffle_buffer: {BUFFER}}}\ntokenizer: {{strategy: {strategy}}}"
        )
        data: Any = CellsTask(config).train_data()
        groups = [batch.indices for batch in data.order(0).batches(Cursor(), 512, 1)]
        reading = making = 0.0
        for ids in groups:
            began = time.process_time()
            rows = data.rows(ids, 0)
            read = time.process_time()
            data.tokenizer.encode(rows, ids, 0)
            reading, making = reading + read - began, making + time.process_time() - read
        costs |= {"read": reading / len(data) * 1e6, strategy: making / len(data) * 1e6}
    return costs


# ---------------------------------------------------------------- all of them


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--cells", type=int)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "shardwise-benchmark")
    parser.add_argument("--repeat", type=int)
    parser.add_argument("--write", type=Path)
    parser.add_argument("--tiny", action="store_true", help="a few cells, once each, nearly all in one process")
    parser.add_argument("--one", nargs=2, metavar=("CONTENDER", "FILE"))
    args = parser.parse_args()
    if args.one:
        name, path = args.one[0], Path(args.one[1])
        print(json.dumps(tokenizing(path) if name == "tokenizing" else measure(name, path)))
        return
    args.cells = args.cells or (600 if args.tiny else 100_000)
    args.repeat = args.repeat or (1 if args.tiny else 3)
    args.folder.mkdir(parents=True, exist_ok=True)
    how = "a run to try the script, whose figures mean nothing" if args.tiny else "each in a process of its own"
    lines = [
        "# Cells per second from one h5ad file",
        "",
        f"{args.cells} cells × {GENES} genes, {DENSITY:.0%} of them expressed, CSR, file in the page cache; batches of {BATCH}, "
        f"shuffled, {WORKERS} workers; {_machine()}. Made by `benchmarks/data/cells.py`: best of {args.repeat} runs, {how}. "
        f"shardwise: chunks of {CHUNK}, shuffle buffer {BUFFER}. Memory: of all processes together, "
        "shared pages counted once, in another run. Neighbours: how many cells of a batch have a cell beside them in the "
        "file that is in the same batch.",
    ]
    for compression in (None, "gzip"):
        file = make_file(args.folder, args.cells, compression)
        copy = make_copy(file)
        lines += ["", f"## {'Compressed with gzip' if compression else 'Not compressed'}", ""]
        lines += [f"{file.stat().st_size / 2**20:.0f} MiB; the sharded copy {_size(copy):.0f} MiB.", ""]
        lines += ["| | cells/s | memory, MiB | neighbours |", "|---|---|---|---|"]
        for number, (name, (_, sharded, _limit)) in enumerate(CONTENDERS.items()):
            path = copy if sharded else file
            alone = not args.tiny or (number == 0 and compression is None)
            lines.append(f"| {name} | {_row(name, path, args.repeat, tiny=args.tiny, alone=alone)}")
            print(lines[-1], flush=True)
        costs = tokenizing(file) if args.tiny else run_one("tokenizing", file)
        lines += ["", "Microseconds of processor time per cell in one process: " + _costs(costs) + "."]
        print(lines[-1], flush=True)
    text = "\n".join(lines) + "\n"
    print(text)
    if args.write:
        args.write.write_text(text)


def _row(name: str, path: Path, repeat: int, *, tiny: bool, alone: bool) -> str:
    """Its figures, each measured in a process of its own; of a tiny run, only those that shall be `alone`."""
    if package := missing_package(name):
        return f"not installed: {package} | | |"
    runs = [] if tiny else [run_one(name, path) for _ in range(repeat)]
    # Looking at the memory of a process holds it up: in a run of its own.
    watched = run_one(name, path, watched=True) if alone else measure(name, path)
    best = max(runs or [watched], key=lambda run: run["cells_per_second"])
    memory = f"{watched['memory']:.0f}" if watched.get("memory") else "–"
    return f"{best['cells_per_second']:,.0f} | {memory} | {best['neighbours']:.2%} |"


def make_file(folder: Path, cells: int, compression: Any) -> Path:
    import anndata
    import pandas as pd
    from scipy import sparse

    path = folder / f"cells-{cells}{'-' + compression if compression else ''}.h5ad"
    if not path.exists():
        rng = np.random.default_rng(0)
        matrix = sparse.random(cells, GENES, density=DENSITY, format="csr", dtype=np.float32, random_state=0)
        matrix.data = rng.negative_binomial(1, 0.25, size=matrix.nnz).astype(np.float32) + 1
        # The first two genes tell the row number.
        rows = np.arange(cells, dtype=np.float32)
        matrix = sparse.hstack([1 + rows[:, None] // 1000, 1 + rows[:, None] % 1000, matrix[:, 2:]], format="csr")
        obs = pd.DataFrame(index=pd.Index([f"cell{i}" for i in range(cells)], dtype=object))
        var = pd.DataFrame(index=pd.Index([f"gene{i}" for i in range(GENES)], dtype=object))
        anndata.AnnData(sparse.csr_matrix(matrix), obs=obs, var=var).write_h5ad(path, compression=compression)
    path.read_bytes()
    return path


def make_copy(file: Path) -> Path:
    from shardwise.config import parse_config
    from shardwise.errors import DataError
    from shardwise.tasks.cells.sharding import shard_cells
    from shardwise.tasks.cells.shards import open_shards

    copy = file.with_suffix(".shards")
    try:
        open_shards(copy)
    except DataError:  # not there, or made by an older shardwise
        shutil.rmtree(copy, ignore_errors=True)
        config: Any = parse_config(f"task: cells\ndata: {{source: local, paths: [{file}]}}")
        shard_cells(config.data, 0, copy, cells_per_shard=65_536)
    return copy


def run_one(name: str, path: Path, *, watched: bool = False) -> dict[str, float]:
    process = subprocess.Popen(
        [sys.executable, __file__, "--one", name, str(path)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    peak = [0.0]
    watcher = threading.Thread(target=_watch, args=(process.pid, peak))
    if watched:
        watcher.start()
    out, err = process.communicate()
    if watched:
        watcher.join()
    if process.returncode:
        sys.exit(f"{name} failed: {err}")
    return {**json.loads(out.splitlines()[-1]), "memory": peak[0]}


def _watch(pid: int, peak: list[float]) -> None:
    try:
        import psutil
    except ImportError:
        return
    try:
        parent = psutil.Process(pid)
        while parent.is_running() and parent.status() != psutil.STATUS_ZOMBIE:
            total = 0
            for process in [parent, *parent.children(recursive=True)]:
                try:
                    total += process.memory_full_info().pss
                except psutil.Error:
                    continue
            peak[0] = max(peak[0], total / 2**20)
            time.sleep(0.1)
    except psutil.Error:
        return


def _costs(costs: dict[str, float]) -> str:
    parts = [f"{costs['read']:.1f} to read"]
    for strategy in ("rank_value", "binned_expression", "continuous_projection"):
        parts.append(
            f"{costs[strategy]:.1f} to make {strategy} tokens ({costs[strategy] / costs['read']:.0%} of the read)"
        )
    return ", ".join(parts)


def _size(folder: Path) -> float:
    return sum(file.stat().st_size for file in folder.iterdir()) / 2**20


def _machine() -> str:
    return (
        f"{os.cpu_count()} cores, {platform.system()}, Python {platform.python_version()}, {time.strftime('%Y-%m-%d')}"
    )


if __name__ == "__main__":
    main()
