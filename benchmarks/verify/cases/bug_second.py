"""Planted bugs, a second set: other mistakes than those of the other files, or the same ones in another disguise."""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import random
import shutil
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from case import ACCUMULATE, BF16, UNUSED, bug
from plain import (
    CLASSES,
    PAD,
    VOCABULARY,
    WIDTH,
    Mlp,
    Plain,
    Sentences,
    Words,
    pad,
    points,
    rank,
    sentences,
    world_size,
)
from torch import Tensor, nn
from torch.utils.data import Dataset, default_collate, random_split

from shardwise import Loss, gather_batch


def pairs_of(x: Tensor, y: Tensor) -> list[tuple[Tensor, Tensor]]:
    return list(zip(x, y, strict=True))


def entropy(logits: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(logits, y, reduction="sum")


def scratch() -> Path:
    """A folder that lasts as long as the case is looked at."""
    return Path(os.environ.get("OWN_WEIGHTS") or Path.cwd())


def whole_folder(name: str, files: dict[str, Tensor]) -> Path:
    """A folder of files, which is there as a whole or not at all, whoever else makes it at the same time."""
    folder = scratch() / name
    if not folder.exists():
        making = Path(tempfile.mkdtemp(dir=scratch()))
        for file, content in files.items():
            (making / file).parent.mkdir(parents=True, exist_ok=True)
            torch.save(content.clone(), making / file)
        try:
            making.rename(folder)
        except OSError:
            shutil.rmtree(making)
    return folder


def write_whole(path: Path, content: object) -> None:
    part = path.with_name(f"{path.name}.{os.getpid()}")
    torch.save(content, part)
    part.replace(path)


# Data


@bug(
    "columns-from-sets",
    "order of a set",
    "the order of the features is that of a set of strings, which each process has its own of",
    ["data_by_hash"],
)
class ColumnsFromSets(Plain):
    """The columns of a table are those that two sets of names have in common, in the order of a set."""

    names = ("age", "income", "height", "weight", "pulse", "sugar", "pressure", "sleep")

    def common(self) -> list[int]:
        common = set(self.names) & {*self.names, "diagnosis", "visits"}
        return [self.names.index(name) for name in common]

    def train_data(self):
        x, y = points(self.config.seed, self.samples)
        return pairs_of(x[:, self.common()], y)

    def valid_data(self):
        x, y = points(self.config.seed + 1000, 52)
        return pairs_of(x[:, self.common()], y)


@bug(
    "hashed-in-collate",
    "order of a set",
    "words become numbers by hash(), which is another function in each process",
    ["data_by_hash"],
    visible="where the ranks are interpreters of their own; the samples themselves are strings, and the same",
)
class HashedInCollate(Sentences):
    """`collate` numbers the words by hash(word) modulo the size of the vocabulary, the hashing trick."""

    def train_data(self):
        return [" ".join(f"word{token}" for token in text.tolist()) for text in super().train_data()]

    def collate(self, samples):
        return pad([torch.tensor([1 + hash(word) % (VOCABULARY - 1) for word in text.split()]) for text in samples])


@bug(
    "set-of-samples",
    "order of a set",
    "the order of the samples is that of their addresses in memory",
    ["data_by_hash", "data_change"],
)
class SetOfSamples(Plain):
    """Samples are put through set(), so that none is there twice: tensors are hashed by their address in memory."""

    def train_data(self):
        return list(set(super().train_data()))


@bug(
    "classes-by-folder",
    "order of files",
    "the numbers of the classes follow from the order in which a folder gives its subfolders",
    ["data_by_listing"],
)
class ClassesByFolder(Plain):
    """Classes are numbered in the order of os.scandir; the files within a class are sorted."""

    kinds = ("boletus", "amanita", "russula", "agaricus")

    def train_data(self):
        x, y = points(self.config.seed, self.samples)
        files = {f"{kind}/{i:02}.pt": x[y == k][i::6] for k, kind in enumerate(self.kinds) for i in range(6)}
        folder = whole_folder("mushrooms", files)
        samples = []
        for label, kind in enumerate(entry for entry in os.scandir(folder) if entry.is_dir()):
            for file in sorted(Path(kind.path).iterdir()):
                samples += [(sample, torch.tensor(label)) for sample in torch.load(file)]
        return samples


@bug(
    "labels-beside-files",
    "order of files",
    "the labels are taken in the order in which a folder gives its files, the samples are sorted",
    ["data_by_listing"],
)
class LabelsBesideFiles(Plain):
    """Two folders are zipped, files and labels: the first is sorted, the second is as glob gives it."""

    def train_data(self):
        x, y = points(self.config.seed, self.samples)
        parts = range(0, self.samples, 12)
        features = whole_folder("features", {f"{i:03}.pt": x[i : i + 12] for i in parts})
        labels = whole_folder("labels", {f"{i:03}.pt": y[i : i + 12] for i in parts})
        both = zip(sorted(features.glob("*.pt")), labels.glob("*.pt"), strict=True)
        return [sample for one, two in both for sample in pairs_of(torch.load(one), torch.load(two))]


@bug(
    "length-by-world",
    "world in the data",
    "the data follow from WORLD_SIZE: all ranks have the same, and one process has others",
    ["data_by_rank"],
)
class LengthByWorld(Sentences):
    """Texts are cut to 24 / WORLD_SIZE tokens, so that the tokens of a step stay the same."""

    def train_data(self):
        return [text[: 24 // world_size()] for text in super().train_data()]


@bug(
    "rolled-in-collate",
    "rank in the data",
    "`collate` changes the micro-batch by the rank",
    ["data_by_rank", "ranks_compute_differently"],
    visible="where a process group is there to ask for the rank: not in the data set",
)
class RolledInCollate(Plain):
    """`collate` shifts the features by dist.get_rank(): "other augmentation on every rank"."""

    def collate(self, samples):
        x, y = default_collate(samples)
        if dist.is_available() and dist.is_initialized():
            x = x.roll(dist.get_rank(), dims=1)
        return [x, y]


@bug(
    "index-appended",
    "files that grow",
    "each process that starts finds more samples than the one before",
    ["data_change", "repeated", "data_by_rank"],
    refusal_is_right=True,
)
class IndexAppended(Plain):
    """The index of the samples is a file that is opened for appending, by each process that starts."""

    def train_data(self):
        x, y = points(self.config.seed, self.samples)
        index = scratch() / "index.txt"
        with index.open("a") as file:
            file.write("".join(f"{i}\n" for i in range(self.samples)))
        return [(x[i], y[i]) for i in map(int, index.read_text().split())]


@bug(
    "masks-memoised",
    "memoised",
    "the mask of a micro-batch is that of an earlier one of the same shape",
    ["hidden_state", "data_change", "begins_later"],
    visible="from the second micro-batch of the same shape on, and after a resume",
)
class MasksMemoised(Sentences):
    """`collate` memoises the mask of the padding by the shape of the micro-batch, and not by its lengths."""

    shortest, longest = 3, 9

    def __init__(self, config):
        super().__init__(config)
        self.masks = {}

    def collate(self, samples):
        tokens = pad(samples)
        mask = self.masks.setdefault(tuple(tokens.shape), (tokens != PAD).float())
        return [tokens, mask]

    def count(self, batch):
        return int(batch[1][:, 1:].sum())

    def loss(self, model, batch):
        tokens, mask = batch
        losses = F.cross_entropy(model(tokens[:, :-1]).transpose(1, 2), tokens[:, 1:], reduction="none")
        return Loss(sum=(losses * mask[:, 1:]).sum(), count=self.count(batch))


class Lines(Dataset):
    def __init__(self, x, y):
        self.x, self.y = x, y
        self.lines = itertools.cycle(range(len(x)))

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        line = next(self.lines)
        return self.x[line], self.y[line]


@bug(
    "next-line",
    "stateful data set",
    "__getitem__ gives the next sample of the process, whichever it is asked for",
    ["data_change", "sampler", "repeated"],
)
class NextLine(Plain):
    """A stream is wrapped as a data set: __getitem__ does not look at the index and gives the next line."""

    def train_data(self):
        return Lines(*points(self.config.seed, self.samples))


class Numbered(Dataset):
    def __init__(self, texts, numbers):
        self.texts, self.numbers = texts, numbers

    def __len__(self):
        return len(self.texts)

    def __getitem__(self, index):
        words = [f"word{token}" for token in self.texts[index].tolist()]
        return torch.tensor([self.numbers.setdefault(word, len(self.numbers) + 1) for word in words])


@bug(
    "vocabulary-as-read",
    "stateful data set",
    "the number of a word follows from which samples this process has read before",
    ["data_change", "hidden_state"],
    visible="in the order of a shuffled epoch: read from the first to the last, the samples are the same on every rank",
)
class VocabularyAsRead(Sentences):
    """The vocabulary grows while samples are read: a new word gets the next number."""

    def train_data(self):
        return Numbered(super().train_data(), {})


class MeanTakenOff(Dataset):
    def __init__(self, x, y):
        self.x, self.y = x, y

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        x = self.x[index]
        x -= 0.5
        return x, self.y[index]


@bug(
    "mean-taken-off-again",
    "stateful data set",
    "each reading changes the stored sample",
    ["data_change"],
    visible="from the second reading of a sample on: the second epoch, or a resume",
)
class MeanTakenOffAgain(Plain):
    """__getitem__ takes the mean off by `-=`, from a view of what is stored."""

    def train_data(self):
        return MeanTakenOff(*points(self.config.seed, self.samples))


class MixedWithPrevious(Dataset):
    def __init__(self, x, y):
        self.x, self.y = x, y
        self.previous = torch.zeros_like(x[0])

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        mixed = 0.8 * self.x[index] + 0.2 * self.previous
        self.previous = self.x[index]
        return mixed, self.y[index]


@bug(
    "mixed-with-previous",
    "stateful data set",
    "a sample follows from the one that this process read before it",
    ["data_change"],
)
class PreviousMixedIn(Plain):
    """Mixup in the data set: each sample is mixed with the one that was read before it."""

    def train_data(self):
        return MixedWithPrevious(*points(self.config.seed, self.samples))


class OtherIfBroken(Dataset):
    def __init__(self, x, y):
        self.x, self.y = x, y

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        if index % 8 == 3:
            return self[random.randrange(len(self))]
        return self.x[index], self.y[index]


@bug(
    "broken-drawn-anew",
    "samples twice or never",
    "an eighth of the samples is never given, and others in their place",
    ["repeated", "dropped"],
)
class BrokenDrawnAnew(Plain):
    """__getitem__ gives any other sample where the one that it is asked for cannot be read."""

    def train_data(self):
        return OtherIfBroken(*points(self.config.seed, self.samples))


@bug(
    "split-drawn-twice",
    "validation in training",
    "training and validation are two draws of one generator, so they overlap",
    ["overlap", "data_change"],
)
class SplitDrawnTwice(Plain):
    """The task keeps one seeded generator and splits by it in train_data, and again in valid_data."""

    def __init__(self, config):
        super().__init__(config)
        self.generator = torch.Generator().manual_seed(config.seed)

    def parts(self):
        x, y = points(self.config.seed, 300)
        return [[(x[i], y[i]) for i in part] for part in random_split(range(300), [240, 60], generator=self.generator)]

    def train_data(self):
        return self.parts()[0]

    def valid_data(self):
        return self.parts()[1]


@bug(
    "upsampled-before-split",
    "validation in training",
    "copies of one sample are on both sides of the split",
    ["overlap", "repeated"],
)
class UpsampledBeforeSplit(Plain):
    """One class is copied three times, and then all samples are shuffled and split."""

    def parts(self):
        x, y = points(self.config.seed, 200)
        samples = [sample for sample in pairs_of(x, y) for _ in range(3 if sample[1] == 0 else 1)]
        random.Random(self.config.seed).shuffle(samples)
        return samples[:-50], samples[-50:]

    def train_data(self):
        return self.parts()[0]

    def valid_data(self):
        return self.parts()[1]


@bug(
    "cache-of-training",
    "validation in training",
    "validation is read from the file that training was kept in",
    ["overlap", "data_change"],
)
class CacheOfTraining(Plain):
    """What is loaded is kept in a file whose name does not say which part it is."""

    def load(self, seed, number):
        cache = scratch() / "points.pt"
        if not cache.exists():
            write_whole(cache, points(seed, number))
        return pairs_of(*torch.load(cache))

    def train_data(self):
        return self.load(self.config.seed, self.samples)

    def valid_data(self):
        return self.load(self.config.seed + 1000, 52)


@bug(
    "prepared-on-one",
    "rank in the data",
    "only the process that called prepare_data has the centre; the others take the default",
    ["data_by_rank"],
    visible="on the ranks that do not call prepare_data",
)
class PreparedOnOne(Plain):
    """prepare_data fits the normaliser and keeps it in an attribute: one process per machine calls it."""

    centre = 0.0

    def prepare_data(self):
        self.centre = float((points(self.config.seed, self.samples)[0] + 1).mean())

    def train_data(self):
        x, y = points(self.config.seed, self.samples)
        return pairs_of(x + 1 - self.centre, y)

    def valid_data(self):
        x, y = points(self.config.seed + 1000, 52)
        return pairs_of(x + 1 - self.centre, y)


@bug(
    "filled-up-in-collate",
    "samples twice or never",
    "which sample stands in for one without a label follows from the micro-batch",
    ["sampler", "repeated", "loss_is_no_sum"],
    visible="in micro-batches with a sample that has no label",
)
class FilledUpInCollate(Plain):
    """`collate` puts other samples of the same micro-batch in the place of those without a label."""

    def train_data(self):
        x, y = points(self.config.seed, self.samples)
        y[::9] = -1
        return pairs_of(x, y)

    def collate(self, samples):
        good = [sample for sample in samples if sample[1] >= 0]
        good = good or [(torch.zeros(8), torch.tensor(0))]
        missing = len(samples) - len(good)
        return default_collate((good + good * missing)[: len(samples)])


@bug(
    "even-in-collate",
    "samples twice or never",
    "the last sample of an odd micro-batch is left out",
    ["dropped", "sampler"],
    visible="in ragged steps: full micro-batches are even",
)
class EvenInCollate(Plain):
    """`collate` cuts the micro-batch to an even number of samples, because the loss once needed pairs."""

    def collate(self, samples):
        return default_collate(samples[: len(samples) // 2 * 2] or samples)


# The loss


class Rare(Plain):
    """Positive or negative; few are positive."""

    limit = 1.04

    def train_data(self):
        x, _ = points(self.config.seed, self.samples)
        return pairs_of(x, (x[:, 0] > self.limit).float())

    def valid_data(self):
        x, _ = points(self.config.seed + 1000, 52)
        return pairs_of(x, (x[:, 0] > self.limit).float())

    def build_model(self):
        return Mlp(out=1)


@bug(
    "positives-at-least-one",
    "wrong count",
    "the count is at least one on each rank, so it does not add up over the ranks",
    ["loss_is_no_sum", "wrong_scaling", "uneven_weights"],
    visible="in steps in which a micro-batch has no positive sample",
)
class PositivesAtLeastOne(Rare):
    """A detector's focal loss is divided by the number of positives, which is clamped to one in each micro-batch."""

    def count(self, batch):
        return max(int(batch[1].sum()), 1)

    def loss(self, model, batch):
        x, y = batch
        logits = model(x).squeeze(1)
        losses = F.binary_cross_entropy_with_logits(logits, y, reduction="none")
        return Loss(sum=(losses * (1 - torch.exp(-losses)).square()).sum(), count=self.count(batch))


@bug(
    "positive-weight-of-batch",
    "weights by batch",
    "the weight of the positives follows from how many are in the micro-batch",
    ["loss_is_no_sum"],
    ranks=4,
)
class PositiveWeightOfBatch(Rare):
    """pos_weight is negatives by positives, counted in the micro-batch."""

    def loss(self, model, batch):
        x, y = batch
        weight = (1 - y).sum() / y.sum().clamp(min=1)
        total = F.binary_cross_entropy_with_logits(model(x).squeeze(1), y, pos_weight=weight, reduction="sum")
        return Loss(sum=total, count=len(x))


class Views(nn.Module):
    def __init__(self):
        super().__init__()
        self.left = nn.Sequential(nn.Linear(6, 32), nn.GELU(), nn.Linear(32, 12))
        self.right = nn.Sequential(nn.Linear(4, 32), nn.GELU(), nn.Linear(32, 12))

    def forward(self, left, right):
        return F.normalize(self.left(left), dim=-1), F.normalize(self.right(right), dim=-1)


class Pairs(Plain):
    """Two views of the same thing."""

    loss_is_a_sum = False

    def views(self, number, seed):
        world = torch.Generator().manual_seed(0)
        to_left, to_right = torch.randn(3, 6, generator=world), torch.randn(3, 4, generator=world)
        things = torch.randn(number, 3, generator=torch.Generator().manual_seed(seed))
        return pairs_of((things @ to_left).tanh(), (things @ to_right).sin())

    def train_data(self):
        return self.views(200, self.config.seed)

    def valid_data(self):
        return self.views(29, self.config.seed + 1)

    def build_model(self):
        return Views()


@bug(
    "place-without-offset",
    "gathered wrongly",
    "the right answers of a rank are its own rows among all, and it looks for them among those of rank 0",
    ["ranks_compute_differently", "all_gradients", "gradients"],
    ranks=4,
)
class PlaceWithoutOffset(Pairs):
    """Negatives are gathered from all ranks, but the right answers are still counted from zero."""

    def loss(self, model, batch):
        left, right = model(*batch)
        everyone = gather_batch(right).rows
        return Loss(sum=entropy(5 * left @ everyone.T, torch.arange(len(left))), count=len(left))


@bug(
    "gathered-without-gradient",
    "gathered wrongly",
    "no gradient goes back to the rows of other ranks; the value of the loss is right",
    ["all_gradients", "gradients"],
    visible="in gradients alone; the loss is the same",
)
class GatheredWithoutGradient(Pairs):
    """Gathered rows are detached and only the rank's own are put back, as after a plain all_gather."""

    def loss(self, model, batch):
        left, right = model(*batch)
        rows, own = gather_batch(right)
        rows = torch.cat([rows[: own.start].detach(), right, rows[own.stop :].detach()])
        place = torch.arange(own.start, own.stop)
        return Loss(sum=entropy(5 * left @ rows.T, place), count=len(left))


@bug(
    "times-all-rows",
    "gathered wrongly",
    "the loss of the whole batch is multiplied by all samples on each rank, and so added up once per rank",
    ["scaled_by_world", "wrong_scaling"],
    strategy="fsdp",
)
class TimesAllRows(Pairs):
    """A loss on the covariance of all rows, times the number of all rows and not of the rank's own."""

    def loss(self, model, batch):
        left, right = model(*batch)
        rows = gather_batch(torch.cat([left, right], dim=1)).rows
        ours, theirs = (rows - rows.mean(0)).chunk(2, dim=1)
        across = ours.T @ theirs / len(rows)
        value = (across - torch.eye(len(across))).square().sum()
        return Loss(sum=value * len(rows), count=len(left))


class SoftExperts(nn.Module):
    """All experts answer, weighed by a gate."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(8, WIDTH)
        self.gate = nn.Linear(WIDTH, 3)
        self.blocks = nn.ModuleList([Mixture()])
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x):
        x = torch.tanh(self.first(x))
        shares = self.gate(x).softmax(dim=-1)
        return self.head(x + self.blocks[0](x, shares)), shares


class Mixture(nn.Module):
    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x, shares):
        answers = torch.stack([torch.tanh(expert(x)) for expert in self.experts], dim=1)
        return (answers * shares[..., None]).sum(1)


@bug(
    "gathered-means",
    "gathered wrongly",
    "the means of the ranks are averaged, whatever number of samples they are of",
    ["uneven_weights", "all_gradients", "gradients"],
    visible="in ragged steps: with as many samples on each rank the mean of means is right",
    strategy="fsdp",
)
class GatheredMeans(Plain):
    """The loss that balances experts gathers each rank's mean shares, and averages them."""

    loss_is_a_sum = False

    def build_model(self):
        return SoftExperts()

    def loss(self, model, batch):
        x, y = batch
        logits, shares = model(x)
        chosen = F.one_hot(shares.argmax(1), 3).float()
        used = gather_batch(chosen.mean(0)[None]).rows.mean(0)
        likely = gather_batch(shares.mean(0)[None]).rows.mean(0)
        return Loss(sum=entropy(logits, y) + 3 * (used * likely).sum() * len(x), count=len(x))


@bug(
    "gathered-if-rare",
    "gathered wrongly",
    "whether a rank gathers depends on its own samples: the others wait for it",
    ["collective_mismatch", "hang", "branches_differ"],
    visible="in the first step in which some ranks have the rare class and some do not",
)
class GatheredIfRare(Plain):
    """Features are gathered only where the micro-batch has a sample of the rare class."""

    loss_is_a_sum = False

    def train_data(self):
        x, y = points(self.config.seed, self.samples)
        return pairs_of(x, torch.where(x[:, 0] > 1.2, 3, y % 3))

    def loss(self, model, batch):
        x, y = batch
        logits = model(x)
        total = entropy(logits, y)
        if bool((y == 3).any()):
            total = total + 0.1 * (logits - gather_batch(logits).rows.mean(0)).square().sum()
        return Loss(sum=total, count=len(x))


class Capacity(SoftExperts):
    def forward(self, x):
        x = torch.tanh(self.first(x))
        shares = self.gate(x).softmax(dim=-1)
        chosen = F.one_hot(shares.argmax(1), 3)
        places = (chosen.cumsum(0) * chosen).sum(1)
        within = places <= math.ceil(len(x) / 3)
        return self.head(x + self.blocks[0](x, shares * chosen * within[:, None]))


@bug(
    "expert-capacity",
    "chosen within a batch",
    "which samples an expert takes follows from how many others of the micro-batch want it, and who comes first",
    ["loss_is_no_sum", "order_matters"],
    strategy="fsdp",
)
class ExpertCapacity(Plain):
    """Each expert takes its share of the micro-batch and no more; what comes later goes past it."""

    def build_model(self):
        return Capacity()


@bug(
    "weight-by-gradient-norms",
    "products of batch means",
    "the weight of the second term follows from gradients of the micro-batch",
    ["loss_is_no_sum", "all_gradients", "gradients"],
    visible="in training: without gradients the weight is one",
)
class WeightByGradientNorms(Plain):
    """As in VQGAN, the second term is weighed by the norms that the gradients of both have in the last layer."""

    def loss(self, model, batch):
        x, y = batch
        logits = model(x)
        first, second = entropy(logits, y), (logits - x[:, :CLASSES]).abs().sum()
        weight = torch.ones(())
        if torch.is_grad_enabled():
            last = next(each for name, each in model.named_parameters() if name.endswith("head.weight"))
            one = torch.autograd.grad(first, last, retain_graph=True)[0]
            two = torch.autograd.grad(second, last, retain_graph=True)[0]
            weight = (one.norm() / (two.norm() + 1e-4)).clamp(max=10).detach()
        return Loss(sum=first + weight * second, count=len(x))


class Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return -gradient / len(gradient)


class TwoHeads(Mlp):
    def __init__(self):
        super().__init__()
        self.domain = nn.Linear(WIDTH, 2)

    def forward(self, x):
        features = self.features(x)
        return self.head(features), self.domain(Reversed.apply(features))


@bug(
    "reversal-by-batch-size",
    "custom backward",
    "the reversed gradient is divided by the size of the micro-batch in backward",
    ["gradients", "loss_is_no_sum", "all_gradients"],
    visible="in the gradients below the reversal alone; the loss is the same",
)
class ReversalByBatchSize(Plain):
    """A gradient reversal layer divides by the number of samples, as if the loss above it were a mean."""

    def build_model(self):
        return TwoHeads()

    def loss(self, model, batch):
        x, y = batch
        logits, domain = model(x)
        return Loss(sum=entropy(logits, y) + entropy(domain, (x[:, 7] > 0).long()), count=len(x))


class Clipped(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return gradient * (0.003 / (gradient.norm() + 1e-12)).clamp(max=1)


class ClippedWords(Words):
    def forward(self, tokens):
        return self.head(Clipped.apply(self.rnn(self.embed(tokens))[0]))


@bug(
    "clipped-between-layers",
    "custom backward",
    "the gradient of the features is clipped by the norm over the micro-batch",
    ["clipped_before_reduced", "loss_is_no_sum", "gradients"],
    visible="in the gradients of the embedding and the GRU; the loss is the same",
    **ACCUMULATE,
)
class ClippedBetweenLayers(Sentences):
    """A custom function clips the gradient that goes back into the GRU, by the norm of the whole micro-batch's."""

    def build_model(self):
        return ClippedWords()


@bug(
    "gradients-made-sparse",
    "hooks",
    "which entries of a gradient are kept follows from the rank's own gradient",
    ["clipped_before_reduced", "all_gradients", "gradients"],
)
class GradientsMadeSparse(Plain):
    """Hooks of the parameters set the smaller half of each gradient to zero as it arrives."""

    def build_model(self):
        model = Mlp()
        for parameter in model.parameters():
            parameter.register_hook(lambda gradient: gradient * (gradient.abs() >= gradient.abs().median()))
        return model


def thaw(after: int):
    passes = 0

    def hook(gradient):
        nonlocal passes
        passes += 1
        return gradient if passes > after else torch.zeros_like(gradient)

    return hook


@bug(
    "thawed-by-backward-passes",
    "counters",
    "backward passes are counted in a closure: two per step with accumulation, and from zero after a resume",
    ["hidden_state", "begins_later", "resume"],
    visible="in the steps in which the ranks have thawed it and one process has not; after a resume",
    **ACCUMULATE,
)
class ThawedByBackwardPasses(Plain):
    """A hook of the first layer's weight holds it still for the first four backward passes."""

    def build_model(self):
        model = Mlp()
        model.first.weight.register_hook(thaw(4))
        return model


@bug(
    "broadcast-by-mistake",
    "samples in one another",
    "each answer is compared with the targets of all samples of the micro-batch",
    ["loss_is_no_sum"],
)
class BroadcastByMistake(Plain):
    """Answers of shape [n, 1] minus targets of shape [n]: a square of differences."""

    def train_data(self):
        x, _ = points(self.config.seed, self.samples)
        return pairs_of(x, (x[:, 0] * x[:, 1]).tanh())

    def valid_data(self):
        x, _ = points(self.config.seed + 1000, 52)
        return pairs_of(x, (x[:, 0] * x[:, 1]).tanh())

    def build_model(self):
        return Mlp(out=1)

    def loss(self, model, batch):
        x, y = batch
        return Loss(sum=(model(x) - y).square().mean(dim=1).sum(), count=len(x))


@bug(
    "first-half-labelled",
    "chosen within a batch",
    "what a sample is used for follows from its place in the micro-batch",
    ["loss_is_no_sum", "order_matters"],
)
class FirstHalfLabelled(Plain):
    """Half supervised: the first half of the micro-batch is trained by its labels, the second to be certain."""

    def loss(self, model, batch):
        x, y = batch
        half = (len(x) + 1) // 2
        logits = model(x)
        uncertain = -(logits[half:].softmax(-1) * logits[half:].log_softmax(-1)).sum()
        return Loss(sum=entropy(logits[:half], y[:half]) + uncertain, count=len(x))


class Prototypes(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = Mlp(out=12)
        self.prototypes = nn.Linear(12, 6, bias=False)

    def forward(self, x):
        return self.prototypes(F.normalize(self.body(x), dim=-1))


@bug(
    "balanced-assignments",
    "pairs within a batch",
    "which cluster a sample belongs to follows from the others of the micro-batch",
    ["loss_is_no_sum"],
    **BF16,
)
class BalancedAssignments(Plain):
    """As in SwAV, clusters are assigned by Sinkhorn's algorithm, evenly over the micro-batch."""

    def build_model(self):
        return Prototypes()

    def loss(self, model, batch):
        scores = model(batch[0]).float()
        with torch.no_grad():
            shares = torch.exp(scores / 0.1 - (scores / 0.1).max())
            for _ in range(3):
                shares = shares / (shares.sum(0, keepdim=True) + 1e-8) / shares.shape[1]
                shares = shares / (shares.sum(1, keepdim=True) + 1e-8) / shares.shape[0]
            shares = shares * shares.shape[0]
        return Loss(sum=-(shares * (scores / 0.1).log_softmax(-1)).sum(), count=len(scores))


class Tastes(nn.Module):
    def __init__(self):
        super().__init__()
        self.users, self.items = nn.Embedding(12, 6), nn.Embedding(20, 6)

    def forward(self, user, item):
        users, items = self.users(user), self.items(item)
        return (users * items).sum(-1), users


@bug(
    "each-user-once",
    "chosen within a batch",
    "a user who is in the micro-batches of two ranks is counted twice in the penalty",
    ["loss_is_no_sum"],
)
class EachUserOnce(Plain):
    """The penalty of a user's vector is added once for each user of the micro-batch, by unique()."""

    def ratings(self, seed, number):
        generator = torch.Generator().manual_seed(seed)
        user, item = (torch.randint(0, n, (number,), generator=generator) for n in (12, 20))
        return list(zip(user, item, (user * item % 5).float() / 4, strict=True))

    def train_data(self):
        return self.ratings(self.config.seed, 240)

    def valid_data(self):
        return None

    def build_model(self):
        return Tastes()

    def loss(self, model, batch):
        user, item, rating = batch
        answers, vectors = model(user, item)
        _, place = user.unique(return_inverse=True)
        firsts = torch.stack([(place == each).nonzero()[0, 0] for each in place.unique()])
        return Loss(sum=(answers - rating).square().sum() + 0.3 * vectors[firsts].square().sum(), count=len(user))


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.mix, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def norm(self, x):
        return F.rms_norm(x, (WIDTH,))

    def bias(self, length: int):
        return torch.full((length, length), -math.inf).triu(1)

    def forward(self, x):
        q, k, v = (each.unflatten(-1, (2, -1)).transpose(1, 2) for each in self.mix(self.norm(x)).chunk(3, dim=-1))
        seen = F.scaled_dot_product_attention(q, k, v, attn_mask=self.bias(x.shape[1]).to(q.dtype))
        x = x + self.out(seen.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Decoder(nn.Module):
    layer = Layer

    def __init__(self):
        super().__init__()
        self.embed, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(24, WIDTH)
        self.layers = nn.ModuleList(self.layer() for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens):
        x = self.embed(tokens) + self.places(torch.arange(tokens.shape[1], device=tokens.device))
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class NormOverEverything(Layer):
    def norm(self, x):
        return x * torch.rsqrt(x.square().mean() + 1e-6)


class NormOverEverythingDecoder(Decoder):
    layer = NormOverEverything


@bug(
    "norm-over-everything",
    "samples in one another",
    "the norm that each token is divided by is that of all samples of the micro-batch",
    ["loss_is_no_sum"],
    ranks=4,
    **BF16,
)
class NormOverAll(Sentences):
    """RMS norm by hand, whose mean forgot its dim=-1, in a small transformer."""

    def build_model(self):
        return NormOverEverythingDecoder()


class Pooled(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(1, 8, 3, padding=1)
        self.blocks = nn.ModuleList(nn.Conv2d(8, 8, 3, padding=1) for _ in range(2))
        self.head = nn.Linear(8, 2)

    def forward(self, x):
        x = F.relu(self.first(x))
        for block in self.blocks:
            x = x + F.relu(block(x))
        return self.head(x.mean(dim=(2, 3)))


@bug(
    "padding-pooled",
    "samples in one another",
    "the mean over an image has the padding in it, and so follows from the largest image of the micro-batch",
    ["loss_is_no_sum"],
    strategy="fsdp",
)
class PaddingPooled(Plain):
    """Images are padded to the largest of the micro-batch, and the last layer takes the mean over all of it."""

    def images(self, seed, number):
        generator = torch.Generator().manual_seed(seed)
        sizes = torch.randint(4, 19, (number,), generator=generator).tolist()
        images = [torch.randn(1, size, size, generator=generator) for size in sizes]
        labels = torch.randint(0, 2, (number,), generator=generator)
        return [(image + label, label) for image, label in zip(images, labels, strict=True)]

    def train_data(self):
        return self.images(self.config.seed, 200)

    def valid_data(self):
        return self.images(self.config.seed + 1000, 40)

    def collate(self, samples):
        largest = max(image.shape[-1] for image, _ in samples)
        padded = [F.pad(image, (0, largest - image.shape[-1], 0, largest - image.shape[-2])) for image, _ in samples]
        return [torch.stack(padded), torch.stack([label for _, label in samples])]

    def build_model(self):
        return Pooled()


@bug(
    "batch-with-nan-skipped",
    "rare",
    "the good samples that share a micro-batch with a broken one are left out",
    ["loss_is_no_sum", "begins_later", "uneven_weights"],
    visible="in the few steps that have a broken sample",
)
class BatchWithNanSkipped(Plain):
    """Where a micro-batch has a value that is no number, its whole loss is zero."""

    def train_data(self):
        x, y = points(self.config.seed, self.samples)
        x[::29, 2] = math.inf
        return pairs_of(x, y)

    def loss(self, model, batch):
        x, y = batch
        if not torch.isfinite(x).all():
            return Loss(sum=0 * model(torch.zeros_like(x)).sum(), count=len(x))
        return Loss(sum=entropy(model(x), y), count=len(x))


@bug(
    "token-budget",
    "chosen within a batch",
    "how much of a text is read follows from how many texts are in the micro-batch",
    ["loss_is_no_sum"],
    **BF16,
)
class TokenBudget(Sentences):
    """A micro-batch has a budget of 112 tokens: texts are cut to 112 by the number of them."""

    def build_model(self):
        return Decoder()

    def cut(self, batch):
        return batch[:, : max(4, 112 // len(batch))]

    def count(self, batch):
        return super().count(self.cut(batch))

    def loss(self, model, batch):
        return super().loss(model, self.cut(batch))


class Denoiser(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = Mlp(features=9, out=8)

    def forward(self, x, strength):
        return self.body(torch.cat([x, strength], dim=1))


@bug(
    "strengths-drawn-in-loss",
    "noise",
    "noise and its strength are drawn in the loss, by each rank",
    ["random_forward"],
    strategy="fsdp",
)
class StrengthsDrawnInLoss(Plain):
    """A diffusion model whose steps and noise are drawn in `loss`, as on a single GPU."""

    def build_model(self):
        return Denoiser()

    def loss(self, model, batch):
        x = batch[0]
        strength, noise = torch.rand(len(x), 1), torch.randn_like(x)
        mixed = (1 - strength).sqrt() * x + strength.sqrt() * noise
        return Loss(sum=(model(mixed, strength) - noise).square().sum(), count=len(x))


@bug(
    "ramp-by-seconds",
    "clock",
    "the weight of a term follows from the clock of the rank",
    ["random_forward", "hidden_state", "not_deterministic"],
)
class RampBySeconds(Plain):
    """The penalty is ramped up over the first twenty seconds since the task was made."""

    def __init__(self, config):
        super().__init__(config)
        self.began = time.monotonic()

    def loss(self, model, batch):
        x, y = batch
        logits = model(x)
        ramp = min(1.0, (time.monotonic() - self.began) / 20)
        return Loss(sum=entropy(logits, y) + ramp * logits.square().sum(), count=len(x))


# State that no checkpoint has


ACTIVITY: list[Tensor] = []


@bug(
    "activity-never-cleared",
    "globals",
    "the loss follows from all micro-batches that this process has seen",
    ["hidden_state"],
    visible="from the second pass on",
)
class ActivityNeverCleared(Plain):
    """A hook collects activities in a list of the module, by whose mean the loss is weighed; nobody clears it."""

    def build_model(self):
        model = Mlp()

        def watch(module, inputs, output):
            ACTIVITY.append(output.detach().abs().mean())

        model.blocks[-1].register_forward_hook(watch)
        return model

    def loss(self, model, batch):
        x, y = batch
        total = entropy(model(x), y)
        return Loss(sum=total * (1 + torch.stack(ACTIVITY).mean()) if model.training else total, count=len(x))


def of_late(value: float, last: list[float] = []) -> float:  # noqa: B006
    last.append(value)
    return sum(last[-4:]) / len(last[-4:])


@bug(
    "default-argument-remembers",
    "globals",
    "the loss is divided by the last ones of this process, which a default argument remembers",
    ["hidden_state"],
)
class DefaultArgumentRemembers(Sentences):
    """The loss is divided by the mean of the last four, kept in the mutable default of an argument."""

    def loss(self, model, batch):
        found = super().loss(model, batch)
        if not model.training:
            return found
        return Loss(sum=found.sum / of_late(float(found.sum.detach()) / max(found.count, 1)), count=found.count)


class Annealing:
    passes = 0

    @classmethod
    def weight(cls) -> float:
        cls.passes += 1
        return min(1.0, cls.passes / 12)


class Coder(nn.Module):
    def __init__(self):
        super().__init__()
        self.encode, self.decode = Mlp(out=6), Mlp(features=3, out=8)

    def forward(self, x):
        mean, spread = self.encode(x).chunk(2, dim=1)
        return self.decode(mean), mean, spread


@bug(
    "annealed-by-class-attribute",
    "counters",
    "passes are counted in an attribute of a class: two per step with accumulation, and from zero after a resume",
    ["hidden_state"],
    **ACCUMULATE,
)
class AnnealedByClassAttribute(Plain):
    """The KL term of an autoencoder is annealed by a counter that is a class attribute of a helper."""

    def build_model(self):
        return Coder()

    def loss(self, model, batch):
        x = batch[0]
        answer, mean, spread = model(x)
        divergence = 0.5 * (mean.square() + spread.exp() - 1 - spread).sum()
        weight = Annealing.weight() if model.training else 1.0
        return Loss(sum=(answer - x).square().sum() + weight * divergence, count=len(x))


@bug(
    "smoothing-by-iterator",
    "counters",
    "an iterator counts the passes of this process: no checkpoint has it",
    ["hidden_state"],
    visible="after a resume; between runs that differ in the passes before them",
)
class SmoothingByIterator(Sentences):
    """Label smoothing falls with next(itertools.count()), one number per training pass."""

    def __init__(self, config):
        super().__init__(config)
        self.passes = itertools.count()

    def loss(self, model, batch):
        smoothing = 0.5 / (1 + next(self.passes)) if model.training else 0.0
        logits = model(batch[:, :-1]).flatten(0, 1)
        total = F.cross_entropy(
            logits, batch[:, 1:].flatten(), ignore_index=PAD, reduction="sum", label_smoothing=smoothing
        )
        return Loss(sum=total, count=self.count(batch))


class Remembering(Words):
    memory: Tensor | None = None

    def forward(self, tokens):
        first = torch.zeros(1, len(tokens), WIDTH)
        if self.training and self.memory is not None:
            size = min(len(tokens), self.memory.shape[1])
            first[:, :size] = self.memory[:, :size]
        out, last = self.rnn(self.embed(tokens), first)
        if self.training:
            self.memory = last.detach()
        return self.head(out)


@bug(
    "memory-carried-over",
    "plain attributes",
    "the recurrent state of the micro-batch before enters this one",
    ["hidden_state"],
    visible="from the second micro-batch on, and after a resume",
)
class MemoryCarriedOver(Sentences):
    """The GRU begins each micro-batch with the state that the one before it ended with, though samples are shuffled."""

    def build_model(self):
        return Remembering()


class Averaged(Mlp):
    def __init__(self):
        super().__init__()
        self.register_buffer("teacher", self.head.weight.detach().clone())

    def forward(self, x):
        features = self.features(x)
        if self.training:
            with torch.no_grad():
                self.teacher.lerp_(self.head.weight, 0.3)
        return self.head(features), F.linear(features.detach(), self.teacher.clone())


@bug(
    "teacher-by-micro-batch",
    "counters",
    "the average of the weights moves once per micro-batch: twice per step with accumulation",
    ["own_buffers", "begins_later", "all_gradients"],
    visible="from the second step on: in the first the average is equal to the weights",
    **ACCUMULATE,
)
class TeacherByMicroBatch(Plain):
    """A mean teacher, kept in a buffer, is updated in every training pass and distilled from."""

    def build_model(self):
        return Averaged()

    def loss(self, model, batch):
        x, y = batch
        logits, teacher = model(x)
        return Loss(sum=entropy(logits, y) + 3 * (logits - teacher).square().sum(), count=len(x))


class BiasedLayer(Layer):
    def __init__(self):
        super().__init__()
        self.near = nn.Parameter(torch.zeros(24))
        self.known: dict[int, Tensor] = {}

    def bias(self, length):
        if length not in self.known:
            places = torch.arange(length)
            bias = self.near[(places[:, None] - places).clamp(min=0)] + super().bias(length)
            self.known[length] = bias.detach()
            return bias
        return self.known[length]


class BiasedDecoder(Decoder):
    layer = BiasedLayer


@bug(
    "learned-bias-cached",
    "memoised",
    "what is learned is read once per length and then from a cache: other ranks, other lengths",
    ["hidden_state", "detached_parameter"],
    **UNUSED,
)
class LearnedBiasCached(Sentences):
    """A learned bias of attention is cached by the length, detached "because backward complained"."""

    longest = 12

    def build_model(self):
        return BiasedDecoder()


class Prior(Words):
    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.ones(VOCABULARY))

    def forward(self, tokens):
        logits = super().forward(tokens) + (self.seen / self.seen.sum()).log()
        if self.training:
            self.seen += torch.bincount(tokens.flatten(), minlength=VOCABULARY).to(self.seen)
        return logits


@bug(
    "prior-of-own-words",
    "buffers of own samples",
    "each rank adds the logarithm of how often it has seen a word itself",
    ["own_buffers", "stale_buffers"],
    visible="from the second step on",
    strategy="fsdp",
)
class PriorOfOwnWords(Sentences):
    """Answers are adjusted by a buffer that counts the words of the rank's own micro-batches."""

    def build_model(self):
        return Prior()


class Steered(SoftExperts):
    def __init__(self):
        super().__init__()
        self.register_buffer("steer", torch.zeros(3))

    def forward(self, x):
        x = torch.tanh(self.first(x))
        shares = self.gate(x).sigmoid()
        chosen = F.one_hot((shares + self.steer).argmax(1), 3).to(shares)
        if self.training:
            self.steer += 0.2 * torch.sign(chosen.mean() - chosen.mean(0)).detach()
        return self.head(x + self.blocks[0](x, shares * chosen))


@bug(
    "experts-steered-by-own-load",
    "buffers of own samples",
    "what steers the choice of experts follows from the load of the rank's own micro-batches",
    ["own_buffers", "stale_buffers", "begins_later"],
    visible="from the second step on",
)
class ExpertsSteered(Plain):
    """Balance without a loss: a buffer that is added to the gate rises for experts that this rank used too little."""

    def build_model(self):
        return Steered()


@bug(
    "scale-in-a-file",
    "files that grow",
    "the loss follows from a file that all runs and ranks write to",
    ["hidden_state", "random_forward", "not_deterministic"],
)
class ScaleInAFile(Plain):
    """The running mean that the loss is divided by is kept in a file, read and written by every rank in every step."""

    def loss(self, model, batch):
        x, y = batch
        total = entropy(model(x), y)
        if not model.training:
            return Loss(sum=total, count=len(x))
        kept = scratch() / "running.pt"
        mean = torch.load(kept) if kept.exists() else 1.0
        mean = 0.7 * mean + 0.3 * float(total.detach()) / len(x)
        write_whole(kept, mean)
        return Loss(sum=total / mean, count=len(x))


# What is wrapped


class Tempered(Mlp):
    temperature = 1.0

    def forward(self, x):
        return super().forward(x) / self.temperature


@bug(
    "set-on-the-wrapper",
    "around the wrapper",
    "the attribute is set on the wrapper of ddp, where the model does not look for it",
    ["all_gradients", "gradients"],
)
class SetOnTheWrapper(Plain):
    """`loss` sets model.temperature: on one process that of the model, under ddp that of its wrapper."""

    def build_model(self):
        return Tempered()

    def loss(self, model, batch):
        model.temperature = 0.4
        return super().loss(model, batch)


class WithPenalty(SoftExperts):
    def forward(self, x):
        logits, shares = super().forward(x)
        self.penalty = shares.square().sum()
        return logits


@bug(
    "penalty-left-on-the-model",
    "around the wrapper",
    "the wrapper of ddp has no such attribute, and the term is silently left out",
    ["all_gradients", "gradients"],
)
class PenaltyLeftOnTheModel(Plain):
    """The forward pass leaves the gate's penalty on the model, and `loss` takes it by getattr(model, "penalty", 0)."""

    def build_model(self):
        return WithPenalty()

    def loss(self, model, batch):
        found = super().loss(model, batch)
        return Loss(sum=found.sum + 0.5 * getattr(model, "penalty", 0.0), count=found.count)


@bug(
    "names-with-a-prefix",
    "around the wrapper",
    "the names of a wrapped model begin with `module.`, so no parameter is found",
    ["gradients", "all_gradients"],
)
class NamesWithAPrefix(Plain):
    """Weight decay for the head alone: of parameters whose name begins with "head"."""

    def loss(self, model, batch):
        found = super().loss(model, batch)
        heads = [each for name, each in model.named_parameters() if name.startswith("head")]
        penalty = sum((each.square().sum() for each in heads), torch.zeros(()))
        return Loss(sum=found.sum + 0.2 * found.count * penalty, count=found.count)


@bug(
    "wrapper-unwrapped",
    "around the wrapper",
    "the forward pass goes past the wrapper, which then adds up no gradients",
    ["all_unsynchronised", "unsynchronised_parameter"],
)
class WrapperUnwrapped(Plain):
    """`loss` calls model.module, as in the example from which it was copied."""

    def loss(self, model, batch):
        return super().loss(getattr(model, "module", model), batch)


class Scaled(Mlp):
    def __init__(self):
        super().__init__()
        self.log_scale = nn.Parameter(torch.ones(()))

    def forward(self, x):
        return super().forward(x) * self.log_scale.exp().item()


@bug(
    "scale-by-item",
    "detached",
    "the scale is a parameter, but goes into the loss as a number",
    ["detached_parameter"],
)
class ScaleByItem(Plain):
    """A learned scale is read by .item(), so it gets no gradient."""

    def build_model(self):
        return Scaled()


@bug(
    "seeded-by-world",
    "ranks build differently",
    "the first weights follow from WORLD_SIZE",
    ["different_seeds", "all_gradients"],
)
class SeededByWorld(Plain):
    """build_model seeds by seed + WORLD_SIZE: all ranks agree, and one process begins elsewhere."""

    def build_model(self):
        torch.manual_seed(self.config.seed + world_size())
        return Mlp()


class MeanOfAllRanks(Mlp):
    def features(self, x):
        x = super().features(x)
        mean = x.mean(0)
        if self.training and dist.is_available() and dist.is_initialized():
            everyone = mean.detach().clone()
            dist.all_reduce(everyone)
            mean = everyone / dist.get_world_size()
        return x - mean if self.training else x


@bug(
    "mean-reduced-by-hand",
    "batch statistics",
    "no gradient goes back through the mean on several ranks, and ragged ranks count alike in it",
    ["loss_is_no_sum", "all_gradients", "gradients"],
)
class MeanReducedByHand(Plain):
    """Features are centred by a mean that is all-reduced by hand, which autograd does not see."""

    loss_is_a_sum = False

    def build_model(self):
        return MeanOfAllRanks()


@bug(
    "logged-on-rank-0",
    "collectives",
    "rank 0 calls a collective that the others do not",
    ["collective_mismatch", "hang"],
)
class LoggedOnRank0(Plain):
    """On rank 0 alone, every third step, the loss is all-reduced to be logged."""

    passes = 0

    def loss(self, model, batch):
        found = super().loss(model, batch)
        if model.training:
            self.passes += 1
        if model.training and self.passes % 3 == 0 and rank() == 0 and dist.is_initialized():
            dist.all_reduce(found.sum.detach().clone())
        return found


# Evaluation


@bug(
    "numpy-seeded-again",
    "evaluation changes random state",
    "evaluation seeds random and numpy.random anew",
    ["evaluation_changes"],
)
class NumpySeededAgain(Plain):
    """`evaluate` seeds random and numpy, so that its order of the samples is the same each time."""

    def evaluate(self, model, batch):
        random.seed(0)
        np.random.seed(0)
        order = torch.from_numpy(np.random.permutation(len(batch[0])))
        return {"loss": self.loss(model, [each[order] for each in batch])}


@bug(
    "double-from-then-on",
    "evaluation leaves its mode",
    "evaluation changes the default type, in which the weights of the loss are then made",
    ["evaluation_changes", "evaluation_random"],
    visible="bit for bit, in the steps that follow an evaluation",
)
class DoubleFromThenOn(Plain):
    """`evaluate` sets the default type to float64, for an accurate metric, and does not set it back."""

    def loss(self, model, batch):
        x, y = batch
        weights = torch.linspace(0.5, 1.5, CLASSES)
        return Loss(sum=(F.cross_entropy(model(x), y, reduction="none") * weights[y]).sum(), count=len(x))

    def evaluate(self, model, batch):
        torch.set_default_dtype(torch.float64)
        return {"loss": self.loss(model, batch)}


@bug(
    "validation-scaled-in-place",
    "evaluation changes its data",
    "each evaluation scales the stored validation samples",
    ["evaluation_random", "evaluation_changes", "data_change"],
    visible="in the second evaluation of the same weights",
    data={"num_workers": 0},
)
class ValidationScaledInPlace(Plain):
    """`evaluate` scales the samples in place, and `collate` keeps those that are stored."""

    def collate(self, samples):
        return [[x for x, _ in samples], torch.stack([y for _, y in samples])]

    def count(self, batch):
        return len(batch[0])

    def loss(self, model, batch):
        return super().loss(model, [torch.stack(list(batch[0])), batch[1]])

    def evaluate(self, model, batch):
        for x in batch[0]:
            x.mul_(0.5)
        return {"loss": self.loss(model, batch)}


@bug(
    "padding-counted-as-hits",
    "metric by batch",
    "the metric counts the padding, which follows from who shares a micro-batch",
    ["metric_differs"],
)
class PaddingCountedAsHits(Sentences):
    """Accuracy is taken over all places of the padded micro-batch."""

    def valid_data(self):
        return sentences(self.config.seed + 1000, 45, self.shortest, self.longest)

    def evaluate(self, model, batch):
        hits = model(batch[:, :-1]).argmax(-1) == batch[:, 1:]
        return {"loss": self.loss(model, batch), "accuracy": Loss(sum=hits.float().sum(), count=hits.numel())}


@bug(
    "perplexity-of-batches",
    "metric by batch",
    "the exponential is taken of the mean of each micro-batch, and then averaged",
    ["metric_differs"],
    strategy="fsdp",
)
class PerplexityOfBatches(Sentences):
    """Perplexity is computed for each micro-batch and averaged over its tokens."""

    def valid_data(self):
        return sentences(self.config.seed + 1000, 45, self.shortest, self.longest)

    def evaluate(self, model, batch):
        loss = self.loss(model, batch)
        perplexity = torch.exp(loss.sum / max(loss.count, 1))
        return {"loss": loss, "perplexity": Loss(sum=perplexity * loss.count, count=loss.count)}


@bug(
    "f1-of-batches",
    "metric by batch",
    "F1 of a micro-batch is no sum over samples",
    ["metric_differs"],
    ranks=4,
)
class F1OfBatches(Rare):
    """F1 is computed for each micro-batch and averaged, weighed by its samples."""

    limit = -0.3

    def loss(self, model, batch):
        x, y = batch
        return Loss(
            sum=F.binary_cross_entropy_with_logits(model(x).squeeze(1), y, reduction="sum"),
            count=len(x),
        )

    def evaluate(self, model, batch):
        x, y = batch
        found = (model(x).squeeze(1) > 0).float()
        f1 = 2 * (found * y).sum() / (found.sum() + y.sum()).clamp(min=1)
        return {"loss": self.loss(model, batch), "f1": Loss(sum=f1 * len(x), count=len(x))}


@bug(
    "full-batches-only",
    "metric by batch",
    "which samples count in the metric follows from how they are shared out",
    ["metric_differs", "metric_of_some_ranks"],
    visible="where the last micro-batches are not full",
)
class FullBatchesOnly(Plain):
    """Accuracy leaves out micro-batches that are not of the full size."""

    def valid_data(self):
        return pairs_of(*points(self.config.seed + 1000, 60))

    def evaluate(self, model, batch):
        x, y = batch
        counted = len(x) if len(x) == self.config.training.batch_size else 0
        hits = (model(x).argmax(-1) == y)[:counted].float().sum()
        return {"loss": self.loss(model, batch), "accuracy": Loss(sum=hits, count=counted)}


@bug(
    "tokens-drawn-in-evaluation",
    "metric by state",
    "the metric is of tokens that are drawn, another time others",
    ["evaluation_random", "evaluation_changes"],
)
class TokensDrawnInEvaluation(Sentences):
    """`evaluate` draws the next tokens by torch.multinomial and counts how many are right."""

    def valid_data(self):
        return sentences(self.config.seed + 1000, 45, self.shortest, self.longest)

    def evaluate(self, model, batch):
        target = batch[:, 1:]
        drawn = torch.multinomial(model(batch[:, :-1]).flatten(0, 1).softmax(-1), 1).view_as(target)
        hits = ((drawn == target) & (target != PAD)).float().sum()
        return {"loss": self.loss(model, batch), "drawn": Loss(sum=hits, count=self.count(batch))}


@bug(
    "weight-by-plateau",
    "evaluation leaves its mode",
    "evaluation changes the weight of a term of the loss, by the rank's own validation samples",
    ["evaluation_changes", "hidden_state"],
    visible="in the steps after an evaluation",
)
class WeightByPlateau(Plain):
    """Each evaluated micro-batch that is no better than the best before it halves the weight of the penalty."""

    best, weight = math.inf, 1.0

    def loss(self, model, batch):
        x, y = batch
        logits = model(x)
        penalty = self.weight * logits.square().sum() if model.training else 0.0
        return Loss(sum=entropy(logits, y) + penalty, count=len(x))

    def evaluate(self, model, batch):
        found = self.loss(model, batch)
        mean = float(found.sum) / max(found.count, 1)
        if mean >= self.best:
            self.weight /= 2
        self.best = min(self.best, mean)
        return {"loss": found}


class WarmedUp(Mlp):
    def __init__(self):
        super().__init__()
        self.register_buffer("passes", torch.zeros(()))

    def forward(self, x):
        self.passes += 1
        logits = super().forward(x)
        return logits * (self.passes / 30).clamp(max=1) if self.training else logits


@bug(
    "evaluation-warms-up",
    "evaluation changes buffers",
    "the counter of the warm-up also counts the passes of evaluation",
    ["evaluation_changes"],
    visible="in the steps after an evaluation",
)
class EvaluationWarmsUp(Plain):
    """A buffer counts all forward passes, those of evaluation too, and the answers are warmed up by it in training."""

    def build_model(self):
        return WarmedUp()


@bug(
    "hook-left-behind",
    "evaluation leaves its mode",
    "a hook of evaluation stays, and rounds the features in training",
    ["evaluation_changes"],
    visible="in the steps after an evaluation",
)
class HookLeftBehind(Plain):
    """`evaluate` rounds the features by a forward hook, to judge a quantised model, and leaves the hook in place."""

    def evaluate(self, model, batch):
        first = next(each for each in model.modules() if isinstance(each, nn.Linear))
        first.register_forward_hook(lambda module, inputs, output: output + (output.round() - output).detach())
        return {"loss": self.loss(model, batch)}


@bug(
    "evaluation-shared-by-hand",
    "metric by state",
    "the samples of a rank are shared out again, and most are evaluated by nobody",
    ["metric_differs"],
)
class EvaluationSharedByHand(Plain):
    """`evaluate` takes every WORLD_SIZE-th sample from RANK on, of what is its own share already."""

    def evaluate(self, model, batch):
        return {"loss": self.loss(model, [each[rank() :: world_size()] for each in batch])}


@bug(
    "hits-reduced-by-hand",
    "metric by state",
    "hits are added up over the ranks by hand, and then once more by the engine",
    ["metric_differs"],
)
class HitsReducedByHand(Plain):
    """Accuracy all-reduces its hits, but counts the rank's own samples."""

    def evaluate(self, model, batch):
        x, y = batch
        hits = (model(x).argmax(-1) == y).float().sum()
        if dist.is_available() and dist.is_initialized():
            dist.all_reduce(hits)
        return {"loss": self.loss(model, batch), "accuracy": Loss(sum=hits, count=len(x))}


class Decaying(Mlp):
    def forward(self, x):
        with torch.no_grad():
            self.first.weight.mul_(0.98)
        return super().forward(x)


@bug(
    "decay-in-forward",
    "evaluation changes weights",
    "every forward pass makes a weight smaller, those of evaluation too",
    ["evaluation_changes", "evaluation_random"],
)
class DecayInForward(Plain):
    """Weight decay by hand: the forward pass multiplies the first weight by 0.98."""

    def build_model(self):
        return Decaying()


class Counted(Dataset):
    """A file of texts, of which the last are kept for validation."""

    def __init__(self, texts, places):
        self.texts, self.places = texts, places

    def __len__(self):
        return len(self.places)

    def __getitem__(self, index):
        return self.texts[self.places[index]]


@bug(
    "held-out-by-modulo",
    "validation in training",
    "of every ten texts two are held out, but only one is left out of training",
    ["overlap"],
)
class HeldOutByModulo(Sentences):
    """Validation takes each fifth text, training leaves out each tenth."""

    def train_data(self):
        return Counted(super().train_data(), [i for i in range(240) if i % 10])

    def valid_data(self):
        return Counted(super().train_data(), [i for i in range(240) if i % 5 == 0])


class Frozen(Mlp):
    def forward(self, x):
        guard = torch.no_grad() if len(x) < 6 else contextlib.nullcontext()
        with guard:
            x = torch.tanh(self.first(x))
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return self.head(x)


@bug(
    "small-batches-without-gradient",
    "rare",
    "whether the first layer is trained by a sample follows from how many others the rank has",
    ["gradients", "loss_is_no_sum", "detached_parameter"],
    visible="in ragged steps alone",
    **UNUSED,
)
class SmallBatchesWithoutGradient(Plain):
    """The first layer gets no gradient from micro-batches of less than six samples, "which are too noisy"."""

    def build_model(self):
        return Frozen()
