"""From a recipe for a model to its weights, made once, on the CPU of rank 0.

The other ranks only know the shape (PyTorch's meta device).
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parameter import UninitializedParameter

from shardwise.compat.distributed import name_without_wrapper
from shardwise.compat.modules import REGISTERS, buffers_of, parameters_of
from shardwise.compat.tensors import memory_of
from shardwise.config import Training
from shardwise.errors import ShardwiseError
from shardwise.kernels.types import COMPUTE_TYPES
from shardwise.kernels.unregistered_parameters import held_by, marks_of, unregistered_parameters
from shardwise.parallel.world import World

Build = Callable[[], nn.Module]
FindBlocks = Callable[[nn.Module], list[nn.Module]]


def build_shape(build: Build) -> nn.Module:
    """The model on the meta device: no memory, no weights. A model that cannot be built there is built for real."""
    try:
        with torch.device("meta"):
            shape = build()
    except Exception:
        return build()  # if the model is at fault and not the device, this says so
    # A tensor that is neither parameter nor buffer could not be filled later.
    known = set(shape.modules())
    values = [*(_attributes(module) for module in known), *(marks_of(parameter) for parameter in shape.parameters())]
    loose = any(_holds_meta(value, known) for value in values)
    return build() if loose else shape


def check_model(model: nn.Module, world: World) -> None:
    """What no strategy could train as it is meant. `model`: as it was built, on the meta device or for real."""
    refuse_lazy_parameters(model)
    refuse_hidden_parameters(model)
    refuse_shared_memory(model)
    refuse_other_models(model, world)


def refuse_lazy_parameters(model: nn.Module) -> None:
    """Their shape is known only after the first forward pass, and they have to be spread before it."""
    lazy = [name for name, each in model.named_parameters() if isinstance(each, UninitializedParameter)]
    if lazy:
        raise ShardwiseError(
            f"the parameter {lazy[0]} has no shape yet: its module is a lazy one. Give it its sizes (nn.Linear in place of "
            "nn.LazyLinear), or let build_model() pass one sample through the model before it returns it"
        )


def refuse_hidden_parameters(model: nn.Module) -> None:
    """PyTorch finds parameters and modules that are attributes of a module, not those in a list or dict of it."""
    registered = set(model.parameters())
    for where, parameter in unregistered_parameters(model):
        if parameter.requires_grad and parameter not in registered:
            raise ShardwiseError(
                f"the model holds a parameter of shape {tuple(parameter.shape)} in {where}, where PyTorch does not find it: it "
                "would be neither trained nor saved. Put it into nn.ParameterList, nn.ModuleList or nn.ModuleDict; if it is "
                "not to be trained, freeze it: requires_grad_(False)"
            )


def refuse_shared_memory(model: nn.Module) -> None:
    """Tied by `one.data = other.data`, two parameters are one only until somebody moves one of them, as every strategy does."""
    places: dict[tuple[int, int], tuple[str, bool]] = {}
    for name, parameter in model.named_parameters():
        if type(parameter) is not nn.Parameter or not parameter.numel():
            continue
        other, trained = places.setdefault(memory_of(parameter), (name, parameter.requires_grad))
        if other != name and (trained or parameter.requires_grad):
            raise ShardwiseError(
                f"the parameters {other} and {name} share their memory and are two parameters all the same: they would be "
                f"trained as two, each with its own gradient. If they are to be tied, make them one: model.{name} = "
                f"model.{other}; if not, copy: .data.clone()"
            )


def structure_of(model: nn.Module) -> list[str]:
    """Its parameters and buffers in their order, each in words: what must be alike on all ranks, who pair them by their order."""
    parameters = [
        f"{name} of shape {list(each.shape)}{'' if each.requires_grad else ', frozen'}"
        for name, each in model.named_parameters(remove_duplicate=False)
    ]
    return parameters + [f"buffer {name} of shape {list(each.shape)}" for name, each in model.named_buffers()]


def first_unlike(models: Sequence[Sequence[str]]) -> tuple[int, str] | None:
    """The first rank whose model has another structure than rank 0's, and where it begins to differ, in words."""
    for rank, mine in enumerate(models):
        for number, (own, first) in enumerate(zip_longest(mine, models[0], fillvalue="nothing"), start=1):
            if own != first:
                return rank, f"number {number} of its parameters and buffers is {own}, and {first} on rank 0"
    return None


