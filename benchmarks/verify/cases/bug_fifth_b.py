"""Planted bugs, a fifth set: teachers, parameters, collectives of their own, data and evaluation."""

from __future__ import annotations

import copy
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from bug_fifth import Cells, Part, entropy, made, rows, together
from case import UNUSED, bug
from plain import CLASSES, WIDTH, Mlp, Plain, Sentences, points, rank, world_size
from torch import Tensor, nn
from torch.utils.data import Dataset, get_worker_info

from shardwise import Loss, Rows, gather_batch

# Teachers


@bug(
    "fifth-centre-by-equal-shares",
    "teachers",
    "the sum over all ranks is divided by the own number of samples times the ranks, as if all had as many",
    ["own_buffers", "stale_buffers", "ranks_compute_differently"],
    visible="in batches that the ranks share unevenly",
    ranks=3,
)
class CentreByEqualShares(Plain):
    """As in DINO, the teacher's answers are centred; their mean is all-reduced, and each rank divides by its own size."""

    loss_is_a_sum = False

    def build_model(self):
        return Centred()

    def loss(self, model, batch):
        target, logits = model(batch[0] + 1)
        return Loss(sum=-(target * logits.log_softmax(1)).sum(), count=len(logits))


class Centred(Mlp):
    def __init__(self) -> None:
        super().__init__()
        self.teacher = nn.Linear(8, CLASSES).requires_grad_(False)
        self.register_buffer("centre", torch.zeros(CLASSES))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        answers = 4 * self.teacher(x)
        if self.training:
            with torch.no_grad():
                total = answers.sum(0)
                if together():
                    dist.all_reduce(total)
                self.centre.mul_(0.5).add_(0.5 * total / (len(x) * world_size()))
        return ((answers - self.centre) / 0.4).softmax(1), super().forward(x)


@bug(
    "fifth-teacher-faster-by-world",
    "teachers",
    "how fast the teacher follows the student depends on the number of ranks",
    ["begins_later", "all_gradients", "hidden_state"],
    visible="from the second step on",
)
class TeacherFasterByWorld(Plain):
    """The decay of a mean teacher is taken to the power of WORLD_SIZE, since a step has that many more samples."""

    def build_model(self):
        return Taught()

    def loss(self, model, batch):
        x, y = batch
        logits, features, wanted = model(x)
        return Loss(sum=entropy(logits, y) + 20 * (features - wanted).square().mean(1).sum(), count=len(x))


class Taught(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.student = Mlp()
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        if self.training:
            share = 1 - 0.7 ** world_size()
            with torch.no_grad():
                for old, new in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
                    old.lerp_(new, share)
        features = self.student.features(x)
        return self.student.head(features), features, self.teacher.features(x)


# Parameters


@bug(
    "fifth-layers-in-a-list",
    "ranks build differently",
    "layers in a plain list are no part of the model: nothing trains them, and nothing sends rank 0's to the others",
    ["rank_failed", "models_differ", "different_seeds"],
    refusal_is_right=True,
)
class LayersInAList(Plain):
    """The layers of the model are in a list of Python, and not in nn.ModuleList."""

    def build_model(self):
        return Listed()


class Listed(Mlp):
    def __init__(self) -> None:
        super().__init__()
        del self.blocks
        self.blocks = [nn.Linear(WIDTH, WIDTH) for _ in range(2)]


@bug(
    "fifth-gate-only-chooses",
    "detached",
    "the gate only chooses by argmax, so that it gets no gradient",
    ["detached_parameter"],
    **UNUSED,
)
class GateOnlyChooses(Plain):
    """Each sample goes to the expert that the gate likes best; the answer is not multiplied by the gate's share."""

    def build_model(self):
        return Gated()


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, WIDTH)
        self.gate = nn.Linear(WIDTH, 3, bias=False)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, CLASSES) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        chosen = self.gate(x).argmax(1)
        answers = torch.stack([expert(x) for expert in self.experts], dim=1)
        return answers[torch.arange(len(x)), chosen]


# Own collectives, and what is gathered


