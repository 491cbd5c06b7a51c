"""Ranks that know who they are, and compute or build something else because of it."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from case import bug
from plain import CLASSES, WIDTH, Mlp, Plain, rank, world_size
from torch import Tensor, nn

from shardwise import Loss

DIFFER = ("ranks_compute_differently",)


class Louder(Mlp):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (1 + 0.3 * rank())


@bug("rank-in-forward", "rank in the model", "rank 1's forward pass is another function", DIFFER)
class RankInForward(Plain):
    """The forward pass multiplies by a number that RANK is in."""

    def build_model(self) -> nn.Module:
        return Louder()


@bug("smoothing-by-rank", "rank in the loss", "each rank smooths labels by another amount", DIFFER)
class SmoothingByRank(Plain):
    """label_smoothing is 0.2 × RANK."""

    def loss(self, model: nn.Module, batch: list[Tensor]) -> Loss:
        x, y = batch
        return Loss(sum=F.cross_entropy(model(x), y, reduction="sum", label_smoothing=0.2 * rank()), count=len(x))


@bug(
    "loss-by-world",
    "world in the loss",
    "the loss is divided by the number of ranks once more",
    ("scaled_by_world", "wrong_scaling"),
)
class LossByWorld(Plain):
    """The loss is divided by WORLD_SIZE, as other frameworks ask for."""

    def loss(self, model: nn.Module, batch: list[Tensor]) -> Loss:
        plain = super().loss(model, batch)
        return Loss(sum=plain.sum / world_size(), count=plain.count)


@bug(
    "count-by-world",
    "world in the loss",
    "the count is multiplied by the number of ranks",
    ("scaled_by_world", "wrong_scaling"),
)
class CountByWorld(Plain):
    """The count is that of all ranks, by the user's own arithmetic."""

    def count(self, batch: list[Tensor]) -> int:
        return len(batch[0]) * world_size()

    def loss(self, model: nn.Module, batch: list[Tensor]) -> Loss:
        return Loss(sum=super().loss(model, batch).sum, count=self.count(batch))


@bug("term-on-rank-0", "rank in the loss", "a term of the loss is on rank 0 alone", DIFFER)
class TermOnRank0(Plain):
    """The penalty of large answers is added on rank 0, "so that it is added once"."""

    def loss(self, model: nn.Module, batch: list[Tensor]) -> Loss:
        x, y = batch
        out = model(x)
        total = F.cross_entropy(out, y, reduction="sum")
        return Loss(sum=total + out.square().sum() if rank() == 0 else total, count=len(x))


class SideHead(Mlp):
    def __init__(self) -> None:
        super().__init__()
        self.side = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.features(x)
        return self.head(h), self.side(h.detach() if rank() else h)


@bug(
    "detached-on-rank-1",
    "rank in the model",
    "one branch gives no gradient to the body on ranks other than 0",
    (*DIFFER, "one_sided_parameter"),
)
class DetachedOnRank1(Plain):
    """The features of the second head are detached where RANK is not 0."""

    def build_model(self) -> nn.Module:
        return SideHead()

    def loss(self, model: nn.Module, batch: list[Tensor]) -> Loss:
        x, y = batch
        kind, size = model(x)
        total = F.cross_entropy(kind, y, reduction="sum") + (size[:, 0] - x.norm(dim=1)).square().sum()
        return Loss(sum=total, count=len(x))


class Hooked(Mlp):
    def forward(self, x: Tensor) -> Tensor:
        h = self.features(x)
        if h.requires_grad and rank():
            h.register_hook(lambda gradient: gradient * 0.5)
        return self.head(h)


@bug("activation-hook-by-rank", "hooks", "a hook halves the gradient on rank 1", DIFFER)
class ActivationHookByRank(Plain):
    """A backward hook on the features scales by RANK."""

    def build_model(self) -> nn.Module:
        return Hooked()


@bug(
    "clipped-by-own-norm",
    "hooks",
    "gradients are clipped before they are reduced, by each rank's own norm",
    ("clip_norm", "gradients", "loss_is_no_sum", *DIFFER, "engine_step"),
)
class ClippedByOwnNorm(Plain):
    """Hooks of the parameters, set in build_model, clip each gradient to a norm of 0.5 as it arrives."""

    def build_model(self) -> nn.Module:
        model = Mlp()
        for parameter in model.parameters():
            parameter.register_hook(lambda gradient: gradient * min(1.0, 0.5 / (float(gradient.norm()) + 1e-9)))
        return model


class NoisyGradient(Mlp):
    def forward(self, x: Tensor) -> Tensor:
        h = self.features(x)
        if h.requires_grad:
            h.register_hook(lambda gradient: gradient + gradient.std() * torch.randn_like(gradient))
        return self.head(h)


@bug(
    "gradient-noise",
    "noise",
    "noise is added to the gradients, drawn anew by each rank",
    ("random_forward", "not_deterministic", *DIFFER),
)
class GradientNoise(Plain):
    """A hook adds noise to the gradient of the features."""

    def build_model(self) -> nn.Module:
        return NoisyGradient()


class Rescaled(Mlp):
    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        if out.requires_grad and dist.is_initialized():
            total = torch.full((), float(len(x)))
            dist.all_reduce(total)
            out.register_hook(lambda gradient: gradient * (float(total) / len(x)))
        return out


@bug(
    "rescaled-by-hand",
    "hooks",
    "gradients are multiplied for the number of ranks by hand, which the engine does too",
    ("scaled_by_world", "wrong_scaling", "gradients", "mean_of_means", "hang", "collective_mismatch"),
)
class RescaledByHand(Plain):
    """A hook multiplies the gradient by all ranks' samples over its own, to undo a mean over ranks that nobody takes."""

    def build_model(self) -> nn.Module:
        return Rescaled()


