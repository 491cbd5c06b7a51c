"""Planted bugs, a fifth set: losses, padding, hidden state, and programs with a loop of their own."""

from __future__ import annotations

import math
from collections import deque
from contextvars import ContextVar
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from case import ACCUMULATE, bug, loop
from plain import CLASSES, PAD, VOCABULARY, WIDTH, Mlp, Plain, Sentences, points, sentences
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import default_collate

from shardwise import Loss


def made(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def rows(*columns: Any) -> list[tuple[Any, ...]]:
    return list(zip(*columns, strict=True))


def entropy(logits: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(logits, y, reduction="sum")


def together() -> bool:
    return dist.is_initialized() and dist.get_world_size() > 1


# Correct tasks that the bugs below change


class Part(Plain):
    """A task whose samples come from `part`, for training and validation by another seed."""

    def part(self, seed: int, number: int) -> list[Any]:
        raise NotImplementedError

    def train_data(self):
        return self.part(self.config.seed, self.samples)

    def valid_data(self):
        return self.part(self.config.seed + 1000, 52)


class Cells(Part):
    """The type of a cell from how often it was seen to read each gene; some were looked at longer than others."""

    genes = 16

    def part(self, seed, number):
        rates = torch.randn(CLASSES, self.genes, generator=made(77)).exp() * 3
        generator = made(seed)
        kinds = torch.randint(CLASSES, (number,), generator=generator)
        depth = (torch.randn(number, 1, generator=generator) * 1.2).exp()
        return rows(torch.poisson(rates[kinds] * depth + 0.05, generator=generator), kinds)

    def build_model(self):
        return Mlp(self.genes)

    def loss(self, model, batch):
        x, y = batch
        return Loss(sum=entropy(model(x.log1p()), y), count=len(x))


class Scans(Part):
    """Three classes of pixels; the last, a lesion, is in one picture of twelve."""

    def part(self, seed, number):
        generator = made(seed)
        x = torch.rand(number, 1, 6, 6, generator=generator)
        y = (F.avg_pool2d(x, 3, stride=1, padding=1)[:, 0] > 0.45).long()
        ill = torch.rand(number, generator=generator) < 1 / 12
        y[ill, 1:3, 2:4] = 2
        x[ill, 0, 1:3, 2:4] += 1
        return rows(x, y)

    def build_model(self):
        return nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.GELU(), nn.Conv2d(8, 3, 3, padding=1))

    def loss(self, model, batch):
        x, y = batch
        each = F.cross_entropy(model(x), y, reduction="none").flatten(1)
        return Loss(sum=each.mean(1).sum(), count=len(x))


class Waves(Part):
    """The class of a recording, of whatever length."""

    def part(self, seed, number):
        generator = made(seed)
        lengths = torch.randint(4, 49, (number,), generator=generator).tolist()
        kinds = torch.randint(CLASSES, (number,), generator=generator)
        return [
            (torch.sin(torch.arange(n) * (0.4 + 0.5 * k)) + 0.3 * torch.randn(n, generator=generator) + 1, k)
            for n, k in zip(lengths, kinds.tolist(), strict=True)
        ]

    def collate(self, samples):
        lengths = torch.tensor([len(wave) for wave, _ in samples])
        waves = pad_sequence([wave for wave, _ in samples], batch_first=True)
        return [waves, lengths, torch.tensor([kind for _, kind in samples])]

    def count(self, batch):
        return len(batch[0])

    def build_model(self):
        return Listener()

    def loss(self, model, batch):
        waves, lengths, y = batch
        return Loss(sum=entropy(model(waves, lengths), y), count=len(y))


class Listener(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv1d(1, 16, 3, padding=1), nn.Conv1d(16, 16, 3, padding=1)
        self.head = nn.Linear(16, CLASSES)

    def normalised(self, x: Tensor) -> Tensor:
        return F.layer_norm(x.transpose(1, 2), (16,)).transpose(1, 2)

    def forward(self, waves: Tensor, lengths: Tensor) -> Tensor:
        inside = (torch.arange(waves.shape[1], device=waves.device) < lengths[:, None])[:, None].float()
        x = self.normalised(self.first(waves[:, None])) * inside
        x = F.gelu(self.second(F.gelu(x))) * inside
        return self.head(x.sum(2) / lengths[:, None])


class Molecules(Part):
    """The class of a graph from its nodes and edges."""

    def part(self, seed, number):
        generator = made(seed)
        samples = []
        for _ in range(number):
            size = int(torch.randint(3, 9, (1,), generator=generator))
            nodes = torch.randn(size, 4, generator=generator)
            edges = torch.randint(size, (2, 2 * size), generator=generator)
            score = (nodes[edges[0]] * nodes[edges[1]]).sum()
            samples.append((nodes, edges, int(score > 0) + 2 * int(nodes.sum() > 0)))
        return samples

    def collate(self, samples):
        sizes = torch.tensor([len(nodes) for nodes, _, _ in samples])
        starts = (sizes.cumsum(0) - sizes).tolist()
        edges = torch.cat([edges + start for (_, edges, _), start in zip(samples, starts, strict=True)], dim=1)
        which = torch.repeat_interleave(torch.arange(len(samples)), sizes)
        return [torch.cat([nodes for nodes, _, _ in samples]), edges, which, torch.tensor([y for _, _, y in samples])]

    def count(self, batch):
        return len(batch[3])

    def build_model(self):
        return Messages()

    def loss(self, model, batch):
        nodes, edges, which, y = batch
        return Loss(sum=entropy(model(nodes, edges, which, len(y)), y), count=len(y))


class Messages(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(4, WIDTH)
        self.blocks = nn.ModuleList(nn.Linear(2 * WIDTH, WIDTH) for _ in range(2))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, nodes: Tensor, edges: Tensor, which: Tensor, graphs: int) -> Tensor:
        x = self.embed(nodes)
        for block in self.blocks:
            heard = torch.zeros_like(x).index_add(0, edges[1], x[edges[0]])
            x = x + torch.tanh(block(torch.cat([x, heard], dim=1)))
        return self.head(x.new_zeros(graphs, WIDTH).index_add(0, which, x))


class Diffusion(Part):
    """What noise is in a point; noise and strength belong to the sample."""

    def part(self, seed, number):
        x, _ = points(seed, number)
        generator = made(seed + 5)
        return rows(x.sign() * 2, torch.randn(number, 8, generator=generator), torch.rand(number, generator=generator))

    def build_model(self):
        return Mlp(9, 8)

    def strengths(self, batch: Any) -> Tensor:
        return batch[2]

    def loss(self, model, batch):
        clean, noise = batch[:2]
        t = self.strengths(batch)[:, None]
        noisy = (t * math.pi / 2).cos() * clean + (t * math.pi / 2).sin() * noise
        return Loss(sum=(model(torch.cat([noisy, t], dim=1)) - noise).square().mean(1).sum(), count=len(clean))


class Adapted(nn.Module):
    """A frozen network, and the same with a small matrix of low rank beside one of its layers."""

    def __init__(self) -> None:
        super().__init__()
        self.base = Mlp().requires_grad_(False)
        self.down = nn.Parameter(torch.randn(8, 3))
        self.up = nn.Parameter(torch.randn(3, WIDTH))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.base.head(self.base.features(x) + x @ self.down @ self.up), self.base(x)


# Divisors, counts and weights


@bug(
    "fifth-median-library-size",
    "batch statistics",
    "counts are scaled to the median depth of the micro-batch, and not to one fixed depth",
    ["loss_is_no_sum"],
    strategy="fsdp",
)
class MedianLibrarySize(Cells):
    """`collate` scales each cell to the median number of reads, as scanpy does by default: that of the micro-batch."""

    def collate(self, samples):
        x, y = default_collate(samples)
        depth = x.sum(1, keepdim=True)
        return [x / depth * depth.median(), y]


@bug(
    "fifth-count-rounded-down",
    "wrong count",
    "the sum of the weights is rounded down in each micro-batch",
    ["wrong_scaling", "uneven_weights", "loss_is_no_sum"],
)
class CountRoundedDown(Part):
    """Samples have weights, and the count is `int(weights.sum())`."""

    def part(self, seed, number):
        return rows(*points(seed, number), 0.15 + 0.4 * torch.rand(number, generator=made(seed + 3)))

    def count(self, batch):
        return max(1, int(batch[2].sum()))

    def loss(self, model, batch):
        x, y, weight = batch
        losses = F.cross_entropy(model(x), y, reduction="none")
        return Loss(sum=(weight * losses).sum(), count=self.count(batch))


@bug(
    "fifth-reference-point-of-batch",
    "chosen within a batch",
    "the reference point that every sample is compared with is a mean over the micro-batch",
    ["loss_is_no_sum"],
    strategy="fsdp",
    batch_size=3,
)
class ReferencePointOfBatch(Part):
    """KTO for an adapter: each answer is held against the mean divergence of the micro-batch."""

    def part(self, seed, number):
        x, y = points(seed, number)
        return rows(x, y, torch.rand(number, generator=made(seed + 2)) < 0.6)

    def build_model(self):
        return Adapted()

    def loss(self, model, batch):
        x, y, liked = batch
        tuned, frozen = (F.log_softmax(logits, dim=1) for logits in model(x))
        reward = 2 * (tuned - frozen).gather(1, y[:, None])[:, 0]
        divergence = 2 * (tuned.exp() * (tuned - frozen)).sum(1).mean().clamp(min=0).detach()
        values = torch.sigmoid(torch.where(liked, reward - divergence, divergence - reward))
        return Loss(sum=(1 - values).sum(), count=len(x))


@bug(
    "fifth-classes-present-in-batch",
    "rare",
    "which classes a picture's Dice is averaged over follows from the others of its micro-batch",
    ["loss_is_no_sum"],
)
class ClassesPresentInBatch(Scans):
    """Dice of each picture, averaged over the classes that are present: in the micro-batch, not in the picture."""

    def loss(self, model, batch):
        x, y = batch
        shares = model(x).softmax(1)
        truth = F.one_hot(y, 3).movedim(3, 1).float()
        both, either = (shares * truth).sum((2, 3)), (shares + truth).sum((2, 3))
        present = truth.sum((0, 2, 3)) > 0
        dice = (2 * both + 0.1) / (either + 0.1)
        return Loss(sum=(1 - dice[:, present]).mean(1).sum(), count=len(x))


@bug(
    "fifth-strengths-spread-over-batch",
    "chosen within a batch",
    "the strength of a sample's noise follows from its place in the micro-batch and from how many are in it",
    ["loss_is_no_sum", "order_matters"],
)
class StrengthsSpreadOverBatch(Diffusion):
    """The strengths of the noise are spread evenly over the micro-batch, which makes the loss less noisy."""

    def strengths(self, batch):
        number = len(batch[0])
        return (torch.arange(number) + 0.5) / number


@bug(
    "fifth-linear-backward-mean",
    "custom backward",
    "the gradient of one weight is divided by the samples of the micro-batch",
    ["mean_of_means", "gradients", "loss_is_no_sum"],
)
class LinearBackwardMean(Plain):
    """A linear layer with a backward pass of its own, which takes the mean over the samples for its weight."""

    def build_model(self):
        model = Mlp()
        model.blocks[1] = Mine(WIDTH, WIDTH)
        return model


class Mine(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return Product.apply(x, self.weight) + self.bias


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x @ weight.T

    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        return gradient @ weight, gradient.T @ x / len(x)


# Padding and borders


@bug(
    "fifth-group-norm-over-padding",
    "samples in one another",
    "mean and variance of a recording are taken over the padding too, whose length the micro-batch decides",
    ["loss_is_no_sum"],
    strategy="fsdp",
    batch_size=2,
)
class GroupNormOverPadding(Waves):
    """Recordings of different lengths are normalised by nn.GroupNorm, padding and all."""

    def build_model(self):
        return GroupListener()


class GroupListener(Listener):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(4, 16)

    def normalised(self, x: Tensor) -> Tensor:
        return self.norm(x)


@bug(
    "fifth-padding-attended",
    "samples in one another",
    "attention looks at padding, of which there is more or less as the micro-batch has it",
    ["loss_is_no_sum"],
)
class PaddingAttended(Sentences):
    """A causal mask is there, but texts are padded on the left, and nothing hides the padding from attention."""

    def collate(self, samples):
        return pad_sequence(samples, batch_first=True, padding_value=PAD, padding_side="left")

    def build_model(self):
        return Attentive()


class Attentive(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.mixed = nn.Linear(WIDTH, 3 * WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        query, key, value = self.mixed(x)[:, None].chunk(3, dim=3)
        return self.head(x + F.scaled_dot_product_attention(query, key, value, is_causal=True)[:, 0])


@bug(
    "fifth-edges-without-offset",
    "samples in one another",
    "the edges of all graphs of the micro-batch join nodes of its first one",
    ["loss_is_no_sum", "order_matters"],
)
class EdgesWithoutOffset(Molecules):
    """Graphs are joined into one, and the edges keep the numbers that nodes had in their own graph."""

    def collate(self, samples):
        nodes, _, which, y = super().collate(samples)
        return [nodes, torch.cat([edges for _, edges, _ in samples], dim=1), which, y]


@bug(
    "fifth-cut-to-texts-of-rank-0",
    "own collectives",
    "the other ranks cut their texts to the longest one of rank 0",
    ["ranks_compute_differently", "all_gradients", "loss_is_no_sum"],
    ranks=4,
    batch_size=4,
)
class CutToTextsOfRank0(Sentences):
    """The longest text's length is broadcast from rank 0, "so that all ranks have the same shapes"."""

    def train_data(self):
        long = iter(sentences(self.config.seed + 1, 96, 10, 48))
        short = iter(sentences(self.config.seed, 144, 4, 7))
        return [next(long if i % 5 in (1, 3) else short) for i in range(240)]

    def loss(self, model, batch):
        size = torch.tensor(batch.shape[1])
        if together():
            dist.broadcast(size, 0)
        cut = batch[:, : int(size)]
        total = F.cross_entropy(
            model(cut[:, :-1]).flatten(0, 1), cut[:, 1:].flatten(), ignore_index=PAD, reduction="sum"
        )
        return Loss(sum=total, count=self.count(batch))


# State that no checkpoint has


@bug(
    "fifth-power-iteration-in-attribute",
    "plain attributes",
    "the vector of the power iteration is an attribute: it begins anew after a resume, and moves with every pass",
    ["hidden_state"],
    **ACCUMULATE,
)
class PowerIterationInAttribute(Plain):
    """Spectral normalisation by hand: the estimate of the first singular vector is kept in a plain attribute."""

    def build_model(self):
        return Bounded()


class Bounded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Linear(8, 2 * WIDTH)
        self.square = nn.Linear(2 * WIDTH, 2 * WIDTH)
        self.narrow = nn.Linear(2 * WIDTH, CLASSES)
        self.left: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        weight = self.square.weight
        with torch.no_grad():
            left = torch.eye(2 * WIDTH)[0] if self.left is None else self.left
            right = F.normalize(weight.T @ left, dim=0)
            left = F.normalize(weight @ right, dim=0)
        if self.training:
            self.left = left
        bounded = F.linear(torch.tanh(self.wide(x)), 2 * weight / (left @ weight @ right), self.square.bias)
        return self.narrow(torch.tanh(bounded))


@bug(
    "fifth-divergence-controlled",
    "plain attributes",
    "the weight of the divergence is an attribute that follows the micro-batches of this process",
    ["hidden_state"],
)
class DivergenceControlled(Part):
    """As in PPO's adaptive penalty: the weight of the divergence is raised and lowered after each training pass."""

    weight = 1.0

    def part(self, seed, number):
        return rows(*points(seed, number))

    def build_model(self):
        return Adapted()

    def loss(self, model, batch):
        x, y = batch
        tuned, frozen = model(x)
        divergence = F.kl_div(tuned.log_softmax(1), frozen.log_softmax(1), reduction="none", log_target=True).sum()
        total = entropy(tuned, y) + self.weight * divergence
        if model.training:
            self.weight *= 1.5 if divergence > 0.3 * len(x) else 1 / 1.5
        return Loss(sum=total, count=len(x))


@bug(
    "fifth-rehearsal-memory",
    "class attributes",
    "samples that this rank has seen before are trained on again, out of a list that no checkpoint has",
    ["hidden_state"],
)
class RehearsalMemory(Plain):
    """Against forgetting, some of the last samples are kept in a deque of the class and rehearsed in every step."""

    memory: deque[tuple[Tensor, Tensor]] = deque(maxlen=8)

    def loss(self, model, batch):
        x, y = batch
        if model.training and self.memory:
            old, answers = default_collate(list(self.memory))
            logits = model(torch.cat([x, old]))
            total = entropy(logits[: len(x)], y) + entropy(logits[len(x) :], answers) * len(x) / len(old)
        else:
            total = entropy(model(x), y)
        if model.training:
            self.memory.extend(zip(x[:3], y[:3], strict=True))
        return Loss(sum=total, count=len(x))


FOCUS: ContextVar[float] = ContextVar("focus", default=0.0)


@bug(
    "fifth-focus-in-context-variable",
    "globals",
    "how much hard samples count follows from how many passes this process has made",
    ["hidden_state"],
)
class FocusInContextVariable(Plain):
    """Focal loss, whose exponent grows by a quarter with every training pass. A ContextVar holds it."""

    def loss(self, model, batch):
        x, y = batch
        losses = F.cross_entropy(model(x), y, reduction="none")
        focus = FOCUS.get()
        if model.training:
            FOCUS.set(min(focus + 0.25, 3.0))
        return Loss(sum=((1 - (-losses).exp()) ** focus * losses).sum(), count=len(x))


@lru_cache(maxsize=64)
def jitter(number: int) -> Tensor:
    """Drawing it is slow, so once is enough."""
    return torch.randn(number, 8)


@bug(
    "fifth-noise-drawn-once-per-size",
    "memoised",
    "noise is drawn when this process first sees a micro-batch of this size, and kept",
    ["hidden_state", "random_forward"],
)
class NoiseDrawnOncePerSize(Plain):
    """Noise for the inputs is made by a function with lru_cache, which keeps it for each number of samples."""

    def loss(self, model, batch):
        x, y = batch
        noisy = x + 0.7 * jitter(len(x)) if model.training else x
        return Loss(sum=entropy(model(noisy), y), count=len(x))


@bug(
    "fifth-hidden-by-sum-of-batch",
    "noise",
    "which genes are hidden follows from the sum of the micro-batch and the place in it",
    ["loss_is_no_sum", "order_matters", "random_forward"],
    strategy="fsdp",
)
class HiddenBySumOfBatch(Cells):
    """A masked autoencoder, made repeatable: the generator of its masks is seeded by the sum of the micro-batch."""

    def build_model(self):
        return Mlp(self.genes, self.genes)

    def loss(self, model, batch):
        x = batch[0].log1p()
        hidden = torch.rand(x.shape, generator=made(int(batch[0].sum()))) < 0.4
        errors = (model(x.masked_fill(hidden, -1)) - x).square()
        return Loss(sum=(errors * hidden).mean(1).sum(), count=len(x))


@bug(
    "fifth-bank-of-own-samples",
    "buffers of own samples",
    "a buffer holds the last features of every sample, and each rank renews those of its own samples only",
    ["own_buffers", "stale_buffers", "weights_by_samples"],
)
class BankOfOwnSamples(Plain):
    """Instance discrimination: the features of all samples are in a buffer, which the forward pass renews."""

    samples = 48

    def train_data(self):
        return list(enumerate(points(self.config.seed, self.samples)[0]))

    def valid_data(self):
        return None

    def build_model(self):
        return Bank(self.samples)

    def loss(self, model, batch):
        place, x = batch
        return Loss(sum=entropy(model(place, x), place), count=len(x))


class Bank(Mlp):
    def __init__(self, number: int) -> None:
        super().__init__(out=WIDTH)
        self.register_buffer("bank", F.normalize(torch.randn(number, WIDTH), dim=1))

    def forward(self, place: Tensor, x: Tensor) -> Tensor:
        features = F.normalize(self.head(self.features(x)), dim=1)
        if self.training:
            with torch.no_grad():
                self.bank[place] = F.normalize(self.bank[place] + 2 * features, dim=1)
        return features @ self.bank.clone().T / 0.2


# Loops of their own


loop(
    "fifth-loop-warm-up-by-world",
    "own loop rates",
    "loop_fifth_warm_up_by_world.py",
    "the steps of warm-up depend on the number of ranks",
    ("schedule",),
)
loop(
    "fifth-loop-betas-by-world",
    "own loop rates",
    "loop_fifth_betas_by_world.py",
    "the betas of the optimizer depend on the number of ranks",
    ("schedule", "drift", "begins_later"),
)
loop(
    "fifth-loop-moments-cleared",
    "own loop resumes",
    "loop_fifth_moments_cleared.py",
    "after a resume the moments of the optimizer begin at zero",
    ("optimizer_not_restored", "resume"),
    visible="after a resume",
)
loop(
    "fifth-loop-strength-drawn",
    "own loop resumes",
    "loop_fifth_strength_drawn.py",
    "how strong the noise is in a step is drawn from a generator that begins anew after a resume",
    ("resume", "hidden_state"),
    visible="after a resume",
)
loop(
    "fifth-loop-spikes-left-out",
    "own loop gradients",
    "loop_fifth_spikes_left_out.py",
    "a rank sets its gradients to zero where its own samples were hard, and updates otherwise than the others",
    ("some_ranks_update", "begins_later", "gradients"),
    visible="from the second step on",
)
loop(
    "fifth-loop-resumes-on-rank-0",
    "own loop resumes",
    "loop_fifth_resumes_on_rank_0.py",
    "the first rank goes on from the checkpoint, and the others begin anew",
    ("hang", "collective_mismatch", "cursor_not_restored"),
    visible="after a resume",
)