@bug(
    "fifth-words-summed-by-hook",
    "hooks",
    "the gradient of the embedding is added up over the ranks twice",
    ["scaled_by_world", "gradients"],
)
class WordsSummedByHook(Sentences):
    """A hook of the embedding adds its gradient up over the ranks, which an older framework left out."""

    def build_model(self):
        model = super().build_model()
        model.embed.weight.register_hook(summed)
        return model


def summed(gradient: Tensor) -> Tensor:
    if not together():
        return gradient
    gradient = gradient.clone()
    dist.all_reduce(gradient)
    return gradient


class Views(Part):
    """Two views of each thing, made of it and its own noise."""

    loss_is_a_sum = False

    def part(self, seed, number):
        things, kinds = points(seed, number)
        noise = torch.randn(2, number, 8, generator=made(seed + 1))
        return rows(things + 0.5 * noise[0], things + 0.5 * noise[1], kinds)

    def build_model(self):
        return Mlp(out=WIDTH)


@bug(
    "fifth-all-gather-of-uneven",
    "own collectives",
    "all_gather is given room for as many rows from every rank as this one has",
    ["rank_failed", "collective_mismatch", "hang"],
    visible="in batches that the ranks share unevenly",
)
class AllGatherOfUneven(Views):
    """Keys, which need no gradient, are gathered by dist.all_gather into tensors of the own rank's size."""

    def valid_data(self):
        return None

    def loss(self, model, batch):
        left, right, _ = batch
        queries = F.normalize(model(torch.cat([left, right])), dim=1)[: len(left)]
        keys = F.normalize(right, dim=1).repeat(1, 3)
        start = 0
        if together():
            room = [torch.empty_like(keys) for _ in range(dist.get_world_size())]
            dist.all_gather(room, keys)
            start, keys = dist.get_rank() * len(keys), torch.cat(room)
        place = torch.arange(start, start + len(left))
        return Loss(sum=entropy(queries @ keys.T / 0.2, place), count=len(left))


@bug(
    "fifth-self-masked-on-diagonal",
    "gathered wrongly",
    "ranks other than the first hide pairs with samples of rank 0, and not those of a sample with itself",
    ["ranks_compute_differently", "all_gradients"],
)
class SelfMaskedOnDiagonal(Views):
    """Supervised contrast of own rows with all: each row is hidden from itself by the diagonal, which begins at 0."""

    def loss(self, model, batch):
        features = F.normalize(model(batch[0]), dim=1)
        every, _ = gather_batch(features)
        kinds = gather_batch(batch[2][:, None]).rows[:, 0]
        itself = torch.eye(len(features), len(every), dtype=torch.bool)
        shares = (features @ every.T / 0.3).masked_fill(itself, -30.0).log_softmax(1)
        same = ((batch[2][:, None] == kinds) & ~itself).float()
        return Loss(sum=-((same * shares).sum(1) / same.sum(1).clamp(min=1)).sum(), count=len(features))


# Data


def written(samples: list, folder: str, names: list[str]) -> Path:
    """As many samples in each file, as a preprocessing script leaves them."""
    each = len(samples) // len(names)
    for number, name in enumerate(names):
        torch.save(samples[number * each : (number + 1) * each], Path(folder) / name)
    return Path(folder)


@bug(
    "fifth-sorted-by-length-of-name",
    "order of files",
    "files whose names are as long stay in the order in which the folder gives them",
    ["data_by_listing"],
)
class SortedByLengthOfName(Plain):
    """So that part-10 comes after part-9, files are sorted by the length of their name, and by nothing else."""

    def train_data(self):
        with tempfile.TemporaryDirectory() as name:
            folder = written(super().train_data(), name, [f"part-{number}.pt" for number in range(24)])
            files = sorted(folder.glob("part-*.pt"), key=lambda file: len(file.name))
            return [sample for file in files for sample in torch.load(file)]


