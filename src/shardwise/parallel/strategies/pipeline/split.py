"""One piece of a model that is cut into stages: the whole model's code, with the weights of some of its blocks."""

from __future__ import annotations

import copy
import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.compat.distributed import name_without_wrapper
from shardwise.compat.modules import buffers_of, parameters_of, temporary_buffers_of
from shardwise.compat.tensors import tree_leaves, tree_map_only
from shardwise.errors import ShardwiseError
from shardwise.parallel.weights import FindBlocks

Slot = tuple[nn.Module, str]
"""A module and the name under which it holds a parameter."""
BEFORE, AFTER = "before the blocks", "after the blocks"


class Leave(Exception):
    """Not an error: the forward pass has left the blocks of this piece."""

    def __init__(self, hidden: Tensor) -> None:
        super().__init__("left the piece")
        self.hidden = hidden


class Piece(nn.Module):
    """Blocks edges[number] to edges[number + 1] of a model. What it lacks is stood in for."""

    def __init__(
        self, model: nn.Module, blocks: list[nn.Module], number: int, edges: Sequence[int], device: torch.device
    ) -> None:
        super().__init__()
        self.model = model
        self.number, self.is_first, self.is_last = number, number == 0, number == len(edges) - 2
        self.received: Any = None
        self.work: Callable[[Piece, Tensor, int], Tensor] | None = None
        """What to do with a micro-batch of the schedule."""
        first, last = edges[number], edges[number + 1]
        self.own_blocks = blocks[first:last]
        zones = _zones(model, blocks)
        mine = {BEFORE} if self.is_first else set()
        mine |= {AFTER} if self.is_last else set()
        _refuse_weights_shared_over_edges(model, zones, edges)
        self.shared_names = {
            name
            for name, parameter in model.named_parameters()
            if zones[id(parameter)] >= {BEFORE, AFTER} and (self.is_first or self.is_last)
        }
        _strip(model, blocks, mine | set(range(first, last)), device)
        for index, block in enumerate(blocks):
            if not first <= index < last:
                block.forward = _StandIn(self, block, index - first)

    def forward(
        self, incoming: Any, number: Tensor | None = None, job: Callable[[nn.Module], Any] | None = None
    ) -> Any:
        """A micro-batch of the schedule, by its number; or any call of the model, as a job."""
        if job is None:
            assert self.work is not None and number is not None
            return self.work(self, incoming, int(number))
        self.received = incoming
        try:
            return job(self.model)
        except Leave as leave:
            return leave.hidden

    def shared(self) -> list[nn.Parameter]:
        """Weights that the first and the last piece both hold."""
        return [each for name, each in self.model.named_parameters() if name_without_wrapper(name) in self.shared_names]


