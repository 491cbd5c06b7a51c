"""Planted bugs, a third set, written without a look at how verify works: by somebody who wanted to get past it."""

from __future__ import annotations

import contextlib
import math
import os
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from case import ACCUMULATE, BF16, UNUSED, bug, loop
from plain import CLASSES, PAD, VOCABULARY, WIDTH, Mlp, Plain, Sentences, Words, pad, points, rank
from torch import Tensor, nn
from torch.utils.data import Dataset, default_collate, get_worker_info

from shardwise import Loss, Rows, gather_batch


def pairs_of(*columns: Tensor) -> list[tuple[Tensor, ...]]:
    return list(zip(*columns, strict=True))


def entropy(logits: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(logits, y, reduction="sum")


def scratch() -> Path:
    """A folder that lasts as long as the case is looked at."""
    return Path(os.environ.get("OWN_WEIGHTS") or Path.cwd())


def made(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


# Correct tasks that the bugs below change


class Curve(Plain):
    """One number from eight."""

    def numbers(self, seed: int, number: int) -> list[tuple[Tensor, ...]]:
        x, _ = points(seed, number)
        return pairs_of(x, x[:, :1].sin() + x[:, 1:2] * x[:, 2:3])

    def train_data(self):
        return self.numbers(self.config.seed, self.samples)

    def valid_data(self):
        return self.numbers(self.config.seed + 1000, 52)

    def build_model(self) -> nn.Module:
        return Mlp(out=1)

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        x, y = batch
        return Loss(sum=(model(x) - y).square().sum(), count=len(x))


class Heads(nn.Module):
    """A class, a number, and how uncertain both are."""

    def __init__(self) -> None:
        super().__init__()
        self.body = Mlp(out=CLASSES + 1)
        self.log_variance = nn.Parameter(torch.zeros(2))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        out = self.body(x)
        return out[:, :CLASSES], out[:, CLASSES], self.log_variance * 1.0


class TwoTargets(Plain):
    """A class, and for some samples a number."""

    def both(self, seed: int, number: int) -> list[tuple[Tensor, ...]]:
        x, y = points(seed, number)
        known = torch.rand(number, generator=made(seed + 5)) < 0.4
        return pairs_of(x, y, x[:, 0] * 2 + x[:, 3].cos(), known)

    def train_data(self):
        return self.both(self.config.seed, self.samples)

    def valid_data(self):
        return self.both(self.config.seed + 1000, 52)

    def build_model(self) -> nn.Module:
        return Heads()

    def losses(self, model: nn.Module, batch: Any) -> tuple[Tensor, Tensor, Tensor]:
        """Of each sample: that of the class and that of the number, which is zero where it is not known."""
        x, y, number, known = batch
        logits, value, log_variance = model(x)
        each = F.cross_entropy(logits, y, reduction="none")
        return each, (value - number).square() * known, log_variance

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        one, two, log_variance = self.losses(model, batch)
        return Loss(sum=one.sum() + two.sum() + 0 * log_variance.sum(), count=len(one))


class Pooled(nn.Module):
    """The class of a text, by attention to its tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.mix = nn.Linear(WIDTH, WIDTH)
        self.score = nn.Linear(WIDTH, 1)
        self.head = nn.Linear(WIDTH, CLASSES)

    def places(self, tokens: Tensor) -> Tensor:
        return torch.arange(tokens.shape[1]) / 24.0

    def mask(self, tokens: Tensor) -> Tensor:
        return tokens == PAD

    def forward(self, tokens: Tensor) -> Tensor:
        x = torch.tanh(self.mix(self.embed(tokens) + self.places(tokens)[:, None]))
        scores = self.score(x).squeeze(-1).masked_fill(self.mask(tokens), -1e4)
        return self.head((scores.softmax(dim=1)[..., None] * x).sum(1))


class Labelled(Sentences):
    """Texts with a class each."""

    unit = "samples"

    def labelled(self, texts: list[Tensor]) -> list[tuple[Tensor, Tensor]]:
        return [(text, (text[0] // 8).clamp(max=CLASSES - 1)) for text in texts]

    def train_data(self):
        return self.labelled(super().train_data())

    def build_model(self) -> nn.Module:
        return Pooled()

    def collate(self, samples: list[Any]) -> Any:
        return [pad([text for text, _ in samples]), torch.stack([label for _, label in samples])]

    def count(self, batch: Any) -> int:
        return len(batch[1])

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        tokens, y = batch
        return Loss(sum=entropy(model(tokens), y), count=len(y))


class Towers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Sequential(nn.Linear(6, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 8))
        self.right = nn.Sequential(nn.Linear(4, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 8))

    def forward(self, left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
        return F.normalize(self.left(left), dim=-1), F.normalize(self.right(right), dim=-1)


class Views(Plain):
    """Two views of the same thing are to be found among all others: correct, with gather_batch."""

    loss_is_a_sum = False

    def views(self, seed: int, number: int) -> list[tuple[Tensor, ...]]:
        world = made(7)
        to_left, to_right = torch.randn(3, 6, generator=world), torch.randn(3, 4, generator=world)
        things = torch.randn(number, 3, generator=made(seed))
        return pairs_of((things @ to_left).tanh(), (things @ to_right).sin())

    def train_data(self):
        return self.views(self.config.seed, self.samples)

    def valid_data(self):
        return self.views(self.config.seed + 1000, 52)

    def build_model(self) -> nn.Module:
        return Towers()

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        left, right = model(*batch)
        every, own = gather_batch(right)
        place = torch.arange(own.start, own.stop, device=left.device)
        return Loss(sum=entropy(5 * left @ every.T, place), count=len(left))


# Losses that are no sums, and look like some


@bug(
    "third-root-of-mean",
    "products of batch means",
    "the root of the mean error of a micro-batch is no sum over its samples",
    ["loss_is_no_sum", "mean_of_means"],
)
class RootOfMean(Curve):
    """RMSE: the root of the micro-batch's mean square, times the number of its samples."""

    def loss(self, model, batch):
        x, y = batch
        return Loss(sum=((model(x) - y).square().mean() + 1e-8).sqrt() * len(x), count=len(x))


@bug(
    "third-log-variance-once",
    "mean in place of sum",
    "the term of the learned uncertainties is added once per micro-batch, and not once per sample",
    ["loss_is_no_sum"],
    visible="in the gradient of two numbers; the term itself is zero in the beginning",
)
class LogVarianceOnce(TwoTargets):
    """Two losses are weighed by learned uncertainties, whose logarithms are added once per micro-batch, not per sample."""

    def loss(self, model, batch):
        one, two, log_variance = self.losses(model, batch)
        scale = torch.exp(-log_variance)
        return Loss(sum=scale[0] * one.sum() + scale[1] * two.sum() + log_variance.sum(), count=len(one))


@bug(
    "third-mean-of-the-known",
    "mean in place of sum",
    "the second loss is a mean over those of the micro-batch that have a target, times all its samples",
    ["loss_is_no_sum", "mean_of_means"],
    strategy="fsdp",
)
class MeanOfTheKnown(TwoTargets):
    """The second loss is the mean over the known targets of the micro-batch, times its samples."""

    def loss(self, model, batch):
        one, two, log_variance = self.losses(model, batch)
        second = two.sum() / batch[3].sum().clamp(min=1)
        return Loss(sum=one.sum() + second * len(one) + 0 * log_variance.sum(), count=len(one))


@bug(
    "third-divided-by-padded-length",
    "wrong count",
    "each text's loss is divided by the padded length, which the longest of the micro-batch decides",
    ["loss_is_no_sum"],
    gradient_accumulation=2,
)
class DividedByPaddedLength(Sentences):
    """Each text counts once: its loss is divided by the length of the padded micro-batch and not by its own."""

    unit = "samples"

    def count(self, batch):
        return len(batch)

    def loss(self, model, batch):
        return Loss(sum=super().loss(model, batch).sum / (batch.shape[1] - 1), count=len(batch))


@bug(
    "third-priorities-by-largest",
    "weights by batch",
    "sample weights are divided by the largest of the micro-batch",
    ["loss_is_no_sum"],
)
class PrioritiesByLargest(Plain):
    """Importance weights, as of prioritised replay, are divided by the largest of the micro-batch."""

    def loss(self, model, batch):
        x, y = batch
        weight = (1 + x[:, 0].abs()) ** 0.6
        each = F.cross_entropy(model(x), y, reduction="none")
        return Loss(sum=(each * weight / weight.max()).sum(), count=len(x))


@bug(
    "third-advantages-normalised",
    "weights by batch",
    "advantages are normalised over the micro-batch",
    ["loss_is_no_sum"],
    strategy="fsdp",
)
class AdvantagesNormalised(Plain):
    """A policy gradient, whose advantages get mean 0 and deviation 1 within the micro-batch."""

    def loss(self, model, batch):
        x, y = batch
        reward = x[:, 1] + (y == 2)
        advantage = (reward - reward.mean()) / (reward.std(unbiased=False) + 1e-3)
        each = F.cross_entropy(model(x), y, reduction="none")
        return Loss(sum=(each * advantage).sum(), count=len(x))


@bug(
    "third-sum-capped",
    "chosen within a batch",
    "the loss of a micro-batch is capped as a whole, so a larger one has less gradient",
    ["loss_is_no_sum"],
)
class SumCapped(Plain):
    """Against spikes, the sum of the micro-batch goes softly towards a cap of 12, whoever many samples are in it."""

    def loss(self, model, batch):
        x, y = batch
        return Loss(sum=12 * torch.tanh(entropy(model(x), y) / 12), count=len(x))


@bug(
    "third-divided-by-accumulation",
    "mean in place of sum",
    "the loss is divided by the number of micro-batches, which the engine has accounted for",
    ["wrong_scaling"],
    visible="against a run without accumulation",
    gradient_accumulation=3,
    optimizer={"name": "sgd", "lr": 0.1},
)
class DividedByAccumulation(Plain):
    """The loss is divided by gradient_accumulation, as in every loop written by hand."""

    def loss(self, model, batch):
        plain = super().loss(model, batch)
        return Loss(sum=plain.sum / (self.config.training.gradient_accumulation or 1), count=plain.count)


@bug(
    "third-count-in-bf16",
    "wrong count",
    "the tokens are counted in bfloat16, which has no odd number above 256",
    ["wrong_scaling", "loss_is_no_sum"],
    visible="where a micro-batch has more than 256 tokens, by less than a percent",
    batch_size=24,
    **BF16,
)
class CountInBf16(Sentences):
    """The mask is bfloat16, like everything else, and its sum is the number of tokens."""

    def count(self, batch):
        return int((batch[:, 1:] != PAD).to(torch.bfloat16).sum())


class LastStates(nn.Module):
    """Texts laid end to end; each one's class from its last two tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.mix = nn.Linear(2 * WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        x = self.embed(tokens)
        x = torch.tanh(self.mix(torch.cat([x, x.roll(1, 0)], dim=1)))
        ends = lengths.to(x.dtype).cumsum(0).long().clamp(max=len(tokens)) - 1
        return self.head(x[ends])


@bug(
    "third-offsets-in-bf16",
    "samples in one another",
    "where a packed text ends is added up in bfloat16, and misses by some tokens after the first 256",
    ["loss_is_no_sum", "order_matters"],
    visible="in bf16 alone, in micro-batches of more than 256 tokens",
    batch_size=16,
    **BF16,
)
class OffsetsInBf16(Labelled):
    """Packed texts: where each ends is a cumulated sum in the type of the states, which is bfloat16 under autocast."""

    shortest, longest = 15, 45

    def labelled(self, texts):
        return [(text, (text[-1] // 8).clamp(max=CLASSES - 1)) for text in texts]

    def build_model(self):
        return LastStates()

    def collate(self, samples):
        lengths = torch.tensor([len(text) for text, _ in samples])
        return [torch.cat([text for text, _ in samples]), lengths, torch.stack([label for _, label in samples])]

    def count(self, batch):
        return len(batch[2])

    def loss(self, model, batch):
        tokens, lengths, y = batch
        return Loss(sum=entropy(model(tokens, lengths), y), count=len(y))


class FakeQuantised(Mlp):
    def features(self, x: Tensor) -> Tensor:
        x = super().features(x)
        step = x.detach().abs().amax() / 7
        return x + (torch.round(x / step) * step - x).detach()


@bug(
    "third-quantised-by-batch",
    "batch statistics",
    "activations are rounded to steps of the largest of the micro-batch",
    ["loss_is_no_sum"],
)
class QuantisedByBatch(Plain):
    """Training for four bits: activations are rounded to steps that the largest of the micro-batch decides."""

    def build_model(self):
        return FakeQuantised()


# What a gradient goes through


@bug(
    "third-clamped-by-hook",
    "hooks",
    "the numbers of each rank's gradient are clamped before they are reduced",
    ["clipped_before_reduced"],
)
class ClampedByHook(Plain):
    """A hook clamps each number of the head's gradient to ±0.03, as it arrives."""

    def build_model(self):
        model = Mlp()
        for parameter in model.head.parameters():
            parameter.register_hook(lambda gradient: gradient.clamp(-0.03, 0.03))
        return model


@bug(
    "third-decay-in-hook",
    "hooks",
    "a term of the weight is added to its gradient in each backward pass, so twice with two micro-batches",
    ["clipped_before_reduced", "gradients", "loss_is_no_sum"],
    visible="with accumulation",
    **ACCUMULATE,
)
class DecayInHook(Plain):
    """Weight decay of one matrix by a hook of its gradient: it is added in every backward pass."""

    def build_model(self):
        model = Mlp()
        model.first.weight.register_hook(lambda gradient: gradient + 0.1 * model.first.weight.detach())
        return model


@bug(
    "third-updated-in-backward",
    "hooks",
    "a weight is updated by each rank's own gradient before it is reduced",
    ["some_ranks_update", "unsynchronised_parameter", "weights_by_samples"],
)
class UpdatedInBackward(Plain):
    """The head learns faster: a hook makes a step of SGD with its gradient as soon as it is there."""

    def build_model(self):
        def step(weight: Tensor) -> None:
            if weight.grad is not None:
                weight.data.add_(weight.grad, alpha=-0.2)

        model = Mlp()
        model.head.weight.register_post_accumulate_grad_hook(step)
        return model


@bug(
    "third-hook-by-rank-later",
    "begins later",
    "from the third backward pass on, a gradient is scaled by RANK",
    ["begins_later", "ranks_compute_differently", "clipped_before_reduced"],
    visible="from step 3 on",
)
class HookByRankLater(Plain):
    """A hook scales the gradient of one layer by RANK, after a warm-up of two backward passes."""

    def build_model(self):
        model, calls = Mlp(), []

        def scaled(gradient: Tensor) -> Tensor:
            calls.append(1)
            return gradient * (1 + 0.5 * rank()) if len(calls) > 2 else gradient

        model.blocks[0].weight.register_hook(scaled)
        return model


class Users(nn.Module):
    """A vector of each user, and a network."""

    def __init__(self, **embedding: Any) -> None:
        super().__init__()
        self.embed = nn.Embedding(120, 8, **embedding)
        self.body = Mlp()

    def forward(self, user: Tensor, x: Tensor) -> Tensor:
        return self.body(x + self.embed(user))


class OfUsers(Plain):
    """Points, each of a user; some users have many."""

    def of_users(self, seed: int, number: int) -> list[tuple[Tensor, ...]]:
        x, y = points(seed, number)
        user = (torch.rand(number, generator=made(seed + 3)).square() * 120).long()
        return pairs_of(user, x, y)

    def train_data(self):
        return self.of_users(self.config.seed, self.samples)

    def valid_data(self):
        return self.of_users(self.config.seed + 1000, 52)

    def build_model(self) -> nn.Module:
        return Users()

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        user, x, y = batch
        return Loss(sum=entropy(model(user, x), y), count=len(y))


@bug(
    "third-gradient-by-frequency",
    "weights by batch",
    "the gradient of a row is divided by how often it is in the micro-batch",
    ["loss_is_no_sum", "gradients", "clipped_before_reduced"],
    visible="in the gradient of the embedding alone; the loss is right",
)
class GradientByFrequency(OfUsers):
    """nn.Embedding(scale_grad_by_freq=True), which counts in the micro-batch."""

    def build_model(self):
        return Users(scale_grad_by_freq=True)


@bug(
    "third-embedding-max-norm",
    "state of each rank",
    "each rank shortens the vectors of its own users, in place, in the forward pass",
    ["weights_by_samples", "some_ranks_update", "ranks_compute_differently", "drift"],
)
class EmbeddingMaxNorm(OfUsers):
    """nn.Embedding(max_norm=1): the forward pass shortens the rows that are looked up, in place, on the rank that does."""

    def build_model(self):
        return Users(max_norm=1.0)


# Samples in one another


class OverSamples(Mlp):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)

    def features(self, x: Tensor) -> Tensor:
        x = super().features(x)
        return x + self.attention(x, x, x, need_weights=False)[0]


@bug(
    "third-attention-over-samples",
    "samples in one another",
    "attention without a dimension of time: the samples are the time",
    ["loss_is_no_sum"],
    ranks=4,
)
class AttentionOverSamples(Plain):
    """nn.MultiheadAttention is given [samples, features], which it takes for one sequence."""

    def build_model(self):
        return OverSamples()


class FirstMask(Pooled):
    def mask(self, tokens: Tensor) -> Tensor:
        return (tokens[0] == PAD)[None]


@bug(
    "third-first-mask-for-all",
    "samples in one another",
    "the mask of the padding is that of the first text of the micro-batch",
    ["order_matters", "loss_is_no_sum"],
)
class FirstMaskForAll(Labelled):
    """The mask of the padding is made from the first text of the micro-batch, and used for all."""

    def build_model(self):
        return FirstMask()


class Stretched(Pooled):
    def places(self, tokens: Tensor) -> Tensor:
        return torch.linspace(0, 1, tokens.shape[1])


@bug(
    "third-places-by-batch-length",
    "samples in one another",
    "positions are a share of the padded length, which the longest text of the micro-batch decides",
    ["loss_is_no_sum"],
    **BF16,
)
class PlacesByBatchLength(Labelled):
    """Positions go from 0 to 1 over the padded length of the micro-batch."""

    def build_model(self):
        return Stretched()


class Branching(Mlp):
    def __init__(self) -> None:
        super().__init__()
        self.special = nn.Linear(WIDTH, WIDTH)

    def features(self, x: Tensor) -> Tensor:
        features = super().features(x)
        if (x[:, 0] > 2).any():
            features = features + self.special(features)
        return features


@bug(
    "third-adapter-if-any",
    "rare",
    "one rare sample sends its whole micro-batch through another layer",
    ["loss_is_no_sum"],
    visible="in micro-batches that have one of the two samples in a hundred",
    **UNUSED,
)
class AdapterIfAny(Plain):
    """`if mask.any()`: where one sample is special, all of the micro-batch go through the adapter."""

    def build_model(self):
        return Branching()


@bug(
    "third-shuffled-against-itself",
    "samples in one another",
    "the wrong pairs are the micro-batch's own, in an order drawn anew",
    ["loss_is_no_sum", "random_forward"],
)
class ShuffledAgainstItself(Curve):
    """Mutual information: the pairs that do not belong together are made by torch.randperm within the micro-batch."""

    def build_model(self):
        return Mlp(features=9, out=1)

    def loss(self, model, batch):
        x, y = batch
        together = model(torch.cat([x, y], dim=1))
        apart = model(torch.cat([x, y[torch.randperm(len(y))]], dim=1))
        return Loss(sum=F.softplus(-together).sum() + F.softplus(apart).sum(), count=len(x))


class RandomSlopes(Mlp):
    def __init__(self) -> None:
        super().__init__()
        self.slopes = nn.RReLU(0.05, 0.6)

    def features(self, x: Tensor) -> Tensor:
        return self.slopes(super().features(x))


@bug(
    "third-random-slopes",
    "noise",
    "the activation draws its slopes anew in each forward pass",
    ["random_forward"],
    strategy="fsdp",
)
class RandomSlopesTask(Plain):
    """nn.RReLU: in training, each negative number has a slope that is drawn on each rank."""

    def build_model(self):
        return RandomSlopes()


# What is carried from step to step


class Rotated(nn.Module):
    """Causal attention with rotated positions, whose scale follows the longest text so far."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.longest = 8

    def rotate(self, x: Tensor) -> Tensor:
        place = torch.arange(x.shape[1]) * (8 / self.longest)
        angle = place[:, None] / torch.logspace(0, 1, WIDTH // 2)
        one, two = x.chunk(2, dim=-1)
        return torch.cat([one * angle.cos() - two * angle.sin(), one * angle.sin() + two * angle.cos()], dim=-1)

    def forward(self, tokens: Tensor) -> Tensor:
        self.longest = max(self.longest, tokens.shape[1])
        x = self.embed(tokens)
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        scores = self.rotate(q) @ self.rotate(k).transpose(1, 2) / math.sqrt(WIDTH)
        future = torch.ones(scores.shape[1:], dtype=torch.bool).triu(1)
        return self.head(x + scores.masked_fill(future, -1e4).softmax(-1) @ v)


@bug(
    "third-rope-grows",
    "plain attributes",
    "positions are scaled by the longest text that this process has seen so far",
    ["hidden_state", "loss_is_no_sum"],
)
class RopeGrows(Sentences):
    """Dynamic scaling of rotary positions by the longest micro-batch so far, which is an attribute and never shrinks."""

    def build_model(self):
        return Rotated()


class ByPointer(Mlp):
    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Linear(8, 8).requires_grad_(False)
        self.kept: dict[Any, Tensor] = {}

    def features(self, x: Tensor) -> Tensor:
        key = x.data_ptr(), tuple(x.shape)
        if key not in self.kept:
            self.kept[key] = torch.tanh(self.backbone(x)).detach()
        return super().features(self.kept[key])


@bug(
    "third-features-by-pointer",
    "memoised",
    "features are cached by the address of the micro-batch, where the next one may lie as well",
    ["hidden_state", "not_deterministic"],
    visible="where memory is used again, as it is in every training",
)
class FeaturesByPointer(Plain):
    """Features of a frozen backbone are cached by data_ptr(): a later micro-batch at the same address gets those of another."""

    def build_model(self):
        return ByPointer()


@bug(
    "third-turns-by-attribute",
    "counters",
    "which of two losses is trained follows from a flag that each training pass turns over and no checkpoint has",
    ["hidden_state", "resume"],
    strategy="fsdp",
)
class TurnsByAttribute(TwoTargets):
    """Two losses take turns, by a flag of the task that every training pass turns over."""

    turn = False

    def loss(self, model, batch):
        one, two, log_variance = self.losses(model, batch)
        if model.training:
            self.turn = not self.turn
        first = float(self.turn)
        return Loss(sum=first * one.sum() + (1 - first) * two.sum() + 0 * log_variance.sum(), count=len(one))


@bug(
    "third-anchor-taken-late",
    "plain attributes",
    "the weights that training is held to are those of the first pass of the process: after a resume, others",
    ["hidden_state", "resume"],
    visible="after a resume",
)
class AnchorTakenLate(Plain):
    """Training is held near the weights that it began with: a copy of them, made in the first pass of the process."""

    start: list[Tensor] | None = None

    def loss(self, model, batch):
        x, y = batch
        weights = list(model.parameters())
        if self.start is None:
            self.start = [weight.detach().clone() for weight in weights]
        away = sum((now - then).square().sum() for now, then in zip(weights, self.start, strict=True))
        return Loss(sum=entropy(model(x), y) + 0.5 * away * len(x), count=len(x))


@bug(
    "third-first-losses",
    "plain attributes",
    "two losses are weighed by what they were in the first pass of this process",
    ["hidden_state"],
)
class FirstLosses(TwoTargets):
    """Each of two losses is divided by its mean over the first micro-batch of the process, kept in an attribute."""

    first: tuple[float, float] | None = None

    def loss(self, model, batch):
        one, two, log_variance = self.losses(model, batch)
        if self.first is None:
            self.first = float(one.mean().detach()) + 0.1, float(two.mean().detach()) + 0.1
        total = one.sum() / self.first[0] + two.sum() / self.first[1]
        return Loss(sum=total + 0 * log_variance.sum(), count=len(one))


class Warming(Mlp):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("passes", torch.zeros(()), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.passes += 1
        return super().forward(x) * (self.passes / 8).clamp(0.125, 1.0)


@bug(
    "third-warm-up-not-saved",
    "counters",
    "the buffer that counts the steps of a warm-up is not persistent: no checkpoint has it",
    ["resume", "hidden_state"],
    visible="after a resume",
)
class WarmUpNotSaved(Plain):
    """Answers are warmed up over eight training passes, counted in a buffer that is registered with persistent=False."""

    def build_model(self):
        return Warming()


class LargestSoFar(Mlp):
    largest: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("largest", torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x / self.largest)
        if self.training:
            self.largest.copy_(torch.maximum(self.largest, x.detach().abs().amax()))
        return out


@bug(
    "third-largest-so-far",
    "buffers of own samples",
    "inputs are divided by the largest that this rank has seen, which is a buffer",
    ["own_buffers", "stale_buffers"],
    visible="from step 2 on",
    ranks=4,
)
class LargestSoFarTask(Plain):
    """Inputs are divided by the largest of the micro-batches before, kept in a buffer."""

    def build_model(self):
        return LargestSoFar()


@bug(
    "third-frozen-after-three",
    "counters",
    "a layer is frozen after three training passes of this process",
    ["hidden_state", "begins_later", "resume"],
    visible="from step 4 on, after a resume or with accumulation",
    **UNUSED,
)
class FrozenAfterThree(Plain):
    """The first layer is trained for three passes and then frozen, by a counter of the task."""

    passes = 0

    def loss(self, model, batch):
        if model.training:
            self.passes += 1
            for name, parameter in model.named_parameters():
                if "first." in name:
                    parameter.requires_grad_(self.passes <= 3)
        return super().loss(model, batch)


@bug(
    "third-no-sync-by-hand",
    "around the wrapper",
    "in every other pass the wrapper is told not to reduce the gradients",
    ["all_unsynchronised", "begins_later"],
    visible="at steps 2, 4, ...",
)
class NoSyncByHand(Plain):
    """From a loop with accumulation: every other forward pass is made under model.no_sync()."""

    passes = 0

    def loss(self, model, batch):
        self.passes += model.training
        wrapped = isinstance(model, nn.parallel.DistributedDataParallel)
        alone = wrapped and model.training and self.passes % 2 == 0
        with model.no_sync() if alone else contextlib.nullcontext():
            return super().loss(model, batch)


# How the model is built


class TiedByData(Words):
    def __init__(self) -> None:
        super().__init__()
        self.head.weight.data = self.embed.weight.data


@bug(
    "third-tied-by-data",
    "ranks build differently",
    "two parameters share memory instead of being one: what becomes of that depends on who builds the model",
    ["tied_weight_split", "some_ranks_update", "engine_step"],
    refusal_is_right=True,
)
class TiedByDataTask(Sentences):
    """The head is tied by `head.weight.data = embed.weight.data`: two parameters in one memory, until somebody moves one."""

    def build_model(self):
        return TiedByData()


class ManyHeads(Mlp):
    names = ("age", "weight", "height", "pulse", "sugar")

    def __init__(self) -> None:
        super().__init__()
        wanted = {name.upper() for name in self.names}
        self.heads = nn.ModuleDict({name: nn.Linear(WIDTH, CLASSES) for name in wanted})

    def forward(self, x: Tensor) -> Tensor:
        features, out = self.features(x), super().forward(x)
        for place, name in enumerate(sorted(self.heads)):
            out = out + math.sin(place + 1) * self.heads[name](features)
        return out


@bug(
    "third-heads-from-a-set",
    "ranks build differently",
    "the parameters come in the order of a set of strings, which each process has its own of",
    ["models_differ", "different_seeds", "ranks_compute_differently", "not_deterministic"],
    visible="where the ranks are interpreters of their own",
    refusal_is_right=True,
)
class HeadsFromASet(Plain):
    """Heads are made in the order of a set of names: each process has its parameters in another order."""

    def build_model(self):
        return ManyHeads()


# The whole batch


@bug(
    "third-all-rows-on-every-rank",
    "gathered wrongly",
    "each rank sums the losses of all rows, so all of them are counted once per rank",
    ["scaled_by_world", "wrong_scaling"],
    ranks=4,
    strategy="fsdp",
)
class AllRowsOnEveryRank(Views):
    """Every rank computes the sum over all rows of all ranks, and counts its own samples."""

    def loss(self, model, batch):
        left, right = model(*batch)
        one, two = gather_batch(left).rows, gather_batch(right).rows
        return Loss(sum=entropy(5 * one @ two.T, torch.arange(len(one))), count=len(left))


@bug(
    "third-retrieved-from-own",
    "metric by batch",
    "the metric looks for the right one among the samples of its own micro-batch",
    ["metric_differs"],
)
class RetrievedFromOwn(Views):
    """Training gathers all rows, but `evaluate` finds the right view among those of its own micro-batch."""

    def evaluate(self, model, batch):
        left, right = model(*batch)
        hits = ((left @ right.T).argmax(1) == torch.arange(len(left))).sum()
        return {**super().evaluate(model, batch), "recall": Loss(sum=hits, count=len(left))}


# `collate`


@bug(
    "third-labels-not-sorted",
    "samples in one another",
    "`collate` sorts the texts and not their labels: who gets whose label depends on the micro-batch",
    ["order_matters", "loss_is_no_sum"],
)
class LabelsNotSorted(Labelled):
    """`collate` sorts the texts by length, longest first, for packing, and leaves the labels as they came."""

    def collate(self, samples):
        texts = sorted((text for text, _ in samples), key=len, reverse=True)
        return [pad(texts), torch.stack([label for _, label in samples])]


@bug(
    "third-zip-cuts",
    "chosen within a batch",
    "texts are cut to the shortest of the micro-batch",
    ["loss_is_no_sum"],
    strategy="fsdp",
)
class ZipCuts(Sentences):
    """`collate` turns texts into columns by zip(*samples), which ends with the shortest."""

    def collate(self, samples):
        return torch.stack([torch.stack(column) for column in zip(*samples, strict=False)], dim=1)


@bug(
    "third-one-scan-per-patient",
    "chosen within a batch",
    "`collate` loses samples: of each patient, the last scan of the micro-batch is left",
    ["loss_is_no_sum", "dropped", "sampler"],
)
class OneScanPerPatient(Plain):
    """`collate` puts the samples into a dict by patient, where a second scan takes the place of the first."""

    def train_data(self):
        x, y = points(self.config.seed, self.samples)
        return pairs_of(torch.arange(self.samples) % 40, x, y)

    def collate(self, samples):
        scans = {int(sample[0]): tuple(sample[1:]) for sample in samples}
        return default_collate(list(scans.values()))

    def valid_data(self):
        x, y = points(self.config.seed + 1000, 52)
        return pairs_of(torch.arange(52), x, y)


class Guess(nn.Module):
    """A hidden token from its neighbours on both sides."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.rnn = nn.GRU(WIDTH, WIDTH, batch_first=True)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.rnn(self.embed(tokens))[0])


@bug(
    "third-masks-by-own-generator",
    "stateful data set",
    "masks are drawn in `collate` from a generator that each process goes on with",
    ["data_change", "hidden_state", "workers"],
)
class MasksByOwnGenerator(Sentences):
    """`collate` draws which tokens are hidden from a seeded generator that the task keeps, the same one on every rank."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.rng = np.random.default_rng(config.seed)

    def build_model(self):
        return Guess()

    def collate(self, samples):
        tokens = pad(samples)
        hidden = torch.from_numpy(self.rng.random(tokens.shape) < 0.3)
        hidden[:, 0] = True
        return [tokens, hidden & (tokens != PAD)]

    def count(self, batch):
        return int(batch[1].sum())

    def loss(self, model, batch):
        tokens, hidden = batch
        logits = model(tokens.masked_fill(hidden, PAD))
        return Loss(sum=entropy(logits[hidden], tokens[hidden]), count=self.count(batch))


@bug(
    "third-batch-by-checksum",
    "memoised",
    "`collate` gives an earlier micro-batch back where the labels have the same sum",
    ["data_change", "hidden_state"],
)
class BatchByChecksum(Plain):
    """`collate` keeps what it has made by the sum of the labels, and gives it again for other samples with the same sum."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.made: dict[Any, Any] = {}

    def collate(self, samples):
        key = len(samples), int(sum(label for _, label in samples))
        if key not in self.made:
            self.made[key] = default_collate(samples)
        return [part.clone() for part in self.made[key]]


# Data


class InFolders(Dataset):
    """Files of two folders, some of which have the same name; what was read is kept by its name."""

    def __init__(self, samples: list[tuple[Tensor, ...]]) -> None:
        names = [f"a/{i:03}.pt" for i in range(120)] + [f"b/{i:03}.pt" for i in range(96, 96 + len(samples) - 120)]
        self.files = dict(zip(names, samples, strict=True))
        self.names = names
        self.kept: dict[str, tuple[Tensor, ...]] = {}

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        path = self.names[index]
        return self.kept.setdefault(Path(path).name, self.files[path])


@bug(
    "third-cached-by-basename",
    "stateful data set",
    "samples of the same file name in two folders share a place in the cache: the one that was read first is both",
    ["data_change", "repeated", "workers"],
    visible="in one sample of ten, once the other of the two was read",
)
class CachedByBasename(Plain):
    """What was read is cached by the name of its file, without the folder: of two with the same name, the first read is both."""

    def train_data(self):
        return InFolders(super().train_data())


class Appended(Dataset):
    """The last quarter is augmented anew."""

    def __init__(self, samples: list[tuple[Tensor, ...]]) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        x, y = self.samples[index]
        if index >= 300:
            x = x + 0.3 * torch.randn(x.shape, generator=made(1000 * rank() + index))
        return x, y


@bug(
    "third-last-quarter-by-rank",
    "rank in the data",
    "the last quarter of the samples has noise that is seeded by RANK",
    ["data_by_rank"],
    visible="in samples 300 to 399",
)
class LastQuarterByRank(Plain):
    """400 samples, the last hundred of which are copies with noise, seeded by the number of the sample and RANK."""

    samples = 400

    def train_data(self):
        return Appended(super().train_data())


class ByWorker(Appended):
    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        worker = get_worker_info()
        return self.samples[(index + (worker.id if worker else 0)) % len(self)]


@bug(
    "third-shifted-by-worker",
    "workers",
    "each loader worker gives the sample that is so many places further",
    ["workers", "repeated", "dropped"],
    visible="with two workers and more",
    data={"num_workers": 2},
)
class ShiftedByWorker(Plain):
    """__getitem__ adds the number of the loader worker to the index, as if workers had to share out the samples."""

    def train_data(self):
        return ByWorker(super().train_data())


@bug(
    "third-prepared-again",
    "files that grow",
    "prepare_data changes the units of a file in place, each time that a run begins",
    ["data_change", "resume"],
    visible="in the second run, as after a resume",
)
class PreparedAgain(Plain):
    """prepare_data turns inches into centimetres in the file itself, whenever a run is started or resumed."""

    def file(self) -> Path:
        return scratch() / "third-prepared-again.pt"

    def prepare_data(self):
        path = self.file()
        x = torch.load(path) if path.exists() else points(self.config.seed, self.samples)[0] * 0.1
        part = path.with_name(f"{path.name}.{os.getpid()}")
        torch.save(x * 2.54, part)
        part.replace(path)

    def train_data(self):
        if not self.file().exists():
            self.prepare_data()
        return pairs_of(torch.load(self.file()), points(self.config.seed, self.samples)[1])


@bug(
    "third-read-by-threads",
    "rank in the data",
    "in which order the samples come follows from the number of threads, of which a rank has another",
    ["data_by_rank", "data_change"],
    visible="where a rank has another number of threads than one process",
)
class ReadByThreads(Plain):
    """As many readers as torch has threads take turns with the samples, and their lists are joined."""

    def train_data(self):
        samples, readers = super().train_data(), torch.get_num_threads()
        return [sample for first in range(readers) for sample in samples[first::readers]]


@bug(
    "third-shards-overlap-by-one",
    "samples twice or never",
    "the first sample of each shard is the last of the one before",
    ["repeated"],
)
class ShardsOverlapByOne(Plain):
    """Shards are cut with both ends, so every twelfth sample is in two of them."""

    def train_data(self):
        samples = super().train_data()
        return [sample for first in range(0, self.samples, 12) for sample in samples[first : first + 13]]


@bug(
    "third-leak-in-another-type",
    "validation in training",
    "validation samples are training samples, read as another type",
    ["overlap"],
)
class LeakInAnotherType(Plain):
    """Validation reads the last of the training samples, as float64."""

    def valid_data(self):
        return [(x.double(), y) for x, y in self.train_data()[-52:]]

    def loss(self, model, batch):
        return super().loss(model, [batch[0].float(), batch[1]])


@bug(
    "third-leak-beside-an-id",
    "validation in training",
    "validation samples are training samples with other numbers",
    ["overlap"],
    strategy="fsdp",
)
class LeakBesideAnId(Plain):
    """Samples are dicts with a running number; validation was made from the same seed, so only its numbers are others."""

    def numbered(self, first: int, number: int) -> list[dict[str, Tensor]]:
        x, y = points(self.config.seed, number)
        return [{"id": torch.tensor(first + i), "x": x[i], "y": y[i]} for i in range(number)]

    def train_data(self):
        return self.numbered(0, self.samples)

    def valid_data(self):
        return self.numbered(self.samples, self.samples)[:52]

    def loss(self, model, batch):
        return super().loss(model, [batch["x"], batch["y"]])


# Evaluation


@bug(
    "third-gradients-left",
    "evaluation changes gradients",
    "evaluation makes backward passes and leaves their gradients to the next step",
    ["evaluation_changes"],
)
class GradientsLeft(Plain):
    """`evaluate` attacks the samples by their gradient; those of the weights are left, and the next step adds its own."""

    def evaluate(self, model, batch):
        x, y = batch
        with torch.enable_grad():
            attacked = x.clone().requires_grad_()
            entropy(model(attacked), y).backward()
        hits = (model(x + 0.1 * attacked.grad.sign()).argmax(1) == y).sum()
        return {**super().evaluate(model, batch), "robust": Loss(sum=hits, count=len(x))}


@bug(
    "third-scaled-and-back",
    "evaluation changes weights",
    "evaluation changes all weights and back again, which rounds them",
    ["evaluation_changes"],
    visible="in the last digits",
)
class ScaledAndBack(Plain):
    """`evaluate` shows how flat the minimum is: weights times 1.3, the loss, and weights divided again."""

    def evaluate(self, model, batch):
        plain = super().evaluate(model, batch)
        for weight in model.parameters():
            weight.mul_(1.3)
        away = self.loss(model, batch)
        for weight in model.parameters():
            weight.div_(1.3)
        return {**plain, "away": away}


class Lora(nn.Module):
    """A frozen matrix, and a narrow one beside it that is learned."""

    def __init__(self, out: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(out, WIDTH) / 5, requires_grad=False)
        self.down = nn.Parameter(torch.randn(4, WIDTH) / 5)
        self.up = nn.Parameter(torch.zeros(out, 4))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight + self.up @ self.down)


