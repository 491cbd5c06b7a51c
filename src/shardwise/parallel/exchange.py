"""What ranks tell each other beside tensors: plain data as JSON, which executes nothing, whoever sent it.

PyTorch's own `all_gather_object` and its kin unpickle what arrives (torch 2.13).
"""

from __future__ import annotations

import json
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten, treespec_dumps, treespec_loads

from shardwise import errors
from shardwise.errors import ShardwiseError

CPU = torch.device("cpu")


def gather_plain(value: Any, group: dist.ProcessGroup | None = None, device: torch.device = CPU) -> list[Any]:
    """Every rank's value, on every rank of the group. A tuple arrives as a list."""
    return [json.loads(each) for each in gather_bytes(json.dumps(value).encode(), group, device)]


def gather_bytes(mine: bytes, group: dist.ProcessGroup | None = None, device: torch.device = CPU) -> list[bytes]:
    size = torch.tensor([len(mine)], device=device)
    sizes = [torch.empty_like(size) for _ in range(dist.get_world_size(group))]
    dist.all_gather(sizes, size, group=group)
    padded = torch.zeros(int(max(sizes)), dtype=torch.uint8, device=device)  # all must be of one length
    padded[: len(mine)] = _as_tensor(mine, device)
    parts = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(parts, padded, group=group)
    return [_as_bytes(part[: int(length)]) for part, length in zip(parts, sizes, strict=True)]


def broadcast_plain(
    value: Any, source: int = 0, group: dist.ProcessGroup | None = None, device: torch.device = CPU
) -> Any:
    """The value of rank `source`, on every rank of the group. That of the others is not looked at."""
    mine = json.dumps(value).encode() if dist.get_rank() == source else b""
    size = torch.tensor([len(mine)], device=device)
    dist.broadcast(size, source, group=group)
    data = _as_tensor(mine, device) if mine else torch.empty(int(size), dtype=torch.uint8, device=device)
    dist.broadcast(data, source, group=group)
    return json.loads(_as_bytes(data))


def broadcast_tree(tree: Any, source: int, group: dist.ProcessGroup | None, device: torch.device) -> Any:
    """The same for tensors in whatever holds them, such as what a model returns: tuples, dicts, and classes that are
    registered with PyTorch's pytree, as those of Hugging Face are."""
    mine = dist.get_rank() == source
    leaves: list[Any] = []
    about: Any = None
    if mine:
        leaves, spec = tree_flatten(tree)
        about = [treespec_dumps(spec), [_about(each) for each in leaves]]
    text, kinds = broadcast_plain(about, source, group, device)
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


def dtype_name(dtype: torch.dtype) -> str:
    """As `getattr(torch, name)` finds it again."""
    return str(dtype).removeprefix("torch.")


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