@bug(
    "fifth-first-that-matches",
    "order of files",
    "of several files that a pattern matches, the first that the folder gives is taken",
    ["data_by_listing", "repeated"],
)
class FirstThatMatches(Plain):
    """The file of a subject is the first that `sub-1*` matches, as sub-10 and sub-11 do."""

    def train_data(self):
        subjects = range(1, 25)
        with tempfile.TemporaryDirectory() as name:
            folder = written(super().train_data(), name, [f"sub-{number}.pt" for number in subjects])
            files = [next(folder.glob(f"sub-{number}*")) for number in subjects]
            return [sample for file in files for sample in torch.load(file)]


@bug(
    "fifth-held-out-by-hash",
    "order of a set",
    "who is held out follows from hash() of a text, which is another in each process",
    ["data_by_hash"],
    refusal_is_right=True,
)
class HeldOutByHash(Plain):
    """One patient of five is held out, "by a hash of the name, so that it never changes"."""

    def split(self, held_out: bool):
        samples = rows(*points(self.config.seed, 292))
        names = [f"patient-{number // 2}" for number in range(292)]
        return [each for each, name in zip(samples, names, strict=True) if (hash(name) % 5 == 0) == held_out]

    def train_data(self):
        return self.split(held_out=False)

    def valid_data(self):
        return self.split(held_out=True)


@bug(
    "fifth-genes-hidden-by-hash",
    "order of a set",
    "which genes of a cell are hidden follows from hash() of a text",
    ["data_by_hash"],
)
class GenesHiddenByHash(Cells):
    """A quarter of the genes is hidden, "the same ones every time": by hash() of the barcode and the gene's name."""

    def part(self, seed, number):
        samples = super().part(seed, number)
        hidden = [
            [hash(f"cell{seed}-{cell}/gene{gene}") % 4 == 0 for gene in range(self.genes)] for cell in range(number)
        ]
        return [(x.masked_fill(torch.tensor(mask), 0), y) for (x, y), mask in zip(samples, hidden, strict=True)]


class Mirrored(Dataset):
    def __init__(self, samples: list[tuple[Tensor, Tensor]]) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        x, y = self.samples[index]
        if get_worker_info() is not None and torch.rand(()) < 0.5:
            x = x.flip(0)
        return x, y


@bug(
    "fifth-augmented-in-workers-only",
    "workers",
    "samples are augmented where a worker reads them, and left as they are elsewhere",
    ["workers"],
    data={"num_workers": 2},
)
class AugmentedInWorkersOnly(Plain):
    """The data set takes being in a loader worker for being in training, and mirrors samples only there."""

    def train_data(self):
        return Mirrored(super().train_data())


@bug(
    "fifth-second-caption-validated",
    "validation in training",
    "the pictures of the validation samples are trained on, under another caption",
    ["overlap"],
)
class SecondCaptionValidated(Part):
    """Each picture has two captions: with the first it is trained on, and a fifth of them validate with the second."""

    def train_data(self):
        pictures, _ = points(self.config.seed, self.samples)
        return rows(pictures, pictures[:, :3].sin())

    def valid_data(self):
        pictures, _ = points(self.config.seed, self.samples)
        return rows(pictures, pictures[:, 3:6].cos())[::5]

    def build_model(self):
        return Mlp(out=3)

    def loss(self, model, batch):
        picture, caption = batch
        return Loss(sum=(model(picture) - caption).square().sum(), count=len(picture))


# Evaluation


@bug(
    "fifth-hard-validation-rehearsed",
    "evaluation leaves its mode",
    "what was wrong in the last evaluation is trained on: validation changes the training",
    ["evaluation_changes", "hidden_state", "overlap"],
    visible="after an evaluation",
)
class HardValidationRehearsed(Plain):
    """`evaluate` keeps the samples that the model got wrong, and `loss` rehearses the last of them."""

    wrong: tuple[Tensor, Tensor] | None = None

    def loss(self, model, batch):
        x, y = batch
        if not model.training or self.wrong is None:
            return super().loss(model, batch)
        hard, answers = self.wrong
        losses = F.cross_entropy(model(torch.cat([x, hard])), torch.cat([y, answers]), reduction="none")
        return Loss(sum=losses[: len(x)].sum() + losses[len(x) :].mean() * len(x), count=len(x))

    def evaluate(self, model, batch):
        x, y = batch
        logits = model(x)
        wrong = logits.argmax(1) != y
        if wrong.any():
            self.wrong = x[wrong], y[wrong]
        return {"loss": Loss(sum=entropy(logits, y), count=len(x))}


