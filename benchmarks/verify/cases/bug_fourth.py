"""Planted bugs, a fourth set: mistakes of somebody who moves a training from one device to many ranks."""

from __future__ import annotations

import os
import random
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from case import ACCUMULATE, BF16, UNUSED, bug, loop
from plain import CLASSES, PAD, WIDTH, Mlp, Plain, Sentences, pad, points, rank, world_size
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.data import Dataset, default_collate

from shardwise import Loss, Rows, gather_batch


def made(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def rows(*columns: Tensor) -> list[tuple[Tensor, ...]]:
    return list(zip(*columns, strict=True))


def entropy(logits: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(logits, y, reduction="sum")


# Correct tasks that the bugs below change


class Number(Plain):
    """One number from eight."""

    def numbers(self, seed: int, number: int) -> list[tuple[Tensor, ...]]:
        x, _ = points(seed, number)
        return rows(x, x[:, :1].cos() * 2 + x[:, 4:5] * x[:, 5:6])

    def train_data(self):
        return self.numbers(self.config.seed, self.samples)

    def valid_data(self):
        return self.numbers(self.config.seed + 1000, 52)

    def build_model(self) -> nn.Module:
        return Mlp(out=1)

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        x, y = batch
        return Loss(sum=(model(x) - y).square().sum(), count=len(x))


class WithFeatures(Mlp):
    """The answers and what they were made from."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        features = self.features(x)
        return self.head(features), features


class Depth(Plain):
    """How far away each pixel of a tiny picture is."""

    def pictures(self, seed: int, number: int) -> list[tuple[Tensor, ...]]:
        x = torch.rand(number, 1, 6, 6, generator=made(seed))
        return rows(x, 1.0 + 4.0 * F.avg_pool2d(x, 3, stride=1, padding=1) + x)

    def train_data(self):
        return self.pictures(self.config.seed, self.samples)

    def valid_data(self):
        return self.pictures(self.config.seed + 1000, 52)

    def build_model(self) -> nn.Module:
        return nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.GELU(), nn.Conv2d(8, 1, 3, padding=1), nn.Softplus())

    def errors(self, model: nn.Module, batch: Any) -> Tensor:
        x, depth = batch
        return (model(x) + 0.1).log() - depth.log()

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        errors = self.errors(model, batch).flatten(1)
        return Loss(sum=(errors.square().mean(1) - 0.5 * errors.mean(1).square()).sum(), count=len(errors))


# What one sample's loss takes from the others of its micro-batch


@bug(
    "fourth-smoothing-by-own-labels",
    "chosen within a batch",
    "labels are smoothed towards how often each class is in the micro-batch",
    ["loss_is_no_sum"],
)
class SmoothingByOwnLabels(Plain):
    """Labels are smoothed towards the classes of the micro-batch, "their prior"."""

    def loss(self, model, batch):
        x, y = batch
        truth = F.one_hot(y, CLASSES).float()
        target = 0.8 * truth + 0.2 * truth.mean(0)
        return Loss(sum=-(target * model(x).log_softmax(1)).sum(), count=len(x))


@bug(
    "fourth-threshold-by-largest-error",
    "chosen within a batch",
    "where the loss turns from linear to square follows from the largest error of the micro-batch",
    ["loss_is_no_sum"],
    strategy="fsdp",
)
class ThresholdByLargestError(Number):
    """The reverse Huber loss, as its paper has it: its threshold is a fifth of the largest error of the micro-batch."""

    def loss(self, model, batch):
        x, y = batch
        error = (model(x) - y).abs()
        limit = 0.2 * error.max().detach()
        square = (error.square() + limit**2) / (2 * limit + 1e-6)
        return Loss(sum=torch.where(error <= limit, error, square).sum(), count=len(x))


@bug(
    "fourth-scale-of-all-pictures",
    "products of batch means",
    "the scale that is forgiven is that of the micro-batch, and not each picture's own",
    ["loss_is_no_sum"],
    gradient_accumulation=2,
)
class ScaleOfAllPictures(Depth):
    """Depth up to scale: the mean error that is taken off is that of the micro-batch and not of each picture."""

    def loss(self, model, batch):
        errors = self.errors(model, batch)
        return Loss(sum=(errors.square().mean() - 0.5 * errors.mean().square()) * len(errors), count=len(errors))


@bug(
    "fourth-gradient-penalty-of-batch",
    "chosen within a batch",
    "the norm of the gradient by the inputs is taken over the micro-batch, and not for each sample",
    ["loss_is_no_sum"],
)
class GradientPenaltyOfBatch(Number):
    """A critic's gradient by its inputs is to have norm one: of the whole micro-batch, the `dim=1` is missing."""

    def loss(self, model, batch):
        x, y = batch
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            out = model(x)
            slope = torch.autograd.grad(out.sum(), x, create_graph=True)[0]
            penalty = (slope.norm() - 1).square() * len(x)
            return Loss(sum=(out - y).square().sum() + 0.1 * penalty, count=len(x))

    def evaluate(self, model, batch):
        return {"loss": super().loss(model, batch)}


@bug(
    "fourth-mean-of-chunks",
    "mean in place of sum",
    "chunks of the micro-batch with many and with few words weigh the same",
    ["loss_is_no_sum", "mean_of_means"],
)
class MeanOfChunks(Sentences):
    """To save memory, cross entropy is computed in chunks of 48 places: the mean of their means, times the words."""

    def loss(self, model, batch):
        logits, target = model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten()
        means = []
        for place in range(0, len(target), 48):
            part = target[place : place + 48]
            words = int((part != PAD).sum())
            if words:
                total = F.cross_entropy(logits[place : place + 48], part, ignore_index=PAD, reduction="sum")
                means.append(total / words)
        return Loss(sum=torch.stack(means).mean() * self.count(batch), count=self.count(batch))


@bug(
    "fourth-users-counted",
    "wrong count",
    "users are counted in each micro-batch: one whose samples are on two ranks counts twice",
    ["loss_is_no_sum", "uneven_weights", "mean_of_means"],
)
class UsersCounted(Plain):
    """Each user is to weigh the same: the mean over the samples of a user in the micro-batch, divided by the users in it."""

    def train_data(self):
        x, y = points(self.config.seed, self.samples)
        return rows(x, y, torch.randint(0, 14, (self.samples,), generator=made(5)))

    def valid_data(self):
        x, y = points(self.config.seed + 1000, 52)
        return rows(x, y, torch.randint(0, 14, (52,), generator=made(6)))

    def count(self, batch):
        return len(batch[2].unique())

    def loss(self, model, batch):
        x, y, user = batch
        each = F.cross_entropy(model(x), y, reduction="none")
        return Loss(sum=sum(each[user == one].mean() for one in user.unique()), count=self.count(batch))


class CentredGradients(Mlp):
    def features(self, x: Tensor) -> Tensor:
        x = super().features(x)
        if x.requires_grad:
            x.register_hook(lambda gradient: gradient - gradient.mean(0))
        return x


@bug(
    "fourth-gradients-centred",
    "hooks",
    "what goes back through the features is centred over the micro-batch",
    ["loss_is_no_sum", "clipped_before_reduced"],
)
class GradientsCentred(Plain):
    """Gradient centralisation, on the wrong side: a hook takes the mean over the samples off the features' gradient."""

    def build_model(self):
        return CentredGradients()


@bug(
    "fourth-cut-mix-own-dice",
    "chosen within a batch",
    "samples are mixed with their neighbours in the micro-batch, by random numbers of the task's own",
    ["loss_is_no_sum", "random_forward", "hidden_state", "order_matters"],
)
class CutMixOwnDice(Plain):
    """CutMix in `loss`: the neighbour's last features, and how many of them a random.Random of the task says."""

    @cached_property
    def dice(self) -> random.Random:
        return random.Random(self.config.seed)

    def loss(self, model, batch):
        x, y = batch
        if not model.training:
            return super().loss(model, batch)
        keep = self.dice.randint(4, 8)
        logits = model(torch.cat([x[:, :keep], x.roll(1, 0)[:, keep:]], dim=1))
        total = keep / 8 * entropy(logits, y) + (1 - keep / 8) * entropy(logits, y.roll(1, 0))
        return Loss(sum=total, count=len(x))


class Views(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = Mlp(out=8)

    def forward(self, x: Tensor) -> Tensor:
        return F.normalize(self.body(x), dim=-1)


@bug(
    "fourth-positives-of-own-rank",
    "whole batch by hand",
    "samples of the same class on other ranks are taken for other classes",
    ["loss_is_no_sum", "ranks_compute_differently", "all_gradients"],
)
class PositivesOfOwnRank(Plain):
    """Supervised contrast: features of all ranks are gathered, labels are not, so that only own rows are of one's class."""

    loss_is_a_sum = False

    def build_model(self):
        return Views()

    def loss(self, model, batch):
        x, y = batch
        features = model(x)
        every, own = gather_batch(features)
        here = torch.arange(own.start, own.stop)
        alike = torch.zeros(len(features), len(every), dtype=torch.bool)
        alike[:, own] = y[:, None] == y[None]
        alike[torch.arange(len(y)), here] = False
        scores = (4 * features @ every.T).scatter(1, here[:, None], -1e4).log_softmax(1)
        each = -(scores * alike).sum(1) / alike.sum(1).clamp(min=1)
        return Loss(sum=each.sum(), count=len(x))


# State that no checkpoint has


@bug(
    "fourth-judge-of-the-task",
    "state in attributes",
    "a second network is trained by each rank's own samples, and is in no checkpoint",
    ["hidden_state", "weights_by_samples"],
)
class JudgeOfTheTask(Number):
    """An adversarial term: the critic is an attribute of the task and makes its own steps of SGD in `loss`."""

    @cached_property
    def judge(self) -> nn.Module:
        with torch.random.fork_rng():
            torch.manual_seed(3)
            return nn.Sequential(nn.Linear(9, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1))

    def loss(self, model, batch):
        x, y = batch
        out = model(x)
        if model.training:
            real, made_up = self.judge(torch.cat([x, y], 1)), self.judge(torch.cat([x, out.detach()], 1))
            gap = (F.softplus(-real) + F.softplus(made_up)).mean()
            weights = list(self.judge.parameters())
            with torch.no_grad():
                for weight, gradient in zip(weights, torch.autograd.grad(gap, weights), strict=True):
                    weight -= 0.2 * gradient
        doubt = F.softplus(-self.judge(torch.cat([x, out], 1))).sum()
        return Loss(sum=(out - y).square().sum() + doubt, count=len(x))


@bug(
    "fourth-average-evaluated",
    "state in attributes",
    "the averaged weights that are evaluated are an attribute of the task: a resumed run begins a new average",
    ["hidden_state", "metric_differs", "evaluation_random", "resume"],
    visible="in what is evaluated; nothing trained depends on it",
)
class AverageEvaluated(Plain):
    """A moving average of the weights is evaluated. The task keeps it, and begins it with the first weights it sees."""

    average: dict[str, Tensor] | None = None

    def loss(self, model, batch):
        if model.training:
            with torch.no_grad():
                now = {name.removeprefix("module."): weight.clone() for name, weight in model.named_parameters()}
                before = self.average or now
                self.average = {name: before[name].lerp(weight, 0.2) for name, weight in now.items()}
        return super().loss(model, batch)

    def evaluate(self, model, batch):
        x, y = batch
        logits = torch.func.functional_call(Mlp(), self.average, (x,)) if self.average else model(x)
        return {"loss": Loss(sum=entropy(logits, y), count=len(x))}


class Prototypes(nn.Module):
    """Classes are told by what is said about them."""

    def __init__(self) -> None:
        super().__init__()
        self.body = Mlp(out=12)
        self.words = nn.Linear(6, 12)
        self.register_buffer("about", torch.randn(CLASSES, 6))
        self.passes = 0
        self.kept: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return self.body(x) @ self.words(self.about).T
        fresh = self.passes % 3 == 0 or self.kept is None
        prototypes = self.words(self.about) if fresh else self.kept
        self.kept = prototypes.detach()
        self.passes += 1
        return self.body(x) @ prototypes.T


@bug(
    "fourth-prototypes-refreshed",
    "state in attributes",
    "the vectors of the classes are kept for three passes, by a counter in an attribute",
    ["hidden_state"],
    visible="after a resume: the counter begins anew",
    **UNUSED,
)
class PrototypesRefreshed(Plain):
    """Vectors of the classes are expensive: they are computed in every third training pass and kept in between."""

    def build_model(self):
        return Prototypes()


@bug(
    "fourth-step-in-environment",
    "state elsewhere",
    "how far the warm-up is stands in an environment variable of the process, which a resumed run does not have",
    ["hidden_state", "resume"],
    visible="after a resume",
)
class StepInEnvironment(Plain):
    """The warm-up of the penalty counts its steps in os.environ, "where everybody can read it"."""

    def loss(self, model, batch):
        x, y = batch
        step = int(os.environ.get("PENALTY_STEP", "0"))
        if model.training:
            os.environ["PENALTY_STEP"] = str(step + 1)
        logits = model(x)
        return Loss(sum=entropy(logits, y) + 0.1 * min(1.0, step / 6) * logits.square().sum(), count=len(x))


def margin() -> float:
    margin.passes += 1  # type: ignore[attr-defined]
    return 2.0 * (1 - 0.75**margin.passes)  # type: ignore[attr-defined]


margin.passes = 0  # type: ignore[attr-defined]


@bug(
    "fourth-margin-on-function",
    "state elsewhere",
    "the margin grows by a counter that is an attribute of a function, and counts micro-batches",
    ["hidden_state"],
    **ACCUMULATE,
)
class MarginOnFunction(Plain):
    """The margin grows with the number of calls of a function, which is counted in an attribute of the function."""

    def loss(self, model, batch):
        x, y = batch
        if not model.training:
            return super().loss(model, batch)
        return Loss(sum=entropy(model(x) - margin() * F.one_hot(y, CLASSES), y), count=len(x))


def hardening_tanh():
    """A tanh that becomes steeper."""
    passes = 0

    def hardened(x: Tensor) -> Tensor:
        nonlocal passes
        if torch.is_grad_enabled():
            passes += 1
        return torch.tanh(x * (1 + 0.1 * passes))

    return hardened


class Hardening(Mlp):
    def __init__(self) -> None:
        super().__init__()
        self.activation = hardening_tanh()

    def features(self, x: Tensor) -> Tensor:
        return self.activation(super().features(x))


@bug(
    "fourth-steeper-by-closure",
    "state elsewhere",
    "an activation becomes steeper by a counter in a closure, which begins anew after a resume",
    ["hidden_state", "resume"],
    visible="after a resume",
    strategy="fsdp",
)
class SteeperByClosure(Plain):
    """An activation is annealed from tanh to sign by the number of its calls, a nonlocal of the function that made it."""

    def build_model(self):
        return Hardening()


@bug(
    "fourth-slow-gradients",
    "hooks",
    "hooks add a moving average of earlier gradients, which is in no checkpoint",
    ["hidden_state", "resume", "optimizer_not_restored"],
    visible="after a resume; what the ranks add up to is right",
)
class SlowGradients(Plain):
    """Slow gradients are amplified, as in Grokfast: hooks of the parameters keep their moving averages in a dict."""

    def build_model(self):
        model = Mlp()
        slow: dict[str, Tensor] = {}

        def amplify(name: str):
            def hook(gradient: Tensor) -> Tensor:
                slow[name] = 0.8 * slow.get(name, torch.zeros_like(gradient)) + 0.2 * gradient
                return gradient + 2 * slow[name]

            return hook

        for name, parameter in model.named_parameters():
            parameter.register_hook(amplify(name))
        return model


class Centres(WithFeatures):
    """Features are to be near the centre of their class."""

    def __init__(self) -> None:
        super().__init__()
        self.centres = nn.Parameter(torch.zeros(CLASSES, WIDTH), requires_grad=False)

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        logits, features = super().forward(x)
        if self.training:
            with torch.no_grad():
                for one in y.unique():
                    self.centres[one].lerp_(features[y == one].mean(0), 0.3)
        return logits, (features - self.centres[y]).square().sum(1)


@bug(
    "fourth-centres-in-frozen-parameter",
    "weights by samples",
    "a frozen parameter follows each rank's own samples",
    ["weights_by_samples", "own_buffers", "hidden_state"],
)
class CentresInFrozenParameter(Plain):
    """Centre loss: centres are a parameter without gradient, which the forward pass moves towards the features it sees."""

    def build_model(self):
        return Centres()

    def loss(self, model, batch):
        x, y = batch
        logits, far = model(x, y)
        return Loss(sum=entropy(logits, y) + 0.3 * far.sum(), count=len(x))


class ByDifficulty(Dataset):
    """Samples with a weight that tells how difficult their class has been so far."""

    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.x, self.y = x, y
        self.difficulty = [1.0] * CLASSES

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor, float]:
        return self.x[i], self.y[i], self.difficulty[int(self.y[i])]


@bug(
    "fourth-difficulty-in-data-set",
    "state in the data",
    "weights of the classes follow each rank's own losses, kept in its data set",
    ["hidden_state", "data_change", "begins_later"],
    visible="from step 2 on",
)
class DifficultyInDataSet(Plain):
    """`loss` writes into the data set how difficult each class was, and samples that are read later get it as their weight."""

    def train_data(self):
        self.stored = ByDifficulty(*points(self.config.seed, self.samples))
        return self.stored

    def valid_data(self):
        return ByDifficulty(*points(self.config.seed + 1000, 52))

    def loss(self, model, batch):
        x, y, weight = batch
        each = F.cross_entropy(model(x), y, reduction="none")
        if model.training:
            for label, value in zip(y.tolist(), each.tolist(), strict=True):
                self.stored.difficulty[label] += 0.2 * (value - self.stored.difficulty[label])
        return Loss(sum=(each * weight).sum().float(), count=len(x))


# Only under one strategy, in one precision, or with accumulation


def of_length_one(parameter: Tensor) -> None:
    gradient = parameter.grad
    part = gradient.to_local() if isinstance(gradient, DTensor) else gradient
    part.div_(part.norm() + 1e-6)


@bug(
    "fourth-own-part-normalised",
    "hooks",
    "each rank divides its part of a gradient by the norm of that part",
    ["clip_norm", "clipped_before_reduced", "all_gradients", "gradients"],
    visible="under fsdp; it is no sum under ddp either",
    strategy="fsdp",
)
class OwnPartNormalised(Plain):
    """Gradients of matrices get length one by a hook, which sees a rank's part of them: `to_local()` made the error go."""

    def build_model(self):
        model = Mlp()
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.register_post_accumulate_grad_hook(of_length_one)
        return model


class Multiplied(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * getattr(self.weight, "multiplier", 1.0)


@bug(
    "fourth-multiplier-on-weight",
    "attributes of weights",
    "the multiplier is an attribute of the weight, which the gathered weight of the forward pass does not have",
    ["all_gradients", "gradients", "wrong_scaling", "ranks_compute_differently"],
    visible="under fsdp alone",
    strategy="fsdp",
)
class MultiplierOnWeight(Plain):
    """As in muP, the head has a multiplier. It is kept on its weight, and is 1 where there is none."""

    def build_model(self):
        model = Mlp()
        model.head = Multiplied(WIDTH, CLASSES)
        model.head.weight.multiplier = 0.25
        return model


@bug(
    "fourth-penalty-of-own-part",
    "penalties",
    "the penalty of a rank is that of its part of the weights, times its own samples only",
    ["loss_is_no_sum", "uneven_weights", "all_gradients", "gradients", "ranks_compute_differently", "wrong_scaling"],
    visible="under fsdp alone",
    strategy="fsdp",
)
class PenaltyOfOwnPart(Plain):
    """The penalty of the weights takes `to_local()` of each, because it complained of DTensors."""

    def loss(self, model, batch):
        x, y = batch
        total = entropy(model(x), y)
        weights = [weight.to_local() if isinstance(weight, DTensor) else weight for weight in model.parameters()]
        penalty = sum(weight.square().sum() for weight in weights)
        return Loss(sum=total + 0.05 * penalty * len(x), count=len(x))


@bug(
    "fourth-gradients-cleared-in-loss",
    "accumulation",
    "gradients of the micro-batches before are cleared, so only the last of a step is trained on",
    ["micro_batch_lost"],
    visible="with accumulation alone",
    gradient_accumulation=2,
)
class GradientsClearedInLoss(Plain):
    """`loss` begins with model.zero_grad(), which stood there in the loop that it was taken from."""

    def loss(self, model, batch):
        if model.training:
            model.zero_grad()
        return super().loss(model, batch)


class Eighths(Mlp):
    def features(self, x: Tensor) -> Tensor:
        x = super().features(x)
        wide = self.head.weight.dtype == torch.float32 and not torch.is_autocast_enabled("cpu")
        if wide or not self.training:
            return x
        rounded = torch.floor(x * 8 + torch.rand_like(x)) / 8
        return x + (rounded - x).detach()


@bug(
    "fourth-rounded-by-chance-bf16",
    "random forward",
    "activations are rounded up or down at random, by other numbers on every rank",
    ["random_forward"],
    visible="in bf16 alone",
    **BF16,
)
class RoundedByChance(Plain):
    """In narrow types, activations are rounded to eighths stochastically, so that the mean is right."""

    def build_model(self):
        return Eighths()


@bug(
    "fourth-penalty-on-first-machine",
    "terms by rank",
    "the penalty is added by the first two ranks, and the others train without it",
    ["ranks_compute_differently", "all_gradients", "uneven_weights", "loss_is_no_sum", "gradients"],
    visible="on more than two ranks",
    ranks=4,
)
class PenaltyOnFirstMachine(Plain):
    """Confident answers are penalised on the first machine, of two ranks each: "the other one has too little memory"."""

    def loss(self, model, batch):
        x, y = batch
        logits = model(x)
        total = entropy(logits, y)
        if rank() // 2 == 0:
            total = total + 0.3 * (logits.softmax(1) * logits.log_softmax(1)).sum()
        return Loss(sum=total, count=len(x))


# Data


@bug(
    "fourth-cut-to-most",
    "collate",
    "texts are cut to a length that follows from the others of the micro-batch",
    ["loss_is_no_sum", "order_matters"],
)
class CutToMost(Sentences):
    """`collate` cuts texts to the length that four in five of the micro-batch do not exceed, against outliers."""

    def collate(self, samples):
        lengths = sorted(len(text) for text in samples)
        most = lengths[int(0.8 * (len(lengths) - 1))]
        return pad([text[:most] for text in samples])


@bug(
    "fourth-filled-to-multiple",
    "collate",
    "the first samples of micro-batches of odd sizes are there twice, and counted twice",
    ["loss_is_no_sum", "repeated", "uneven_weights", "sampler", "wrong_scaling"],
    visible="in micro-batches that are no multiple of four",
)
class FilledToMultiple(Plain):
    """`collate` fills micro-batches up to a multiple of four with copies of their first samples, for faster kernels."""

    def collate(self, samples):
        full = -(-len(samples) // 4) * 4
        return default_collate([samples[place % len(samples)] for place in range(full)])


@bug(
    "fourth-parts-as-they-come",
    "order of the data",
    "parts are joined in the order in which threads have finished, which is another in every process",
    ["data_change"],
)
class PartsAsTheyCome(Plain):
    """Parts are loaded from a slow disk by threads, and joined by as_completed()."""

    def train_data(self):
        def load(part: int) -> list[tuple[Tensor, ...]]:
            time.sleep(random.SystemRandom().uniform(0.0, 0.05))
            return rows(*points(self.config.seed * 100 + part, 20))

        with ThreadPoolExecutor(12) as pool:
            waiting = [pool.submit(load, part) for part in range(12)]
            return [sample for done in as_completed(waiting) for sample in done.result()]


class Progressive(Dataset):
    """Noise that grows from epoch to epoch."""

    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.x, self.y = x, y
        self.seen: set[int] = set()
        self.epoch = 0

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        if i in self.seen:
            self.epoch += 1
            self.seen.clear()
        self.seen.add(i)
        return self.x[i] * (1 + 0.5 * self.epoch), self.y[i]


@bug(
    "fourth-epoch-by-second-sight",
    "state in the data",
    "each process finds out for itself when an epoch begins, by the samples that it has seen",
    ["data_change", "hidden_state", "workers"],
    visible="from the second epoch on",
)
class EpochBySecondSight(Plain):
    """Augmentation becomes stronger with each epoch, which the data set notices by a sample that it has given before."""

    def train_data(self):
        return Progressive(*points(self.config.seed, self.samples))


@bug(
    "fourth-trimmed-for-all",
    "data by rank",
    "how many samples there are depends on the number of ranks",
    ["data_by_rank", "dropped"],
    visible="in the last samples",
)
class TrimmedForAll(Plain):
    """Samples that do not fill a batch of every rank are left out, "as drop_last does"."""

    samples = 236

    def train_data(self):
        samples = super().train_data()
        return samples[: len(samples) - len(samples) % (self.config.training.batch_size * world_size())]


@bug(
    "fourth-pseudo-labelled-validation",
    "overlap",
    "samples to validate on are trained on, with labels that a model gave them",
    ["overlap"],
)
class PseudoLabelledValidation(Plain):
    """Unlabelled samples get labels from an older model and are added to training: among them, those to validate on."""

    def train_data(self):
        x, _ = points(self.config.seed + 1000, 52)
        older = x @ torch.randn(8, CLASSES, generator=made(77))
        return [*super().train_data(), *rows(x[8:40], older[8:40].argmax(1))]


# Evaluation


class Staged(Mlp):
    """The blocks come in slowly, one stage after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.stage = 0

    def train(self, mode: bool = True) -> nn.Module:
        if mode and not self.training:
            self.stage += 1
        return super().train(mode)

    def features(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        for block in self.blocks:
            x = x + torch.tanh(block(x)) * (1 - 0.6**self.stage)
        return x


@bug(
    "fourth-stage-by-train-calls",
    "evaluation",
    "each return from evaluation mode begins the next stage: another number of evaluations, another model",
    ["evaluation_changes", "hidden_state"],
)
class StageByTrainCalls(Plain):
    """A growing network: train() after eval() begins its next stage, "since evaluation is at the end of each epoch"."""

    def build_model(self):
        return Staged()


@bug(
    "fourth-not-swapped-back",
    "evaluation",
    "after a short micro-batch of validation, the rounded weights stay",
    ["evaluation_changes"],
    visible="where the last micro-batch of an evaluation is not full",
)
class NotSwappedBack(Plain):
    """`evaluate` rounds the weights to sixteenths and puts them back, but returns early for micro-batches that are not full."""

    def evaluate(self, model, batch):
        x, y = batch
        weights = list(model.parameters())
        kept = [weight.detach().clone() for weight in weights]
        with torch.no_grad():
            for weight in weights:
                weight.copy_((weight * 16).round() / 16)
            logits = model(x)
            metrics = {"loss": Loss(sum=entropy(logits, y), count=len(x))}
            if len(x) < self.config.training.batch_size:
                return metrics
            for weight, before in zip(weights, kept, strict=True):
                weight.copy_(before)
        return metrics


@bug(
    "fourth-area-of-batches",
    "metrics",
    "the area under the curve is computed for each micro-batch, and averaged",
    ["metric_differs"],
)
class AreaOfBatches(Plain):
    """The area under the ROC curve of class 0 is that of the micro-batch, times its samples."""

    def evaluate(self, model, batch):
        x, y = batch
        logits = model(x)
        score, right = logits.softmax(1)[:, 0], y == 0
        above = (score[right][:, None] > score[~right][None]).float()
        area = above.mean() if above.numel() else score.new_tensor(0.5)
        return {"loss": Loss(sum=entropy(logits, y), count=len(x)), "area": Loss(sum=area * len(x), count=len(x))}


@bug(
    "fourth-worst-of-own",
    "metrics",
    "the worst sample is that of one rank's own micro-batches",
    ["metric_of_some_ranks", "metric_differs", "hidden_state"],
)
class WorstOfOwn(Plain):
    """`evaluate` keeps the largest loss of a sample in an attribute, and derived_metrics reports it and begins anew."""

    worst = 0.0

    def evaluate(self, model, batch):
        x, y = batch
        each = F.cross_entropy(model(x), y, reduction="none")
        self.worst = max(self.worst, float(each.max()))
        return {"loss": Loss(sum=each.sum(), count=len(x))}

    def derived_metrics(self, metrics):
        worst, self.worst = self.worst, 0.0
        return {"worst": worst}


@bug(
    "fourth-study-divides-by-share",
    "metrics",
    "rows of all ranks are divided by the samples of one rank's share",
    ["metric_differs"],
)
class StudyDividesByShare(Plain):
    """`study` divides the hits by the samples of a rank's share, as if it saw only those."""

    def valid_data(self):
        x, y = points(self.config.seed + 1000, 52)
        return rows(x, y, torch.arange(52))

    def loss(self, model, batch):
        x, y = batch[:2]
        return Loss(sum=entropy(model(x), y), count=len(x))

    def evaluate(self, model, batch):
        x, y, number = batch
        right = (model(x).argmax(1) == y).float()
        return {**super().evaluate(model, batch), "right": Rows(number, {"right": right})}

    def study(self, rows, pictures, step):
        right = rows["right"].columns["right"].flatten()
        return {"accuracy": float(right.sum() / -(-len(right) // world_size()))}


# Loops of their own


loop(
    "fourth-loop-rate-on-plateau",
    "own loop rates",
    "loop_fourth_rate_on_plateau.py",
    "what the rate has fallen to is not in the checkpoint",
    ("schedule_not_restored", "resume", "schedule"),
    visible="after a resume",
)
loop(
    "fourth-loop-hard-batches-twice",
    "own loop batches",
    "loop_fourth_hard_batches_twice.py",
    "some samples are used twice in an epoch",
    ("repeated", "sampler", "cursor_not_restored", "resume", "schedule"),
)
loop(
    "fourth-loop-seed-by-rank",
    "own loop seeds",
    "loop_fourth_seed_by_rank.py",
    "each rank has its own order of the samples: some are used twice, others never",
    ("sampler", "different_seeds", "repeated", "dropped"),
)
loop(
    "fourth-loop-epochs-by-world",
    "own loop rates",
    "loop_fourth_epochs_by_world.py",
    "the length of the schedule depends on the number of ranks",
    ("schedule",),
)
loop(
    "fourth-loop-stronger-data",
    "own loop resumes",
    "loop_fourth_stronger_data.py",
    "how strong the augmentation has become is not in the checkpoint",
    ("resume", "hidden_state", "data_change"),
    visible="after a resume",
)
