"""Tensors in files: safetensors, so that nothing in a checkpoint can be executed, and an index in JSON.

Saving has two halves. `StagingBuffer` copies what this rank has to write into memory of its own: that is all that training waits
for. `write_files` puts it on disk, in threads, while training goes on. Who writes what, and who reads which part of what
others wrote, is planned by torch.distributed.checkpoint.
"""

from __future__ import annotations

import hashlib
import io
import itertools
import json
import math
import os
import re
import threading
import zipfile
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from shardwise.checkpoint.index import INDEX, NAMES, TYPES, chunk_key, read_index
from shardwise.config.plain_files import open_plain
from shardwise.data.manifest import FileEntry
from shardwise.errors import CheckpointError

FILE_BYTES = 2**29
"""A rank's tensors go into files of about this size, which are written, and checked, side by side."""
PIECE_BYTES = 2**23
THREADS = min(4, os.cpu_count() or 1)


# ---------------------------------------------------------------- out of the model


@dataclass
class StagedFile:
    """A file of safetensors, in memory: its name, its header and the tensors whose bytes follow."""

    name: str
    header: bytes
    body: list[torch.Tensor]


@dataclass(frozen=True)
class Agreed:
    """What this rank has, and what of it all ranks have agreed that it writes."""

    asked: list[WriteItem]
    given: SavePlan


class StagingBuffer(StorageWriter):
    """What this rank has to write, copied into memory of its own. The memory is kept for the next time.

    Out of a GPU, the copies run beside training, in pinned memory. What an optimizer step changes may be copied until then:
    `before_update` makes it wait. The rest (buffers, mostly) is copied before anything else runs: training waits on
    the device, and the host not at all.

    Where there is no room for copies, what is to be written is left where it is, and must not change until it is written.
    """

    def __init__(self, rank: int, device: torch.device, room: Callable[[], float] = lambda: math.inf) -> None:
        """`room`: bytes of host memory that this rank may still take."""
        self.rank, self._room = rank, room
        self.copied = True
        """Whether training may go on while this is written."""
        self.files: list[StagedFile] = []
        self.index: dict[str, Any] | None = None
        """What is where, over all ranks. On rank 0 alone."""
        self.agreed: Agreed | None = None
        self.changed_by_update: Callable[[str], bool] = lambda name: False
        """Whether a tensor stays as it is until the optimizer's next step."""
        self._buffers: list[torch.Tensor] = []
        self._reserving: threading.Thread | None = None
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._copied: torch.cuda.Event | None = None

    def reserve(self, size: int) -> None:
        """Take pinned memory for that many bytes ahead, in a thread: it takes seconds, which training need not wait for."""

        def take() -> None:
            for _ in range(math.ceil(size / FILE_BYTES)):
                self._buffers.append(torch.empty(FILE_BYTES, dtype=torch.uint8, pin_memory=True))

        if self._stream is not None:
            self._reserving = threading.Thread(target=take, name="checkpoint memory", daemon=True)
            self._reserving.start()

    def before_update(self) -> None:
        """Called before weights change."""
        if self._copied is not None:
            torch.cuda.current_stream().wait_event(self._copied)

    def finish_copies(self) -> None:
        """Wait until everything is copied."""
        if self._copied is not None:
            self._copied.synchronize()

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        staged = [(item, _tensor_of(planner.resolve_data(item))) for item in plan.items]
        if self._reserving is not None:
            self._reserving.join()
            self._reserving = None
        held = sum(buffer.nbytes for buffer in self._buffers)
        self.copied = sum(tensor.nbytes for _, tensor in staged) - held <= self._room()
        self.files, results = [], []
        copies: list[tuple[str, torch.Tensor, torch.Tensor]] = []
        for number, part in enumerate(_split(staged)):
            name = f"rank-{self.rank:04d}-{number:03d}.safetensors"
            self.files.append(self._lay_out(name, number, part, copies))
            results += [WriteResult(item.index, tensor.nbytes, name) for item, tensor in part]
        if self.copied:
            self._copy(copies)
        elif self._stream is not None:
            torch.cuda.synchronize(self._stream.device)  # threads read the tensors, on streams of their own
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    def _lay_out(
        self,
        name: str,
        number: int,
        part: list[tuple[WriteItem, torch.Tensor]],
        copies: list[tuple[str, torch.Tensor, torch.Tensor]],
    ) -> StagedFile:
        """The header of a file and room for its tensors. What is to be copied where is added to `copies`."""
        body = self._buffer(number, sum(tensor.nbytes for _, tensor in part)) if self.copied else None
        header, end = dict[str, Any](), 0
        for item, tensor in part:
            begin, end = end, end + tensor.nbytes
            header[_key(item)] = {
                "dtype": NAMES[tensor.dtype],
                "shape": list(tensor.shape),
                "data_offsets": [begin, end],
            }
            if tensor.nbytes and body is not None:
                copies.append((item.index.fqn, body[begin:end].view(tensor.dtype).view(tensor.shape), tensor))
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)  # so that every tensor begins at a multiple of its own size
        bodies = [tensor for _, tensor in part] if body is None else [body]
        return StagedFile(name, len(text).to_bytes(8, "little") + text, bodies)

    def _buffer(self, number: int, size: int) -> torch.Tensor:
        if number == len(self._buffers):
            self._buffers.append(torch.empty(0, dtype=torch.uint8))
        if self._buffers[number].numel() < size:
            self._buffers[number] = torch.empty(size, dtype=torch.uint8, pin_memory=self._stream is not None)
        return self._buffers[number][:size]

    def _copy(self, copies: list[tuple[str, torch.Tensor, torch.Tensor]]) -> None:
        if self._stream is None:
            for _, target, tensor in copies:
                target.copy_(tensor)
            return
        training = torch.cuda.current_stream()
        self._stream.wait_stream(training)
        with torch.cuda.stream(self._stream):
            for early in (True, False):
                for name, target, tensor in copies:
                    if early != self.changed_by_update(name):
                        target.copy_(tensor, non_blocking=True)
                if early:
                    training.wait_stream(self._stream)
            self._copied = self._stream.record_event()

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        file_of = {result.index: result.storage_data for rank in results for result in rank}
        self.index = {}
        for name, about in metadata.state_dict_metadata.items():
            if isinstance(about, BytesStorageMetadata):
                self.index[name] = {"bytes": file_of[MetadataIndex(name)]}
                continue
            self.index[name] = {
                "dtype": NAMES[about.properties.dtype],
                "shape": list(about.size),
                "chunks": [
                    [list(chunk.offsets), list(chunk.sizes), file_of[MetadataIndex(name, chunk.offsets)]]
                    for chunk in about.chunks
                ],
            }

    def reset(self, checkpoint_id: Any = None) -> None:
        self.files, self.index = [], None

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None: ...

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return plans

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return True


