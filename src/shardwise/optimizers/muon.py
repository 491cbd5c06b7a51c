"""Muon for the matrices inside the model's blocks, AdamW for all else: embeddings, heads, norms, biases, convolutions.

Muon makes the update of a matrix orthogonal. One rate serves both: Muon's is scaled so that its updates are as large as AdamW's
(`match_rms_adamw`), and weight decay is that of AdamW.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from shardwise.errors import ConfigError
from shardwise.optimizers.rule import UpdateRule, fused


class MuonBesideAdamW(torch.optim.Optimizer):
    """PyTorch's own two, as one: their groups and their state are those of this one. A group says by `muon` whose it is."""

    def __init__(self, params: Any, lr: float, muon: dict[str, Any], adamw: dict[str, Any]) -> None:
        super().__init__(params, {"lr": lr, "muon": False})
        if not self._groups(muon=True):
            raise ConfigError(
                "optimizer muon has nothing to update: the model's repeated blocks have no matrices (the task's blocks(model) "
                "names them, by default the longest ModuleList). Use training.optimizer.name: adamw"
            )
        # Either puts its settings into the groups that it is given.
        self._muon = torch.optim.Muon(self._groups(muon=True), lr=lr, **muon)
        rest = self._groups(muon=False)
        self._adamw = torch.optim.AdamW(rest, lr=lr, **adamw) if rest else None

    def _groups(self, *, muon: bool) -> list[dict[str, Any]]:
        return [group for group in self.param_groups if group["muon"] is muon]

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for part, muon in ((self._muon, True), (self._adamw, False)):
            if part is not None:
                # Every time: a checkpoint that is loaded brings new ones.
                part.param_groups, part.state = self._groups(muon=muon), self.state
                part.step()
        return loss


class Muon(UpdateRule):
    name = "muon"
    kind = MuonBesideAdamW

    def settings(self, parameters: Sequence[nn.Parameter]) -> dict[str, Any]:
        first, second = self.options.betas
        return {
            "muon": {"momentum": self.options.muon_momentum, "adjust_lr_fn": "match_rms_adamw"},
            "adamw": {"betas": (first, second), "eps": self.options.eps, "fused": fused(parameters)},
        }

    def group_settings(
        self, module: nn.Module, name: str, parameter: nn.Parameter, *, in_block: bool, decays: bool
    ) -> dict[str, Any]:
        # By its name: a table of positions in a block is no weight that anything is multiplied with.
        weight = name.endswith("weight") and not isinstance(module, nn.Embedding)
        return {"muon": in_block and decays and weight and parameter.ndim == 2}

    @property
    def moments(self) -> int:
        """At most: AdamW's part has two, Muon's one."""
        return 2

    def refusals(self, *, whole: bool) -> Iterator[str]:
        if not whole:
            yield (
                "optimizer muon needs whole matrices, and here every rank has a part of each: use strategy ddp or zero1, or "
                "training.optimizer.name: adamw"
            )