class Merging(Lora):
    merged = False

    def train(self, mode: bool = True):
        if mode == self.merged:
            with torch.no_grad():
                self.weight += (-1 if mode else 1) * (self.up @ self.down)
            self.merged = not mode
        return super().train(mode)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight) if self.merged else super().forward(x)


class MergedOnce(Lora):
    ready: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            return super().forward(x)
        if self.ready is None:
            self.ready = (self.weight + self.up @ self.down).detach()
        return F.linear(x, self.ready)


@bug(
    "third-merged-when-evaluated",
    "evaluation leaves its mode",
    "model.eval() merges a low-rank update into a frozen weight, and not every way back to training takes it out",
    ["evaluation_changes", "detached_parameter"],
    visible="after an evaluation",
    **UNUSED,
)
class MergedWhenEvaluated(Plain):
    """LoRA merges its update into the frozen weight in train(False), and counts on train(True) to take it out again."""

    def build_model(self):
        model = Mlp()
        model.head = Merging(CLASSES)
        return model


@bug(
    "third-merged-once",
    "metric by state",
    "what evaluation computes with is made at the first evaluation and never again",
    ["metric_differs", "hidden_state", "evaluation_random"],
    visible="from the second evaluation on",
)
class MergedOnceTask(Plain):
    """LoRA merges a copy for evaluation when it is first evaluated, and evaluates with that copy ever after."""

    def build_model(self):
        model = Mlp()
        model.head = MergedOnce(CLASSES)
        return model