def _tensor_of(data: torch.Tensor | io.BytesIO) -> torch.Tensor:
    """What is no tensor travels as the bytes that torch.save made of it."""
    if isinstance(data, io.BytesIO):
        return torch.frombuffer(bytearray(data.getvalue()), dtype=torch.uint8)
    if data.dtype not in NAMES:
        raise CheckpointError(f"a tensor of type {data.dtype} cannot be kept in a checkpoint")
    return data.detach()


def _split(staged: list[tuple[WriteItem, torch.Tensor]]) -> Iterable[list[tuple[WriteItem, torch.Tensor]]]:
    """Into files. Wider types come first, so that no tensor begins where its type may not."""
    part: list[tuple[WriteItem, torch.Tensor]] = []
    size = 0
    for each in sorted(staged, key=lambda pair: -pair[1].element_size()):
        if part and size + each[1].nbytes > FILE_BYTES:
            yield part
            part, size = [], 0
        part.append(each)
        size += each[1].nbytes
    if part:
        yield part


def _key(item: WriteItem) -> str:
    if item.type == WriteItemType.BYTE_IO or item.tensor_data is None:
        return item.index.fqn
    return chunk_key(
        item.index.fqn, item.tensor_data.chunk.offsets, item.tensor_data.chunk.sizes, item.tensor_data.size
    )


# ---------------------------------------------------------------- to disk


def write_files(
    folder: Path, files: list[StagedFile], before_flush: Callable[[], None] = lambda: None
) -> dict[str, FileEntry]:
    """Written, and flushed to disk, side by side; their checksums are computed on the way."""
    with ThreadPoolExecutor(THREADS, "checkpoint") as pool:
        entries = pool.map(lambda file: _write_file(folder / file.name, file, before_flush), files)
        return {file.name: entry for file, entry in zip(files, entries, strict=True)}


def write_index(folder: Path, index: dict[str, Any]) -> FileEntry:
    text = torch.frombuffer(bytearray(json.dumps(index).encode()), dtype=torch.uint8)
    return _write_file(folder / INDEX, StagedFile(INDEX, b"", [text]))


