"""A network of MONAI by its name and arguments, and whether it does what is asked."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.errors import ConfigError
from shardwise.tasks.segmentation.config import SegmentationModel


@dataclass(frozen=True)
class Shapes:
    """What goes into the network and what must come out."""

    in_channels: int
    out_channels: int
    size: tuple[int, int, int]


def build_network(options: SegmentationModel, shapes: Shapes) -> nn.Module:
    from shardwise.tasks.segmentation.attention import fuse_window_attention

    kind = _kind(options.name)
    arguments = _arguments(options, shapes, inspect.signature(kind).parameters)
    try:
        return fuse_window_attention(kind(**arguments))
    except RuntimeError as error:
        # On the meta device a network that looks at its own numbers fails, and it is not the arguments' fault.
        if torch.get_default_device().type == "meta":
            raise
        raise _refused(options.name, error) from error
    except Exception as error:
        raise _refused(options.name, error) from error


def check_network(options: SegmentationModel, shapes: Shapes) -> None:
    """Tried once on PyTorch's meta device, where shapes are computed and numbers are not: it takes milliseconds."""
    network = _on_meta(options, shapes)
    # Two, because batch norm refuses a single value per channel; how many there will be is not the network's matter.
    image = torch.empty(2, shapes.in_channels, *shapes.size, device="meta")
    sides = "×".join(map(str, shapes.size))
    try:
        with torch.no_grad():
            found = network(image)
    except NotImplementedError:
        return  # an operation that the meta device does not have: the first step will tell
    except Exception as error:
        reason = str(error).strip().splitlines()[0]
        raise ConfigError(
            f"data.size: {options.name} cannot take volumes of {sides} voxels.{_advice(options, shapes)} MONAI says: {reason}"
        ) from error
    wanted = (shapes.out_channels, *shapes.size)
    if not isinstance(found, Tensor) or tuple(found.shape[1:]) != wanted:
        got = f"a tensor of {tuple(found.shape[1:])}" if isinstance(found, Tensor) else f"a {type(found).__name__}"
        raise ConfigError(
            f"model.name: {options.name} gives {got} where {wanted} is needed (channels, then voxels): with these arguments "
            "it does not segment"
        )


def network_blocks(model: nn.Module) -> list[nn.Module]:
    """The members of the outermost lists, and the parts that hold no list: SwinUNETR's stages and its decoders."""
    blocks: list[nn.Module] = []
    for child in model.children():
        if isinstance(child, nn.ModuleList):
            blocks += [member for member in child if any(True for _ in member.parameters())]
        elif any(isinstance(module, nn.ModuleList) for module in child.modules()):
            blocks += network_blocks(child)
        elif any(True for _ in child.parameters()):
            blocks.append(child)
    return blocks


def network_regions(model: nn.Module) -> list[nn.Module]:
    """A network of convolutions as a whole: its parts come in so many sizes that they would compile no faster each on its
    own, and run slower. Where there is attention within windows, the code that cuts and moves these is long, and attention
    is one kernel already: there, the convolutions around it."""
    from shardwise.tasks.segmentation.attention import attends_within_windows

    if not attends_within_windows(model):
        return [model]
    return [block for block in network_blocks(model) if not attends_within_windows(block)]


def _kind(name: str) -> type[nn.Module]:
    networks = _networks()
    if name in networks:
        return networks[name]
    by_lower = {other.lower(): other for other in networks}
    near = difflib.get_close_matches(name.lower(), by_lower, n=4, cutoff=0.5)
    names = [by_lower[match] for match in near] or ["SegResNet", "SwinUNETR", "UNet", "DynUNet"]
    raise ConfigError(f"model.name: MONAI has no network {name!r}. Nearest: {', '.join(names)}")


def _arguments(
    options: SegmentationModel, shapes: Shapes, parameters: Mapping[str, inspect.Parameter]
) -> dict[str, Any]:
    accepted = [name for name in parameters if name not in ("args", "kwargs")]
    if unknown := [name for name in options.args if name not in accepted]:
        near = difflib.get_close_matches(unknown[0], accepted, n=1)
        hint = f" Nearest: {near[0]}." if near else ""
        raise ConfigError(f"model.args: {options.name} takes no {unknown[0]!r}.{hint} It takes {', '.join(accepted)}")
    from_data = {
        "spatial_dims": 3,
        "in_channels": shapes.in_channels,
        "out_channels": shapes.out_channels,
        "img_size": list(shapes.size),
    }
    arguments = {name: value for name, value in from_data.items() if name in accepted} | options.args
    needed = [name for name in accepted if parameters[name].default is inspect.Parameter.empty]
    if missing := [name for name in needed if name not in arguments]:
        raise ConfigError(f"model.args: {options.name} also needs {', '.join(missing)}")
    return arguments


def _networks() -> dict[str, type[nn.Module]]:
    from monai.networks import nets

    kinds = {name: kind for name, kind in vars(nets).items() if isinstance(kind, type) and issubclass(kind, nn.Module)}
    # MONAI has several spellings of most: the class's own is the one to suggest, so it comes last in a dictionary by lower case.
    return dict(sorted(kinds.items(), key=lambda item: item[0] == item[1].__name__))


def _on_meta(options: SegmentationModel, shapes: Shapes) -> nn.Module:
    try:
        with torch.device("meta"):
            return build_network(options, shapes)
    except ConfigError:
        raise
    except Exception:
        return build_network(options, shapes).to("meta")


def _refused(name: str, error: Exception) -> ConfigError:
    return ConfigError(f"model.args: {name} refuses these arguments: {type(error).__name__}: {error}")


def _advice(options: SegmentationModel, shapes: Shapes) -> str:
    if options.name == "SwinUNETR":
        if any(side % 32 for side in shapes.size):
            rounded = [max(32, round(side / 32) * 32) for side in shapes.size]
            return f" Every side must be divisible by 32, for example {rounded}."
        return " Use at least 64 in one direction."
    if options.name == "SegResNet":
        halvings = len(options.args.get("blocks_down", (1, 2, 2, 4))) - 1
        return f" Every side must be divisible by {2**halvings}, for it is halved {halvings} times."
    return ""