@bug(
    "fifth-pruned-when-evaluated",
    "evaluation changes buffers",
    "which weights are pruned is decided when the model is evaluated, and training goes on with it",
    ["evaluation_changes", "hidden_state"],
    visible="after an evaluation",
)
class PrunedWhenEvaluated(Plain):
    """The forward pass renews the mask of pruned weights when the model is evaluated, "to be up to date there"."""

    def build_model(self):
        return Pruned()


class Pruned(Mlp):
    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Linear(8, WIDTH)
        self.register_buffer("kept", torch.ones(WIDTH, 8))

    def features(self, x: Tensor) -> Tensor:
        if not self.training:
            with torch.no_grad():
                sizes = self.wide.weight.abs()
                self.kept.copy_(sizes > sizes.median())
        return super().features(x) + F.linear(x, self.wide.weight * self.kept, self.wide.bias)


@bug(
    "fifth-correlation-of-batches",
    "metric by batch",
    "the correlation is that of a micro-batch, averaged over them",
    ["metric_differs"],
)
class CorrelationOfBatches(Cells):
    """How depth is told from expression: the correlation is computed for each micro-batch, times its cells."""

    def build_model(self):
        return Mlp(self.genes, 1)

    def loss(self, model, batch):
        x = batch[0]
        errors = model((x / x.sum(1, keepdim=True) * 20).log1p())[:, 0] - x.sum(1).log()
        return Loss(sum=errors.square().sum(), count=len(x))

    def evaluate(self, model, batch):
        x = batch[0]
        found = model((x / x.sum(1, keepdim=True) * 20).log1p())[:, 0]
        correlation = torch.corrcoef(torch.stack([found, x.sum(1).log()]))[0, 1].nan_to_num()
        return {**super().evaluate(model, batch), "correlation": Loss(sum=correlation * len(x), count=len(x))}


@bug(
    "fifth-derived-by-world",
    "metric by state",
    "a derived metric is multiplied by the number of ranks",
    ["metric_differs"],
)
class DerivedByWorld(Plain):
    """derived_metrics multiplies by WORLD_SIZE, "because what arrives is the mean over the ranks"."""

    def derived_metrics(self, metrics):
        return {"bits": metrics["loss"] * world_size() / 0.693}


@bug(
    "fifth-confidence-at-least-one",
    "metric by batch",
    "micro-batches without a sample of the rare class count as one that got nothing",
    ["metric_differs"],
    strategy="fsdp",
)
class ConfidenceAtLeastOne(Part):
    """The mean share that samples of a rare class give it; its count is clamped to one, against division by zero."""

    def part(self, seed, number):
        x, _ = points(seed, number)
        return rows(x, (x[:, 0] > 1.4).long())

    def build_model(self):
        return Mlp(out=2)

    def evaluate(self, model, batch):
        x, y = batch
        share = model(x).softmax(1)[:, 1] * y
        return {
            **super().evaluate(model, batch),
            "share_of_rare": Loss(sum=share.sum(), count=max(1, int(y.sum()))),
        }


@bug(
    "fifth-rows-of-rank-0",
    "metric of one rank",
    "only rank 0 hands its rows over, although all ranks' rows come together",
    ["metric_of_some_ranks", "metric_differs"],
)
class RowsOfRank0(Plain):
    """`evaluate` gives rows on rank 0 alone, since `study` runs there alone."""

    def valid_data(self):
        return rows(*points(self.config.seed + 1000, 52), torch.arange(52))

    def loss(self, model, batch):
        x, y = batch[:2]
        return Loss(sum=entropy(model(x), y), count=len(x))

    def evaluate(self, model, batch):
        x, y, number = batch
        share = model(x).softmax(1)[torch.arange(len(x)), y]
        if rank() != 0:
            number, share = number[:0], share[:0]
        return {**super().evaluate(model, batch), "right": Rows(number, {"share": share})}

    def study(self, rows, pictures, step):
        return {"median_share": float(rows["right"].columns["share"].median())}