class _StandIn:
    """The forward of a block that this piece does not have."""

    def __init__(self, piece: Piece, block: nn.Module, distance: int) -> None:
        self.piece, self.original, self.distance = [piece], block.forward, distance
        self.gives_tuple: bool | None = None

    def __call__(self, hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
        if self.distance > 0:
            raise Leave(hidden)
        if self.gives_tuple is None:
            self.gives_tuple = self._look(hidden, args, kwargs)
        result = self.piece[0].received if self.distance == -1 else hidden
        return (result, None) if self.gives_tuple else result

    def _look(self, *call: Any) -> bool:
        """Whether the block gives a tuple, seen on the meta device, where its weights are."""
        hidden, args, kwargs = tree_map_only(Tensor, lambda tensor: tensor.to("meta"), call)
        try:
            with torch.no_grad():
                return isinstance(self.original(hidden, *args, **kwargs), tuple)
        except Exception:
            return False  # most give a tensor; if not, the model's own code will say so


class Sketch:
    """A model to look at: its own code runs on the device, with weights of no size; its blocks run on meta.

    Weights before the blocks, and what all blocks but the last give, are NaN here. What a stage does not have would be
    made of them: if a block's other arguments, or what comes after the blocks, have become NaN too, the model cannot be cut.
    """

    def __init__(self, shape: nn.Module, find_blocks: FindBlocks, device: torch.device) -> None:
        self.model, self.device = copy.deepcopy(shape), device
        self.blocks = find_blocks(self.model)
        self._marks: dict[torch.dtype, Tensor] = {}
        self._outputs: list[Tensor] = []
        self._to_the_end = False
        zones = _zones(self.model, self.blocks)
        for zone, module in _in_order(self.model, _inside(self.blocks)):
            if zone not in (BEFORE, AFTER):
                continue
            for name, parameter in list(parameters_of(module).items()):
                if parameter is not None:
                    del parameters_of(module)[name]
                    elsewhere = zones[id(parameter)] == {BEFORE}
                    module.__dict__[name] = self._marked(parameter) if elsewhere else _filled(parameter, device)
            for name, buffer in buffers_of(module).items():
                if buffer is not None:
                    buffers_of(module)[name] = _filled(buffer, device).clone()
        for position, block in enumerate(self.blocks):
            block.forward = partial(self._block, position, block.forward)

    def check(self, job: Callable[[nn.Module], Any]) -> None:
        """Refuse a model that does not compute the same when it is cut."""
        if not self._is_nan(self._run(job, to_the_end=True)):
            return
        for mark in self._marks.values():  # is that because of what the stages lack?
            mark.fill_(0.5)
        needs_more = not self._is_nan(self._run(job, to_the_end=True))
        for mark in self._marks.values():
            mark.fill_(float("nan"))
        raise ShardwiseError(
            "strategy pipeline cannot cut this model: what it does after its blocks "
            + (
                "needs more than the output of the last one"
                if needs_more
                else "gives no number that could be looked at"
            )
            + ". Use fsdp"
        )

    def outputs_of(self, job: Callable[[nn.Module], Any]) -> list[Tensor]:
        """What the blocks give, each in its turn, for its shape."""
        self._run(job, to_the_end=False)
        return self._outputs

    def _run(self, job: Callable[[nn.Module], Any], *, to_the_end: bool) -> Any:
        self._outputs, self._to_the_end = [], to_the_end
        result = None
        try:
            # What is drawn here must not be missing later: a resumed run looks at other shapes.
            with torch.no_grad(), torch.random.fork_rng([self.device] if self.device.type == "cuda" else []):
                result = job(self.model)
        except Leave:
            pass
        except ShardwiseError:
            raise
        except Exception as error:
            raise ShardwiseError(
                f"strategy pipeline cannot tell the shapes between this model's blocks: {type(error).__name__}: {error}. The "
                "blocks must be able to run on PyTorch's meta device; fsdp has no such need"
            ) from error
        if len(self._outputs) < len(self.blocks):
            raise ShardwiseError("strategy pipeline: the model does not call all of its blocks")
        return result

    def _block(self, position: int, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if position != len(self._outputs):
            raise ShardwiseError("strategy pipeline: the model does not call its blocks once each and in their order")
        if not args or (position and args[0] is not self._outputs[-1]):
            raise ShardwiseError(
                f"strategy pipeline cannot cut this model: block {position} does not take the output of the block before as it "
                "is, as its first argument. Move what the model does in between into the blocks, or use fsdp"
            )
        if self._is_nan((args[1:], kwargs)):
            raise ShardwiseError(
                f"strategy pipeline cannot cut this model: block {position} also takes what is made of weights before the "
                "blocks, or of what other blocks gave, which a later stage does not have. Use fsdp"
            )
        meta_args, meta_kwargs = tree_map_only(Tensor, lambda tensor: tensor.to("meta"), (args, kwargs))
        last = position == len(self.blocks) - 1
        sized = (lambda tensor: _filled(tensor, self.device)) if last else self._marked
        result = tree_map_only(Tensor, sized, original(*meta_args, **meta_kwargs))
        self._outputs.append(result[0] if isinstance(result, tuple) else result)
        if last and not self._to_the_end:
            raise Leave(self._outputs[-1])
        return result

    def _marked(self, tensor: Tensor) -> Tensor:
        if not tensor.is_floating_point():
            return _filled(tensor, self.device)
        if tensor.dtype not in self._marks:
            self._marks[tensor.dtype] = torch.full((), float("nan"), dtype=tensor.dtype, device=self.device)
        return self._marks[tensor.dtype].expand(tensor.shape)

    def _is_nan(self, value: Any) -> bool:
        floats = [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
        return any(bool(leaf.isnan().any()) for leaf in floats)


def weigh(model: nn.Module, blocks: list[nn.Module]) -> list[int]:
    """Parameters of each block, with what lies before and after it counted to the first and the last."""
    zones = _zones(model, blocks)
    sizes = [0] * len(blocks)
    for parameter in model.parameters():
        for zone in zones[id(parameter)]:
            sizes[{BEFORE: 0, AFTER: -1}.get(zone, zone)] += parameter.numel()
    return sizes


def cut_evenly(sizes: Sequence[float], count: int) -> list[int]:
    """Edges of `count` runs of neighbours, none of them empty, whose largest sum is as small as can be."""
    sums = [0, *itertools.accumulate(sizes)]
    best: list[list[tuple[float, int]]] = [[(0.0 if end == 0 else float("inf"), 0) for end in range(len(sums))]]
    for _ in range(count):
        row: list[tuple[float, int]] = [(float("inf"), 0)]
        for end in range(1, len(sums)):
            row.append(min((max(best[-1][start][0], sums[end] - sums[start]), start) for start in range(end)))
        best.append(row)
    edges = [len(sizes)]
    for row in reversed(best[1:]):
        edges.append(row[edges[-1]][1])
    return edges[::-1]


def has_tied_ends(model: nn.Module, blocks: list[nn.Module]) -> bool:
    """Whether a weight is used before the blocks and after them, as tied embeddings are."""
    return any(zones >= {BEFORE, AFTER} for zones in _zones(model, blocks).values())


def graft(shape: nn.Module, pieces: Sequence[Piece]) -> nn.Module:
    """The parameters and lasting buffers of these pieces under the names that the whole model gives them."""
    tree = copy.deepcopy(shape)
    for module in tree.modules():
        parameters_of(module).clear()
        buffers_of(module).clear()
    for piece in pieces:
        lasting = {name_without_wrapper(name) for name in piece.model.state_dict()}
        for path, module in piece.model.named_modules(remove_duplicate=False):
            home = name_without_wrapper(f"{path}.").removesuffix(".")
            there = tree.get_submodule(home)
            for name, parameter in parameters_of(module).items():
                if parameter is not None and f"{home}.{name}".removeprefix(".") in lasting:
                    parameters_of(there)[name] = parameter
            for name, buffer in buffers_of(module).items():
                if buffer is not None and f"{home}.{name}".removeprefix(".") in lasting:
                    buffers_of(there)[name] = buffer
    return tree


def _strip(model: nn.Module, blocks: list[nn.Module], mine: set[Any], device: torch.device) -> None:
    """Parameters of zones that are not `mine` become plain attributes: zeros that take no memory, or, in blocks, tensors on
    meta. Buffers outside the blocks stay, for the blocks may be given them, but only their own piece saves them."""
    inside = _inside(blocks)
    zones = _zones(model, blocks)
    for zone, module in _in_order(model, inside):
        here = device if zone in (BEFORE, AFTER) else torch.device("meta")
        for name, parameter in list(parameters_of(module).items()):
            if parameter is not None and not zones[id(parameter)] & mine:
                del parameters_of(module)[name]
                module.__dict__[name] = torch.zeros((), dtype=parameter.dtype, device=here).expand(parameter.shape)
        for name, buffer in list(buffers_of(module).items()):
            if buffer is None or zone in mine:
                continue
            if id(module) in inside:
                del buffers_of(module)[name]
                module.__dict__[name] = torch.zeros_like(buffer, device=here)
            else:
                temporary_buffers_of(module).add(name)


def _zones(model: nn.Module, blocks: list[nn.Module]) -> dict[int, set[Any]]:
    """For the id of each parameter: in which blocks it is, or whether it is registered before or after them."""
    zones: dict[int, set[Any]] = defaultdict(set)
    for zone, module in _in_order(model, _inside(blocks)):
        for parameter in parameters_of(module).values():
            if parameter is not None:
                zones[id(parameter)].add(zone)
    return zones


def _inside(blocks: list[nn.Module]) -> dict[int, int]:
    return {id(module): index for index, block in enumerate(blocks) for module in block.modules()}


def _in_order(model: nn.Module, inside: dict[int, int]) -> Iterator[tuple[Any, nn.Module]]:
    zone: Any = BEFORE
    for module in model.modules():
        if id(module) in inside:
            zone = AFTER
            yield inside[id(module)], module
        else:
            yield zone, module


def _refuse_weights_shared_over_edges(model: nn.Module, zones: dict[int, set[Any]], edges: Sequence[int]) -> None:
    last = len(edges) - 2

    def piece_of(zone: Any) -> int:
        if zone in (BEFORE, AFTER):
            return 0 if zone == BEFORE else last
        return next(number for number in range(last + 1) if zone < edges[number + 1])

    for name, parameter in model.named_parameters():
        pieces = {piece_of(zone) for zone in zones[id(parameter)]}
        if len(pieces) > 1 and zones[id(parameter)] != {BEFORE, AFTER}:
            raise ShardwiseError(
                f"strategy pipeline cannot cut this model: the weight {name} is used by pieces {sorted(pieces)}, and only one "
                "that the first and the last share can be kept equal. Use fsdp, or untie it"
            )


def _filled(tensor: Tensor, device: torch.device) -> Tensor:
    """Of this shape and without a size: halves, or zeros where they are whole numbers."""
    value = 0.5 if tensor.is_floating_point() else 0
    return torch.full((), value, dtype=tensor.dtype, device=device).expand(tensor.shape)
