"""Evaluation that changes what is trained, and metrics that depend on the ranks."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from case import bug
from plain import CLASSES, WIDTH, Mlp, Plain, rank
from torch import Tensor, nn

from shardwise import Loss

CHANGES = "evaluation changes the run: with another number of evaluations, other weights come out"
METRIC = "a metric depends on how the validation samples are shared out"


def right(model: nn.Module, batch: list[Tensor]) -> Tensor:
    return (model(batch[0]).argmax(1) == batch[1]).float()


@bug(
    "weights-rounded",
    "evaluation changes weights",
    CHANGES,
    ("evaluation_changes", "drift", "resume"),
    eval_every_n_steps=2,
    eval_at_start=False,
)
class WeightsRounded(Plain):
    """The weights are rounded to an eighth before evaluation, "as they will be deployed", and stay so."""

    def evaluate(self, model: nn.Module, batch: list[Tensor]) -> dict[str, Loss]:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_((parameter * 8).round() / 8)
        return {"loss": self.loss(model, batch)}


@bug(
    "statistics-move",
    "evaluation changes buffers",
    CHANGES,
    ("evaluation_changes", "stale_buffers", "drift", "resume"),
    eval_every_n_steps=2,
    eval_at_start=False,
)
class StatisticsMove(Plain):
    """`evaluate` switches to train mode: running statistics of batch norm take in the validation samples."""

    def build_model(self) -> nn.Module:
        return nn.Sequential(
            nn.Linear(8, WIDTH), nn.BatchNorm1d(WIDTH, momentum=0.5), nn.Tanh(), nn.Linear(WIDTH, CLASSES)
        )

    def evaluate(self, model: nn.Module, batch: list[Tensor]) -> dict[str, Loss]:
        model.train()
        return {"loss": self.loss(model, batch)}


class Remembering(Mlp):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("centre", torch.zeros(WIDTH))

    def features(self, x: Tensor) -> Tensor:
        x = super().features(x)
        if not self.training:
            with torch.no_grad():
                self.centre.copy_(x.mean(0))
        return x - self.centre


@bug(
    "centre-set-by-evaluation",
    "evaluation changes buffers",
    CHANGES,
    ("evaluation_changes", "own_buffers", "stale_buffers", "drift", "resume"),
    eval_every_n_steps=2,
    eval_at_start=False,
)
class CentreSetByEvaluation(Plain):
    """The features are centred by the mean of the last validation micro-batch that this rank saw."""

    def build_model(self) -> nn.Module:
        return Remembering()


@bug(
    "flag-left",
    "evaluation leaves its mode",
    CHANGES,
    ("evaluation_changes", "drift", "resume", "engine_step"),
    eval_every_n_steps=2,
    eval_at_start=False,
)
class FlagLeft(Plain):
    """`evaluate` switches label smoothing off by a flag, and never on again."""

    smoothing = 0.5

    def loss(self, model: nn.Module, batch: list[Tensor]) -> Loss:
        x, y = batch
        return Loss(sum=F.cross_entropy(model(x), y, reduction="sum", label_smoothing=self.smoothing), count=len(x))

    def evaluate(self, model: nn.Module, batch: list[Tensor]) -> dict[str, Loss]:
        self.smoothing = 0.0
        return {"loss": self.loss(model, batch)}


@bug(
    "reseeded",
    "evaluation changes random state",
    CHANGES,
    ("evaluation_changes", "drift", "resume", "not_deterministic"),
    visible="where dropout is on",
    eval_every_n_steps=2,
    eval_at_start=False,
)
class Reseeded(Plain):
    """`evaluate` seeds torch anew, so that dropout draws the same masks after each evaluation."""

    def build_model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(8, WIDTH), nn.Tanh(), nn.Dropout(0.4), nn.Linear(WIDTH, CLASSES))

    def evaluate(self, model: nn.Module, batch: list[Tensor]) -> dict[str, Loss]:
        torch.manual_seed(0)
        return {"loss": self.loss(model, batch)}


@bug(
    "frozen-after-evaluation",
    "evaluation leaves its mode",
    CHANGES,
    ("evaluation_changes", "drift", "resume", "detached_parameter", "rank_failed"),
    visible="from the first evaluation on",
    eval_every_n_steps=2,
    eval_at_start=False,
)
class FrozenAfterEvaluation(Plain):
    """`evaluate` freezes the first layer to save memory, and does not free it again."""

    def evaluate(self, model: nn.Module, batch: list[Tensor]) -> dict[str, Loss]:
        for name, parameter in model.named_parameters():
            if "first" in name:
                parameter.requires_grad_(False)
        return {"loss": self.loss(model, batch)}


@bug("metric-of-rank-0", "metric of one rank", METRIC, ("metric_differs", "metric_of_some_ranks"))
class MetricOfRank0(Plain):
    """Accuracy is counted on rank 0 alone."""

    def evaluate(self, model: nn.Module, batch: list[Tensor]) -> dict[str, Loss]:
        hits = right(model, batch)
        mine = rank() == 0
        return {"loss": self.loss(model, batch), "accuracy": Loss(sum=hits.sum() * mine, count=len(hits) * mine)}


@bug(
    "metric-missing-on-rank-1",
    "metric of one rank",
    "the ranks do not return the same metrics",
    ("collective_mismatch", "rank_failed", "hang", "branches_differ", "metric_differs", "metric_of_some_ranks"),
    refusal_is_right=True,
)
class MetricMissingOnRank1(Plain):
    """Only rank 0 returns the accuracy."""

    def evaluate(self, model: nn.Module, batch: list[Tensor]) -> dict[str, Loss]:
        metrics = {"loss": self.loss(model, batch)}
        if rank() == 0:
            hits = right(model, batch)
            metrics["accuracy"] = Loss(sum=hits.sum(), count=len(hits))
        return metrics


@bug(
    "metric-mean-of-means",
    "metric by batch",
    METRIC,
    ("mean_of_means", "metric_differs"),
    visible="52 validation samples in micro-batches of 8: the last is smaller",
)
class MetricMeanOfMeans(Plain):
    """Accuracy is a mean per micro-batch that counts as one."""

    def evaluate(self, model: nn.Module, batch: list[Tensor]) -> dict[str, Loss]:
        return {"loss": self.loss(model, batch), "accuracy": Loss(sum=right(model, batch).mean(), count=1)}


@bug(
    "metric-of-the-past",
    "metric by state",
    "a metric depends on the evaluations before, and is lost with the process",
    ("evaluation_random",),
)
class MetricOfThePast(Plain):
    """Hits are added up in an attribute that is never set to zero."""

    hits, seen = 0.0, 0

    def evaluate(self, model: nn.Module, batch: list[Tensor]) -> dict[str, Loss]:
        hits = right(model, batch)
        self.hits, self.seen = self.hits + float(hits.sum()), self.seen + len(hits)
        return {"loss": self.loss(model, batch), "accuracy": Loss(sum=torch.tensor(self.hits), count=self.seen)}


@bug("metric-by-own-median", "metric by batch", METRIC, ("metric_differs", "metric_of_some_ranks"))
class MetricByOwnMedian(Plain):
    """How far each answer is above the median of its micro-batch."""

    def evaluate(self, model: nn.Module, batch: list[Tensor]) -> dict[str, Loss]:
        top = model(batch[0]).amax(1)
        above = (top - top.median()).clamp(min=0)
        return {"loss": self.loss(model, batch), "above": Loss(sum=above.sum(), count=len(above))}


@bug(
    "noise-in-evaluation",
    "metric by state",
    "evaluation is random: two evaluations of the same weights do not agree",
    ("random_forward", "not_deterministic", "evaluation_random", "metric_differs"),
)
class NoiseInEvaluation(Plain):
    """Validation samples are augmented anew in `evaluate`."""

    def evaluate(self, model: nn.Module, batch: list[Tensor]) -> dict[str, Loss]:
        return {"loss": self.loss(model, [batch[0] + torch.randn_like(batch[0]), batch[1]])}
