"""State in the wrong place: attributes, globals and buffers that change what the next step computes."""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from case import bug
from plain import CLASSES, WIDTH, Mlp, Plain, points, rank
from torch import Tensor, nn

from shardwise import Loss

LOCAL = ("hidden_state", "own_buffers", "stale_buffers", "ranks_compute_differently", "loss_is_no_sum", "drift")
LOST = ("hidden_state", "resume")

LAST = {"loss": 1.0}


@bug(
    "running-mean-attribute",
    "plain attributes",
    "a mean that each rank keeps for itself, of its own samples, is in the loss",
    (*LOCAL, *LOST),
)
class RunningMeanAttribute(Plain):
    """Inputs are centred by a running mean that is an attribute of the task."""

    mean = torch.zeros(8)

    def loss(self, model: nn.Module, batch: list[Tensor]) -> Loss:
        x, y = batch
        self.mean = 0.5 * self.mean + 0.5 * x.mean(0)
        return super().loss(model, [x - self.mean, y])


@bug(
    "fitted-on-first-batch",
    "plain attributes",
    "each rank fits the normaliser on its own first micro-batch",
    (*LOCAL, *LOST),
)
class FittedOnFirstBatch(Plain):
    """A normaliser is fitted on the first micro-batch that comes, and kept."""

    scale: Tensor | None = None

    def loss(self, model: nn.Module, batch: list[Tensor]) -> Loss:
        x, y = batch
        if self.scale is None:
            self.scale = x.abs().amax(0)
        return super().loss(model, [x / self.scale, y])


class Cooling(Mlp):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x) * (1 + 0.3 * self.calls)
        self.calls += self.training
        return out


@bug(
    "temperature-counter",
    "counters",
    "a counter of calls, which no checkpoint has, is in the forward pass",
    (*LOST, "drift", "weights_not_restored"),
    visible="after a resume, and on a rank that has no samples in a step",
)
class TemperatureCounter(Plain):
    """The temperature falls with the number of forward passes, counted in a plain attribute."""

    def build_model(self) -> nn.Module:
        return Cooling()


@bug(
    "counter-accumulated",
    "counters",
    "the forward pass depends on how many micro-batches came before",
    ("hidden_state", "drift", "resume", "loss_is_no_sum", "random_forward", "engine_step"),
    gradient_accumulation=2,
)
class CounterAccumulated(Plain):
    """The same with accumulation: a step of two micro-batches counts twice."""

    def build_model(self) -> nn.Module:
        return Cooling()


class KeptCounter(Mlp):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x) * (1 + 0.3 * self.calls)
        if self.training:
            self.calls += 1
        return out


@bug(
    "counter-buffer",
    "counters",
    "the forward pass depends on how many micro-batches came before",
    ("drift", "own_buffers", "loss_is_no_sum", "stale_buffers", "random_forward", "engine_step"),
    gradient_accumulation=2,
    visible="with accumulation: it resumes well",
)
class CounterBuffer(Plain):
    """A counter of micro-batches, saved as a buffer, sets the temperature: half as many steps with accumulation 2."""

    def build_model(self) -> nn.Module:
        return KeptCounter()


@bug(
    "first-seen-cache",
    "plain attributes",
    "each rank remembers what it saw of its own samples, and trains towards that",
    (*LOCAL, *LOST),
    visible="from the second epoch on, and after a resume",
)
class FirstSeenCache(Plain):
    """Answers are drawn towards those of the first time this process saw the sample."""

    def __init__(self, config) -> None:
        super().__init__(config)
        self.first: dict[float, Tensor] = {}

    def loss(self, model: nn.Module, batch: list[Tensor]) -> Loss:
        x, y = batch
        out = model(x)
        if not model.training:
            return Loss(sum=F.cross_entropy(out, y, reduction="sum"), count=len(x))
        missing = 3 * torch.ones(CLASSES)
        goal = torch.stack([self.first.get(float(one[0]), missing) for one in x])
        for one, answer in zip(x, out.detach(), strict=True):
            self.first.setdefault(float(one[0]), answer)
        return Loss(sum=F.cross_entropy(out, y, reduction="sum") + (out - goal).square().sum(), count=len(x))


class Centred(Mlp):
    """DINO's centre."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("centre", torch.zeros(CLASSES))

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        if self.training:
            with torch.no_grad():
                self.centre.lerp_(out.detach().mean(0), 0.5)
        return (out - self.centre) * 4


@bug(
    "centre-buffer",
    "buffers of own samples",
    "a buffer that follows a rank's own samples is in the loss",
    ("own_buffers", "loss_is_no_sum"),
)
class CentreBuffer(Plain):
    """Answers are centred by a running mean over the rank's own micro-batches."""

    def build_model(self) -> nn.Module:
        return Centred()


