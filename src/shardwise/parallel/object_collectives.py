"""What ranks tell each other beside tensors: plain data as JSON, which executes nothing, whoever sent it.

PyTorch's own `all_gather_object` and its kin unpickle what arrives (torch 2.13).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise import errors
from shardwise.compat.tensors import TreeSpec, tree_flatten, tree_unflatten, treespec_dumps, treespec_loads
from shardwise.errors import ShardwiseError

CPU = torch.device("cpu")


def gather_plain(value: Any, group: dist.ProcessGroup | None = None, device: torch.device = CPU) -> list[Any]:
    """Every rank's value, on every rank of the group. A tuple arrives as a list."""
    return [json.loads(each) for each in gather_bytes(lambda: as_json(value), group, device)]


def gather_bytes(
    make: Callable[[], bytes], group: dist.ProcessGroup | None = None, device: torch.device = CPU
) -> list[bytes]:
    """What `make` gives on each rank. A ShardwiseError of one is raised on every rank: nobody is left waiting."""
    mine, good = _made(make)
    size = torch.tensor([len(mine), good], device=device)
    sizes = [torch.empty_like(size) for _ in range(dist.get_world_size(group))]
    dist.all_gather(sizes, size, group=group)
    told = [(int(length), bool(fine)) for length, fine in (each.tolist() for each in sizes)]
    longest = max(length for length, _ in told)
    padded = torch.zeros(longest, dtype=torch.uint8, device=device)  # all must be of one length
    padded[: len(mine)] = _as_tensor(mine, device)
    parts = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(parts, padded, group=group)
    return [_heard(part[:length], fine) for part, (length, fine) in zip(parts, told, strict=True)]


def broadcast_plain(
    value: Any, source: int = 0, group: dist.ProcessGroup | None = None, device: torch.device = CPU
) -> Any:
    """The value of rank `source`, on every rank of the group. That of the others is not looked at."""
    return _broadcast(lambda: as_json(value), source, group, device)


def broadcast_tree(tree: Any, source: int, group: dist.ProcessGroup | None, device: torch.device) -> Any:
    """The same for tensors in whatever holds them, such as what a model returns: tuples, dicts, and classes that are
    registered with PyTorch's pytree, as those of Hugging Face are."""
    mine = dist.get_rank() == source
    leaves, spec = tree_flatten(tree)
    text, kinds = _broadcast(
        lambda: as_json([_as_text(spec), [_about(each) for each in leaves]]), source, group, device
    )
    arrived = []
    for number, (shape, kind) in enumerate(kinds):
        if shape is None:
            arrived.append(kind)
            continue
        tensor = leaves[number].contiguous() if mine else torch.empty(shape, dtype=getattr(torch, kind), device=device)
        dist.broadcast(tensor, source, group=group)
        arrived.append(tensor)
    return tree_unflatten(arrived, treespec_loads(text))


def error_told(error: Exception | None) -> dict[str, Any] | None:
    """An error as plain data: of the kinds that a user meets, the nearest."""
    if error is None:
        return None
    if isinstance(error, OSError) and error.errno is not None:
        return {"errno": error.errno, "strerror": error.strerror, "filename": _text(error.filename)}
    kind = next((each.__name__ for each in type(error).__mro__ if each.__module__ == errors.__name__), "OSError")
    return {"kind": kind, "message": str(error)}


def error_heard(told: dict[str, Any]) -> Exception:
    if "errno" in told:
        name = [told["filename"]] if told["filename"] is not None else []
        return OSError(told["errno"], told["strerror"], *name)
    kind = getattr(errors, told["kind"], None)
    return (
        kind(told["message"])
        if isinstance(kind, type) and issubclass(kind, ShardwiseError)
        else OSError(told["message"])
    )


def as_json(value: Any) -> bytes:
    try:
        return json.dumps(value).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise ShardwiseError(
            f"what ranks tell each other is plain data (numbers, text, lists, dicts with text as keys), but {error}"
        ) from error


def dtype_name(dtype: torch.dtype) -> str:
    """As `getattr(torch, name)` finds it again."""
    return str(dtype).removeprefix("torch.")


def _broadcast(make: Callable[[], bytes], source: int, group: dist.ProcessGroup | None, device: torch.device) -> Any:
    mine, good = _made(make) if dist.get_rank() == source else (b"", True)
    size = torch.tensor([len(mine), good], device=device)
    dist.broadcast(size, source, group=group)
    length, fine = size.tolist()
    data = _as_tensor(mine, device) if mine else torch.empty(length, dtype=torch.uint8, device=device)
    dist.broadcast(data, source, group=group)
    return json.loads(_heard(data, bool(fine)))


def _made(make: Callable[[], bytes]) -> tuple[bytes, bool]:
    """What is sent, and whether it is that, or the error that came instead."""
    try:
        return make(), True
    except ShardwiseError as error:
        return as_json(error_told(ShardwiseError(f"rank {dist.get_rank()}: {error}"))), False


def _heard(data: Tensor, fine: bool) -> bytes:
    if not fine:
        raise error_heard(json.loads(_as_bytes(data)))
    return _as_bytes(data)


def _as_text(spec: TreeSpec) -> str:
    try:
        return treespec_dumps(spec)
    except NotImplementedError as error:  # a class that is registered without a name to serialize it by
        raise ShardwiseError(f"what the model returned cannot be handed to the other ranks: {error}") from error


def _about(leaf: Any) -> tuple[list[int] | None, Any]:
    """Shape and type of a tensor; None, and itself, of what is none."""
    if isinstance(leaf, Tensor):
        return list(leaf.shape), dtype_name(leaf.dtype)
    if leaf is None or isinstance(leaf, bool | int | float | str):
        return None, leaf
    raise ShardwiseError(
        f"the model returned {type(leaf).__name__}, which cannot be handed to the other ranks: return tensors, in tuples or "
        "dicts, or register the class with torch.utils._pytree"
    )


def _text(name: Any) -> str | None:
    return None if name is None else str(name)


def _as_tensor(data: bytes, device: torch.device) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).to(device)


def _as_bytes(data: Tensor) -> bytes:
    return data.cpu().numpy().tobytes()
