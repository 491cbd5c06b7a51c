"""Parameters that a rank does not use in a step while others do, as those of an expert that gets no token there.

Sharded gradients are summed over the ranks unit by unit, so every rank must bring one for each parameter: zeros where it has
none. One process leaves a parameter that nobody uses as it is; so it is here. And a unit whose weights are gathered when it is
called must be called by every rank: that is watched.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shardwise.compat.distributed import name_without_wrapper, reduce_unused
from shardwise.compat.modules import parameters_of
from shardwise.compat.tensors import tree_map_only
from shardwise.errors import ShardwiseError
from shardwise.parallel.world import World


class UnusedParameters:
    def __init__(self, model: nn.Module, units: Sequence[nn.Module], world: World) -> None:
        """`units`: those that are gathered on their own, after they have been sharded; what is in none of them, with `model`."""
        self.model, self.world = model, world
        self._used: set[str] = set()
        self._known: set[nn.Parameter] = set()
        # Where modules are kept to choose from, another batch may choose others.
        self._watches: bool | None = True if _holds_a_choice(model, units) else None
        """Whether the ranks ask each other in every step; None: they have not asked yet."""
        self._brings_zeros = reduce_unused(model)
        names = {module: name for name, module in model.named_modules()}
        nested = set(units)
        for unit in [*units, model]:
            own = [(name_without_wrapper(f"{names[each]}.").removesuffix("."), each) for each in _own(unit, nested)]
            if self._brings_zeros:
                unit.register_forward_pre_hook(self._noticing(own))
                continue
            for path, module in own:
                module.register_forward_hook(self._called(path))
            # Before the unit's weights are let go.
            unit.register_forward_hook(_bringing_zeros([each for _, each in own]), prepend=True)
        for path, module in model.named_modules():
            if isinstance(module, nn.ModuleList) and len(module) > 1 and nested.issuperset(module):
                CalledInTurn(module, path, model.get_submodule(path.rpartition(".")[0]))

    def _noticing(self, own: list[tuple[str, nn.Module]]) -> Callable[..., None]:
        def hook(*_: Any) -> None:
            for path, module in own:
                for name, parameter in parameters_of(module).items():
                    if parameter is None or parameter in self._known or not parameter.requires_grad:
                        continue
                    self._known.add(parameter)
                    whole = f"{path}.{name}".removeprefix(".")
                    parameter.register_post_accumulate_grad_hook(lambda _, name=whole: self._used.add(name))

        return hook

    def _called(self, path: str) -> Callable[..., None]:
        """Where every parameter gets a gradient, zeros at least, those of a module that is called count as used."""

        def hook(module: nn.Module, *_: Any) -> None:
            if torch.is_grad_enabled():
                self._used.update(f"{path}.{name}".removeprefix(".") for name in parameters_of(module))

        return hook

    def settle(self) -> None:
        """After the backward passes of a step: what no rank has used has no gradient, as in one process."""
        used, self._used = self._used, set()
        if self._watches is False:
            return
        names: dict[nn.Parameter, list[str]] = {}
        for name, each in self.model.named_parameters(
            remove_duplicate=False
        ):  # a tied weight may be used by any of its names
            if each.requires_grad:
                names.setdefault(each, []).append(name_without_wrapper(name))
        own = [not used.isdisjoint(each) for each in names.values()]
        if not self._brings_zeros:  # a weight may be used without a call of its module
            own = [known or _is_there(each.grad) for known, each in zip(own, names, strict=True)]
        times = self.world.sum(*own)
        for parameter, count in zip(names, times, strict=True):
            if not count:
                parameter.grad = None
        if self._watches is None:
            self._watches = min(times, default=0.0) < self.world.size


class CalledInTurn:
    """Units of one list are called one after the other, and all of them: so that all ranks gather the same one. A rank that
    skips some is told before it gathers another one than the others do."""

    def __init__(self, units: nn.ModuleList, path: str, owner: nn.Module) -> None:
        self.path, self.count = name_without_wrapper(path), len(units)
        self.last: int | None = None
        self.called: set[int] = set()
        self.active = False
        owner.register_forward_pre_hook(self._begin, prepend=True)
        owner.register_forward_hook(self._end)
        for number, unit in enumerate(units):
            unit.register_forward_pre_hook(self._calling(number), prepend=True)

    def _begin(self, *_: Any) -> None:
        self.active, self.last = True, None
        self.called.clear()

    def _calling(self, number: int) -> Callable[..., None]:
        def hook(*_: Any) -> None:
            if not self.active:  # computed again in the backward pass
                return
            ends = (0, self.count - 1)
            fits = (
                number in ends if self.last is None else abs(number - self.last) <= 1 or {number, self.last} == {*ends}
            )
            if not fits:
                after = "first" if self.last is None else f"after {self.path}.{self.last}"
                raise self._problem(f"this rank calls {self.path}.{number} {after}")
            self.last = number
            self.called.add(number)

        return hook

    def _end(self, *_: Any) -> None:
        self.active = False
        if 0 < len(self.called) < self.count:
            missing = min(set(range(self.count)) - self.called)
            raise self._problem(f"this rank did not call {self.path}.{missing}")

    def _problem(self, what: str) -> ShardwiseError:
        return ShardwiseError(
            f"strategy fsdp shards each of {self.path}.0 to {self.path}.{self.count - 1} on its own, and {what}: ranks that call "
            "different ones would exchange the weights of different ones. If some get nothing to do, as experts without a token, "
            "let the task's blocks() return the layers that hold them, or call each of them, with no rows where there are none"
        )


def _is_there(grad: Tensor | None) -> bool:
    own = grad.to_local() if isinstance(grad, DTensor) else grad
    return own is not None and bool(own.any())


def _holds_a_choice(model: nn.Module, units: Sequence[nn.Module]) -> bool:
    """Whether it keeps modules in a list or dict, other than its units."""
    kept = (module for module in model.modules() if isinstance(module, nn.ModuleList | nn.ModuleDict))
    return any(not set(units).issuperset(each.children()) for each in kept)


def _own(unit: nn.Module, units: set[nn.Module]) -> list[nn.Module]:
    """Modules of a unit that are in no other within it."""
    found, waiting = [], [unit]
    while waiting:
        module = waiting.pop()
        found.append(module)
        waiting += [each for each in module.children() if each not in units]
    return found


def _bringing_zeros(modules: list[nn.Module]) -> Callable[[nn.Module, Any, Any], Any]:
    """Each parameter gets a gradient of zeros besides its own."""

    def hook(unit: nn.Module, inputs: Any, output: Any) -> Any:
        if not torch.is_grad_enabled():
            return output
        parameters = [each for module in modules for each in parameters_of(module).values() if each is not None]
        trained = list(dict.fromkeys(each for each in parameters if each.requires_grad))
        done = False

        def bind(tensor: Tensor) -> Tensor:
            nonlocal done
            if done or not (tensor.is_floating_point() and tensor.requires_grad):
                return tensor
            done = True
            bound: Tensor = _Zeros.apply(tensor, *trained)
            return bound

        return tree_map_only(Tensor, bind, output)

    return hook


class _Zeros(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, *parameters: Tensor) -> Tensor:
        ctx.like = [(each.shape, each.dtype, each.device) for each in parameters]
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
        return grad, *(torch.zeros(shape, dtype=dtype, device=device) for shape, dtype, device in ctx.like)