class Prototypes(Mlp):
    """VQ-VAE's codes, by moving averages."""

    def __init__(self) -> None:
        super().__init__(out=6)
        self.register_buffer("codes", torch.randn(5, 6))

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        nearest = torch.cdist(out.detach(), self.codes).argmin(1)
        loss = (out - self.codes[nearest]).square().sum()
        if self.training:
            with torch.no_grad():
                for code in nearest.unique():
                    self.codes[code] = 0.5 * self.codes[code] + 0.5 * out.detach()[nearest == code].mean(0)
        return loss


@bug(
    "codebook",
    "buffers of own samples",
    "codes are moved by each rank's own samples, and are in the loss",
    ("own_buffers", "loss_is_no_sum", "stale_buffers"),
)
class Codebook(Plain):
    """A codebook is updated by moving averages of the rank's own micro-batches."""

    def build_model(self) -> nn.Module:
        return Prototypes()

    def loss(self, model: nn.Module, batch: list[Tensor]) -> Loss:
        return Loss(sum=model(batch[0]), count=len(batch[0]))


class Queue(Mlp):
    """MoCo's queue of negatives."""

    def __init__(self) -> None:
        super().__init__(out=6)
        self.register_buffer("queue", torch.randn(32, 6))

    def forward(self, x: Tensor) -> Tensor:
        out = F.normalize(super().forward(x), dim=1)
        away = F.normalize(self.queue.clone(), dim=1)
        if self.training:
            with torch.no_grad():
                self.queue.copy_(torch.cat([out.detach(), self.queue])[:32])
        return (5 * out @ away.T).logsumexp(1).sum()


@bug(
    "queue",
    "buffers of own samples",
    "the negatives are each rank's own last samples",
    ("own_buffers", "loss_is_no_sum", "order_matters", "stale_buffers"),
)
class MomentumQueue(Plain):
    """Negatives come from a queue of the rank's own last samples."""

    def build_model(self) -> nn.Module:
        return Queue()

    def loss(self, model: nn.Module, batch: list[Tensor]) -> Loss:
        return Loss(sum=model(batch[0]), count=len(batch[0]))


