"""What a model's builder has put on its parameters: attributes and hooks. A strategy puts other parameters in their place,
and these get the same."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from shardwise.compat.distributed import name_without_wrapper
from shardwise.compat.tensors import (
    after_accumulation_of,
    gradient_hooks_of,
    put_after_accumulation,
    put_gradient_hooks,
)
from shardwise.errors import ConfigError

Hooks = dict[int, Any]


@dataclass(frozen=True)
class _Marks:
    attributes: dict[str, Any]
    on_gradient: Hooks | None
    """`register_hook`: called with the gradient before it is added up; may return another."""
    after_accumulation: Hooks | None
    """`register_post_accumulate_grad_hook`: called with the parameter, when it has its gradient."""


class ParameterMarks:
    def __init__(self, model: nn.Module) -> None:
        """`model`: as it was built, or its shape."""
        self._by_name = {
            name: _Marks(dict(vars(parameter)), gradient_hooks_of(parameter), after_accumulation_of(parameter))
            for name, parameter in model.named_parameters(remove_duplicate=False)
        }

    @property
    def hooked(self) -> list[str]:
        """Parameters with hooks of either kind."""
        return [name for name, marks in self._by_name.items() if marks.on_gradient or marks.after_accumulation]

    def put_on(self, model: nn.Module) -> None:
        """The parameters that are in their place now. The hooks stay the same ones, so that their handles still remove them."""
        for wrapped, parameter in model.named_parameters(remove_duplicate=False):
            marks = self._by_name.get(name_without_wrapper(wrapped))
            if marks is None:
                continue
            for key, value in marks.attributes.items():
                if key not in vars(parameter):
                    setattr(parameter, key, value)
            if marks.on_gradient and gradient_hooks_of(parameter) is not marks.on_gradient:
                put_gradient_hooks(parameter, marks.on_gradient)
            if marks.after_accumulation and after_accumulation_of(parameter) is not marks.after_accumulation:
                put_after_accumulation(parameter, marks.after_accumulation)

    def refuse_gradient_hooks(self, strategy: str) -> None:
        """Where no rank ever sees the whole gradient of all samples, nor calls such a hook."""
        names = [name for name, marks in self._by_name.items() if marks.on_gradient]
        if names:
            raise ConfigError(
                f"strategy {strategy} cannot call the hooks that build_model puts on gradients by register_hook, here of "
                f"{_listed(names)}: it shards the parameter that they were put on. Use ddp or zero1, or "
                "register_post_accumulate_grad_hook: under fsdp it is called with each rank's part of the reduced gradient"
            )

    def refuse_hooks(self, why: str) -> None:
        if self.hooked:
            raise ConfigError(
                f"{why} does not call the hooks that build_model puts on parameters, here on {_listed(self.hooked)}"
            )


def _listed(names: list[str]) -> str:
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
