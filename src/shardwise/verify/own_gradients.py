"""The gradients that a rank computes from its own samples, caught on their way before the ranks reduce them."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

from shardwise.verify.names import canonical


class OwnGradients:
    """Listens from its making until `stop`. Of parameters that are parts of matrices (strategy tensor) it hears nothing."""

    def __init__(self, module: nn.Module) -> None:
        self.found: dict[str, Tensor] = {}
        self._heard: dict[int, Tensor] = {}
        self._handles: list[RemovableHandle] = []
        every = [*module.named_parameters(remove_duplicate=False)]
        first = {id(parameter): name for name, parameter in reversed(every)}
        self._first_name = {canonical(name): canonical(first[id(parameter)]) for name, parameter in every}
        for name, parameter in module.named_parameters():
            self._listen(name, parameter)
        # A sharded parameter is whole, and a narrow copy in place, only while its module computes.
        for path, each in module.named_modules():
            self._handles.append(each.register_forward_pre_hook(partial(self._before_forward, path)))

    def stop(self, scale: float) -> dict[str, Tensor]:
        """What was heard, by name; `scale` is what the loss was multiplied by."""
        for handle in self._handles:
            handle.remove()
        self._heard.clear()
        return {name: each / scale for name, each in self.found.items()}

    def _before_forward(self, path: str, module: nn.Module, args: Any) -> None:
        for name, parameter in module.named_parameters(path):
            self._listen(name, parameter)

    def _listen(self, name: str, parameter: Tensor) -> None:
        if isinstance(parameter, DTensor) or not parameter.requires_grad or id(parameter) in self._heard:
            return
        if canonical(name) not in self._first_name:  # a forward pass has made it
            return
        self._heard[id(parameter)] = parameter  # kept, so that no other gets its id
        # A tied weight is called by its first name, whichever module comes first in the forward pass.
        self._handles.append(parameter.register_hook(partial(self._add, self._first_name[canonical(name)])))

    def _add(self, name: str, gradient: Tensor) -> None:
        mine = gradient.detach().float().cpu()
        self.found[name] = self.found[name] + mine if name in self.found else mine.clone()