class Student(Mlp):
    def __init__(self) -> None:
        super().__init__()
        self.teacher = nn.Linear(8, CLASSES).requires_grad_(False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        if self.training and rank() == 0:
            with torch.no_grad():
                self.teacher.weight.lerp_(self.head.weight[:, :8].detach(), 0.3)
        return super().forward(x), self.teacher(x).detach()


@bug(
    "teacher-on-rank-0",
    "state of rank 0",
    "the teacher moves on rank 0 alone",
    ("hidden_state", "ranks_compute_differently", "stale_buffers", "own_buffers", "some_ranks_update", "drift"),
)
class TeacherOnRank0(Plain):
    """A teacher follows the student on rank 0 and is distilled from on every rank."""

    def build_model(self) -> nn.Module:
        return Student()

    def loss(self, model: nn.Module, batch: list[Tensor]) -> Loss:
        x, y = batch
        out, goal = model(x)
        return Loss(sum=F.cross_entropy(out, y, reduction="sum") + 3 * (out - goal).square().sum(), count=len(x))


@bug("last-loss-global", "globals", "each rank's last own loss, kept in a global, weighs the next one", (*LOCAL, *LOST))
class LastLossGlobal(Plain):
    """The loss is divided by the last one, which is a variable of the module."""

    def loss(self, model: nn.Module, batch: list[Tensor]) -> Loss:
        plain = super().loss(model, batch)
        weighed = plain.sum / LAST["loss"]
        LAST["loss"] = float(plain.sum.detach()) / plain.count
        return Loss(sum=weighed, count=plain.count)


@bug(
    "batch-changed-in-place",
    "plain attributes",
    "the data change when they are trained on",
    ("data_change", "resume", "drift"),
    visible="from the second epoch on, and after a resume",
)
class BatchChangedInPlace(Plain):
    """The micro-batch is a list of the stored tensors, and the loss scales them in place."""

    def collate(self, samples: list[tuple[Tensor, Tensor]]):
        return [x for x, _ in samples], torch.stack([y for _, y in samples])

    def count(self, batch) -> int:
        return len(batch[1])

    def loss(self, model: nn.Module, batch) -> Loss:
        samples, y = batch
        for x in samples:
            x.mul_(0.5)
        return super().loss(model, [torch.stack(samples), y])


class ActNorm(nn.Module):
    """Scale and shift are parameters; the first micro-batch sets them."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.ones(WIDTH)), nn.Parameter(torch.zeros(WIDTH))
        self.ready = False

    def forward(self, x: Tensor) -> Tensor:
        if self.training and not self.ready:
            self.ready = True
            with torch.no_grad():
                self.shift.copy_(-x.detach().mean(0))
                self.scale.copy_(1 / (x.detach().std(0, unbiased=False) + 0.1))
        return (x + self.shift) * self.scale


@bug(
    "set-by-first-batch",
    "lazy parameters",
    "each rank sets a parameter by its own first micro-batch",
    (*LOCAL, "different_seeds", "some_ranks_update", "unsynchronised_parameter", "resume", "weights_not_restored"),
)
class SetByFirstBatch(Plain):
    """Activation norm: its parameters are set by the first micro-batch of each rank, again after each resume."""

    def build_model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(8, WIDTH), ActNorm(), nn.Tanh(), nn.Linear(WIDTH, CLASSES))


class Late(Mlp):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def features(self, x: Tensor) -> Tensor:
        self.calls += self.training
        x = super().features(x)
        if self.calls >= 2 and not hasattr(self, "late"):
            self.late = nn.Linear(WIDTH, WIDTH)
        return x + self.late(x) if hasattr(self, "late") else x


@bug(
    "late-layer",
    "lazy parameters",
    "a layer is made in the second step: nobody synchronises, updates or saves it",
    (
        "unsynchronised_parameter",
        "ranks_compute_differently",
        "resume",
        "drift",
        "detached_parameter",
        "not_deterministic",
        "different_seeds",
    ),
    visible="from step 2 on",
)
class LateLayer(Plain):
    """A layer is made in the second forward pass, with weights of each rank's own."""

    def build_model(self) -> nn.Module:
        return Late()


class CopiedHead(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.middle, self.head = nn.Embedding(16, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 16)

    def forward(self, words: Tensor) -> Tensor:
        if self.training and rank() == 0:
            self.head.weight.data.copy_(self.embed.weight.data)
        return self.head(torch.tanh(self.middle(self.embed(words))))


@bug(
    "tied-by-copying",
    "state of rank 0",
    "rank 0 overwrites a weight that the other ranks train",
    ("some_ranks_update", "ranks_compute_differently", "drift", "stale_buffers", "different_seeds", "gradients"),
)
class TiedByCopying(Plain):
    """The head is made equal to the embedding by copying, on rank 0: "DDP sends it to the others"."""

    def train_data(self):
        x, y = points(self.config.seed, self.samples)
        return list(zip((x[:, 0] * 100).long() % 16, y, strict=True))

    def valid_data(self):
        return None

    def build_model(self) -> nn.Module:
        return CopiedHead()


class HandDropout(Mlp):
    def features(self, x: Tensor) -> Tensor:
        x = super().features(x)
        if not self.training:
            return x
        keep = np.random.rand(*x.shape) > 0.3
        return x * torch.from_numpy(keep) / 0.7


@bug("dropout-by-numpy", "noise", "the forward pass draws from numpy", ("random_forward", "not_deterministic"))
class DropoutByNumpy(Plain):
    """Dropout by hand, with numpy.random."""

    def build_model(self) -> nn.Module:
        return HandDropout()


class OwnGenerator(Mlp):
    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(0)

    def features(self, x: Tensor) -> Tensor:
        x = super().features(x)
        noise = torch.randn(x.shape, generator=self.generator) if self.training else torch.zeros(x.shape)
        return x + 0.5 * noise


@bug(
    "own-generator",
    "noise",
    "the forward pass draws from a generator of its own, which no checkpoint has",
    ("random_forward", "order_matters", "not_deterministic", "resume", "loss_is_no_sum"),
)
class OwnGeneratorTask(Plain):
    """Noise from a torch.Generator that the model keeps, the same one on every rank."""

    def build_model(self) -> nn.Module:
        return OwnGenerator()


class DropPath(Mlp):
    def features(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        for block in self.blocks:
            if not self.training or torch.rand(()) > 0.3:
                x = x + torch.tanh(block(x))
            else:
                x = x + 0 * block(x)
        return x


@bug(
    "drop-path-per-batch",
    "noise",
    "whole blocks are left out at random, drawn by each rank",
    ("random_forward", "ranks_compute_differently", "not_deterministic"),
)
class DropPathPerBatch(Plain):
    """Stochastic depth by hand, drawn once per micro-batch."""

    def build_model(self) -> nn.Module:
        return DropPath()