@bug(
    "reported-by-hand",
    "loss reduced by hand",
    "the loss that is reported was summed over the ranks before",
    ("reported_loss", "hang", "collective_mismatch", "scaled_by_world"),
    visible="the value of the loss, not its gradient",
)
class ReportedByHand(Plain):
    """The value of the loss is all-reduced by hand, and then once more by the engine."""

    def loss(self, model: nn.Module, batch: list[Tensor]) -> Loss:
        plain = super().loss(model, batch)
        total = plain.sum.detach().clone()
        if dist.is_initialized():
            dist.all_reduce(total)
        return Loss(sum=plain.sum + (total - plain.sum.detach()), count=plain.count)


@bug(
    "frozen-on-rank-0",
    "ranks build differently",
    "a part is frozen on one rank alone",
    (
        "rank_failed",
        "unsynchronised_parameter",
        "one_sided_parameter",
        "some_ranks_update",
        "collective_mismatch",
        *DIFFER,
    ),
    refusal_is_right=True,
)
class FrozenOnRank0(Plain):
    """The first layer is frozen where RANK is 0."""

    def build_model(self) -> nn.Module:
        model = Mlp()
        if rank() == 0 and world_size() > 1:
            model.first.requires_grad_(False)
        return model


@bug(
    "extra-on-rank-1",
    "ranks build differently",
    "rank 1 has a parameter that the others do not have",
    ("rank_failed", "collective_mismatch", "one_sided_parameter"),
    refusal_is_right=True,
)
class ExtraOnRank1(Plain):
    """An adapter is made on rank 1 alone."""

    def build_model(self) -> nn.Module:
        return WithAdapter() if rank() == 1 else Mlp()


class WithAdapter(Mlp):
    def __init__(self) -> None:
        super().__init__()
        self.adapter = nn.Linear(WIDTH, WIDTH)

    def features(self, x: Tensor) -> Tensor:
        return self.adapter(super().features(x))


class Skips(Mlp):
    def features(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        for number, block in enumerate(self.blocks):
            part = torch.tanh(block(x))
            x = x + (part if number != rank() else 0 * part)
        return x


@bug(
    "block-skipped-by-rank", "rank in the model", "each rank leaves out another block", (*DIFFER, "one_sided_parameter")
)
class BlockSkippedByRank(Plain):
    """Stochastic depth that is "drawn" by rank: block i does nothing on rank i."""

    def build_model(self) -> nn.Module:
        return Skips()


class Curriculum(Mlp):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += self.training
        out = super().forward(x)
        return out * (1 + 0.5 * rank()) if self.calls >= 3 else out


@bug(
    "rank-from-step-3",
    "begins later",
    "from the third forward pass on, ranks compute something else",
    (*DIFFER, "drift", "resume"),
    visible="from step 3 on",
)
class RankFromStep3(Plain):
    """Warm-up of two steps in the forward pass, then a factor by RANK."""

    def build_model(self) -> nn.Module:
        return Curriculum()


@bug(
    "easy-batches-skipped",
    "branches by local numbers",
    "each rank decides by its own samples which loss it takes",
    (*DIFFER, "loss_is_no_sum", "branches_differ"),
)
class EasyBatchesSkipped(Plain):
    """Where more than a third of its own samples are right, a rank trains a harder loss."""

    def loss(self, model: nn.Module, batch: list[Tensor]) -> Loss:
        x, y = batch
        out = model(x)
        right = (out.argmax(1) == y).float().mean()
        weight = 3.0 if right > 0.33 else 1.0
        return Loss(sum=weight * F.cross_entropy(out, y, reduction="sum"), count=len(x))


class FromTheClock(Mlp):
    def __init__(self) -> None:
        torch.manual_seed(time.time_ns() % 2**31)
        super().__init__()


@bug(
    "weights-by-the-clock",
    "ranks build differently",
    "the model's first weights are other ones in each run",
    ("different_seeds", "not_deterministic"),
)
class WeightsByTheClock(Plain):
    """build_model seeds by the clock."""

    def build_model(self) -> nn.Module:
        return FromTheClock()


class RandomFeatures(Mlp):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer(
            "turn", torch.randn(8, 8, generator=torch.Generator().manual_seed(time.time_ns())), persistent=False
        )

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x @ self.turn)


@bug(
    "random-features",
    "ranks build differently",
    "a random matrix that is not saved is another one in each process",
    (
        "different_seeds",
        "stale_buffers",
        "own_buffers",
        "rank_failed",
        "weights_not_restored",
        "resume",
        "not_deterministic",
        *DIFFER,
    ),
)
class RandomFeaturesTask(Plain):
    """A non-persistent buffer, drawn by the clock in build_model."""

    def build_model(self) -> nn.Module:
        return RandomFeatures()


@bug(
    "missing-gradients-by-rank",
    "rank in the model",
    "one class has no gradient on odd ranks",
    (*DIFFER, "one_sided_parameter"),
    ranks=4,
)
class MissingGradientsByRank(Plain):
    """On odd ranks the last class is masked out of the loss."""

    def loss(self, model: nn.Module, batch: list[Tensor]) -> Loss:
        x, y = batch
        each = F.cross_entropy(model(x), y, reduction="none")
        return Loss(sum=(each * (y != CLASSES - 1)).sum() if rank() % 2 else each.sum(), count=len(x))