def _write_file(path: Path, file: StagedFile, before_flush: Callable[[], None] = lambda: None) -> FileEntry:
    digest = hashlib.sha256()
    size = 0
    with path.open("xb", buffering=0) as stream:
        for piece in itertools.chain([memoryview(file.header)], *map(_pieces, file.body)):
            written = 0
            while written < len(piece):
                written += stream.write(piece[written:]) or 0
            digest.update(piece)
            size += len(piece)
        before_flush()
        os.fsync(stream.fileno())
    return FileEntry(size, digest.hexdigest())


def _pieces(tensor: torch.Tensor) -> Iterator[memoryview]:
    """Its bytes, few at a time: a tensor that is still on a device is nowhere else as a whole."""
    if tensor.nbytes:
        for piece in tensor.reshape(-1).view(torch.uint8).split(PIECE_BYTES):
            yield piece.cpu().numpy().data


# ---------------------------------------------------------------- back


@dataclass
class SafetensorsReader(StorageReader):
    """The tensors of a checkpoint whose files have been checked."""

    folder: Path
    _known: Metadata | None = None
    _places: dict[MetadataIndex, tuple[str, str]] = field(default_factory=dict)
    """Of each tensor, or part of one: its file, and its name in there."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        if self._known is not None:
            return self._known
        known: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
        try:
            index = read_index(self.folder)
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{self.folder / INDEX} is not an index of tensors: {error}") from None
        for name, about in index.items():
            if about.dtype is None:
                known[name] = BytesStorageMetadata()
                self._places[MetadataIndex(name)] = (about.chunks[0].file, name)
                continue
            chunks = [ChunkStorageMetadata(torch.Size(each.offsets), torch.Size(each.sizes)) for each in about.chunks]
            properties, whole = TensorProperties(dtype=TYPES[about.dtype]), torch.Size(about.shape)
            known[name] = TensorStorageMetadata(properties, whole, chunks)
            for each in about.chunks:
                self._places[MetadataIndex(name, each.offsets)] = (each.file, about.key_of(name, each))
        self._known = Metadata(known)
        return self._known

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        by_file: dict[str, list[ReadItem]] = defaultdict(list)
        for item in plan.items:
            by_file[self._places[item.storage_index][0]].append(item)
        for file, items in by_file.items():
            try:
                with open_plain(self.folder / file) as opened, _safe_open(opened, self.folder / file) as tensors:
                    for item in items:
                        self._read(tensors, item, planner)
            except (OSError, ValueError, SafetensorError) as error:
                raise CheckpointError(f"{self.folder / file}: {error}") from None
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _read(self, tensors: Any, item: ReadItem, planner: LoadPlanner) -> None:
        _, key = self._places[item.storage_index]
        if item.type == LoadItemType.BYTE_IO:
            planner.load_bytes(item, io.BytesIO(tensors.get_tensor(key).numpy().tobytes()))
            return
        target = planner.resolve_tensor(item).detach()
        if not item.lengths:  # a single number has no range to take
            target.copy_(tensors.get_tensor(key))
        elif math.prod(item.lengths):
            ranges = (slice(begin, begin + n) for begin, n in zip(item.storage_offsets, item.lengths, strict=True))
            target.copy_(tensors.get_slice(key)[tuple(ranges)])
        planner.commit_tensor(item, target)

    def reset(self, checkpoint_id: Any = None) -> None: ...

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None: ...

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return True


def _safe_open(opened: io.FileIO, file: Path) -> Any:
    """What was opened, and not what its name stands for by now. safetensors takes names only: where the system has none for
    what is open (all but Linux), it opens the file again."""
    same = Path(f"/proc/self/fd/{opened.fileno()}")
    return safe_open(same if same.exists() else file, framework="pt")


class SafeLoadPlanner(DefaultLoadPlanner):
    """As PyTorch's own, but what is no tensor is read by an unpickler that knows plain data only."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        holder: Any = self.original_state_dict
        *way, last = self.mappings[read_item.dest_index.fqn]
        for key in way:
            holder = holder[key]
        _check_bytes(value)
        holder[last] = torch.load(value, weights_only=True)


def _check_bytes(value: io.BytesIO) -> None:
    """That they take no more memory than they have bytes. The unpickler that knows plain data only (torch 2.13) also knows
    bytearray, which it calls with any number; and it unpacks what is packed."""
    try:
        packed = any(entry.compress_type != zipfile.ZIP_STORED for entry in zipfile.ZipFile(value).infolist())
    except zipfile.BadZipFile:
        packed = True
    value.seek(0)
    if packed or re.search(rb"(__builtin__|builtins)\nbytearray\n", value.getbuffer()):
        raise CheckpointError("what is kept besides tensors is not as a checkpoint has it")