def refuse_other_models(model: nn.Module, world: World) -> None:
    """Ranks whose models are not built alike would add up gradients of different parameters, or wait for ever."""
    structure = structure_of(model)
    short = hashlib.blake2b(repr(structure).encode(), digest_size=16).hexdigest()
    if len(set(world.gather(short))) == 1:
        return
    found = first_unlike(world.gather(structure))
    assert found is not None
    raise ShardwiseError(
        f"the ranks have not built the same model. On rank {found[0]}, {found[1]}. What is built must not follow from the order "
        "of a set or of the files in a folder, from hash(), from RANK or from the clock: sort what comes out of a set or a folder"
    )


def materialize(model: nn.Module, device: torch.device, *, parameters: torch.device | None = None) -> nn.Module:
    """Move to the device, or the parameters to another; tensors on meta become empty ones. Unlike Module.to_empty, tied
    weights stay tied (torch 2.13 makes a new parameter for each owner), and a buffer that several modules share stays one."""
    home = parameters or device
    moved: dict[int, nn.Parameter] = {}
    shared: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # with the old one, so that its id is not given again
    for module in model.modules():
        for name, parameter in parameters_of(module).items():
            if parameter is None:
                continue
            if id(parameter) not in moved:
                moved[id(parameter)] = _moved(parameter, home)
            parameters_of(module)[name] = moved[id(parameter)]
        for name, buffer in buffers_of(module).items():
            if buffer is not None:
                _, buffers_of(module)[name] = shared.setdefault(id(buffer), (buffer, _on(buffer, device)))
    return model


def low_precision_dtype(training: Training) -> torch.dtype | None:
    """The type that fp32 weights are cast to, to compute with them; None where they are not."""
    return COMPUTE_TYPES[training.precision] if training.precision.endswith("-mixed") else None


def cast_parameters(model: nn.Module, training: Training) -> None:
    """bf16-true keeps the weights in bf16. Buffers stay: statistics and rotary frequencies need their digits."""
    if training.precision == "bf16-true":
        for parameter in model.parameters():
            if parameter.is_floating_point():
                parameter.data = parameter.data.bfloat16()


@dataclass
class Weights:
    """The parameters and buffers that rank 0 made; empty on the others."""

    state: dict[str, Any]
    buffers: dict[str, torch.Tensor]


def rank_zero_weights(build: Build, shape: nn.Module, training: Training, world: World) -> Weights:
    if not world.is_first:
        return Weights({}, {})
    whole = build()
    if whole is shape:  # the caller's own module, already built: spreading will take its tensors apart
        whole = copy.deepcopy(whole)
    cast_parameters(whole, training)
    # What lies otherwise in memory would be sent as it lies, and read as rows (torch 2.13).
    state = {name: _in_rows(value) for name, value in whole.state_dict().items()}
    return Weights(state, dict(whole.named_buffers(remove_duplicate=False)))


def _in_rows(value: Any) -> Any:
    return value.contiguous() if isinstance(value, torch.Tensor) else value


def broadcast_parameters(model: nn.Module, world: World) -> None:
    if world.size > 1:
        for parameter in model.parameters():
            dist.broadcast(parameter.data, src=0)


def broadcast_buffers(model: nn.Module, whole: dict[str, torch.Tensor], world: World) -> None:
    """Buffers come from rank 0 too, those that no state dict carries (rotary frequencies) included."""
    for name, buffer in model.named_buffers():
        if world.is_first:
            buffer.copy_(whole[name_without_wrapper(name)])
        if world.size > 1:
            dist.broadcast(buffer, src=0)


def _attributes(module: nn.Module) -> list[Any]:
    return [value for name, value in vars(module).items() if name not in REGISTERS]


def _holds_meta(value: Any, known: set[nn.Module]) -> bool:
    return any(_is_meta(held, known) for held in held_by(value))


def _is_meta(value: Any, known: set[nn.Module]) -> bool:
    if isinstance(value, nn.Module) and value not in known:
        return any(tensor.is_meta for tensor in [*value.parameters(), *value.buffers()])
    return isinstance(value, torch.Tensor) and value.is_meta


def _moved(parameter: nn.Parameter, home: torch.device) -> nn.Parameter:
    if parameter.device == home:
        return parameter
    if parameter.is_meta or isinstance(parameter, DTensor):
        return nn.Parameter(_on(parameter.data, home), parameter.requires_grad)
    parameter.data = parameter.data.to(home)  # the same one: its module may hold it in a list too, as an LSTM does
    return parameter


def _on(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    return torch.empty_like(tensor, device=device) if tensor.is_meta else tensor.to(device)