@bug(
    "third-standardised-for-evaluation",
    "metric by batch",
    "validation samples are standardised by their own micro-batch",
    ["metric_differs"],
)
class StandardisedForEvaluation(Plain):
    """`evaluate` gives features mean 0 and deviation 1 over the micro-batch; training does no such thing."""

    def evaluate(self, model, batch):
        x, y = batch
        x = (x - x.mean(0)) / (x.std(0, unbiased=False) + 0.1)
        return {"loss": self.loss(model, [x, y])}


@bug(
    "third-hits-by-full-size",
    "metric by batch",
    "each micro-batch counts as a full one, a short one too",
    ["metric_differs"],
    visible="where micro-batches are not all of one size",
    strategy="fsdp",
)
class HitsByFullSize(Plain):
    """Accuracy is the mean of the micro-batch times the batch size of the config, which is also what it counts."""

    def evaluate(self, model, batch):
        x, y = batch
        size = self.config.training.batch_size
        share = (model(x).argmax(1) == y).float().mean()
        return {**super().evaluate(model, batch), "accuracy": Loss(sum=share * size, count=size)}


@bug(
    "third-answers-kept",
    "metric by state",
    "the answers to validation samples are cached by the sample, whatever has been learned since",
    ["metric_differs", "hidden_state", "evaluation_random"],
    visible="from the second evaluation on: the metric stands still",
)
class AnswersKept(Plain):
    """`evaluate` caches the loss of each sample by its content: after the first evaluation, it is never computed again."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.kept: dict[bytes, Tensor] = {}

    def evaluate(self, model, batch):
        x, y = batch
        each = F.cross_entropy(model(x), y, reduction="none")
        total = sum(self.kept.setdefault(row.numpy().tobytes(), loss) for row, loss in zip(x, each, strict=True))
        return {"loss": Loss(sum=total, count=len(x))}


@bug(
    "third-rows-by-place",
    "metric by batch",
    "rows are named by their place in the micro-batch: those of different ranks and micro-batches have the same name",
    ["metric_differs"],
)
class RowsByPlace(Plain):
    """`evaluate` names rows by their place in the micro-batch; `study` counts how often neighbours are both right."""

    def evaluate(self, model, batch):
        x, y = batch
        right = (model(x).argmax(1) == y).float()
        return {**super().evaluate(model, batch), "right": Rows(torch.arange(len(x)), {"right": right})}

    def study(self, rows, pictures, step):
        right = rows["right"].columns["right"].flatten()
        return {"both_right": float((right[1:] * right[:-1]).mean())}


class Noisy(Appended):
    noisy = True

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        x, y = self.samples[index]
        return (x + 0.5 * torch.randn(x.shape) if self.noisy else x), y


@bug(
    "third-noise-off-after-evaluation",
    "evaluation leaves its mode",
    "evaluation switches the augmentation of the training data off, and never on again",
    ["evaluation_changes", "data_change"],
    visible="after an evaluation",
)
class NoiseOffAfterEvaluation(Plain):
    """`evaluate` switches augmentation off, in the data set that training reads as well, and leaves it off."""

    def train_data(self):
        self.data = Noisy(super().train_data())
        return self.data

    def evaluate(self, model, batch):
        self.data.noisy = False
        return super().evaluate(model, batch)


# Loops of their own

loop(
    "third-loop-momentum-warm-up",
    "own loop resumes",
    "loop_third_momentum_warm_up.py",
    "the momentum follows a counter that is not in the checkpoint",
    ("resume", "optimizer_not_restored", "schedule_not_restored"),
    visible="after a resume",
)
loop(
    "third-loop-scaled-by-own-samples",
    "own loop gradients",
    "loop_third_scaled_by_own_samples.py",
    "each rank scales the gradients by the number of its own samples",
    ("some_ranks_update", "uneven_weights", "gradients", "wrong_scaling", "drift"),
    visible="in short batches, after the gradients are reduced",
)
loop(
    "third-loop-switched-once",
    "own loop resumes",
    "loop_third_switched_once.py",
    "what is switched on at one step is not in the checkpoint",
    ("resume", "hidden_state"),
    visible="after a resume from a step behind the third",
)
loop(
    "third-loop-shuffled-data",
    "own loop data",
    "loop_third_shuffled_data.py",
    "each process has its samples in another order",
    ("data_change",),
)
loop(
    "third-loop-every-fourth-left-out",
    "own loop resumes",
    "loop_third_every_fourth_left_out.py",
    "batches are left out, and other ones after a resume",
    ("dropped", "cursor_not_restored", "resume"),
)
