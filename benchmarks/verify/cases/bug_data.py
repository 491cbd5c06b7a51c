"""Data that are not the same on every rank, in every process, at every reading; and samples that come twice or never."""

from __future__ import annotations

import os
import random
import tempfile
import time
import uuid
from functools import cache
from pathlib import Path

import numpy as np
import torch
from case import bug
from plain import CLASSES, WIDTH, Plain, points, rank, world_size
from torch import Tensor, nn

from shardwise import DataBlock

CHANGES = ("data_change", "not_deterministic")
NOT_SHARED = (
    "data_by_rank",
    "data_by_hash",
    "data_by_listing",
    "data_change",
    "ranks_compute_differently",
    "sampler",
    "resume",
)
NEW = "the ranks do not hold the same data set: sample i is another one on each"


class Points(torch.utils.data.Dataset):
    """The samples of the plain task, for others to change."""

    def __init__(self, seed: int, number: int = 240) -> None:
        self.x, self.y = points(seed, number)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.x[index], self.y[index]


WORDS = [f"word{i}" for i in range(40)]


class ByHash(Plain):
    """The numbers of the words come from the order of a set of strings, which each process has its own of."""

    def train_data(self):
        numbers = {word: i for i, word in enumerate(set(WORDS))}
        x, y = points(self.config.seed, self.samples)
        return [(torch.tensor(numbers[WORDS[i % 40]]), y[i]) for i in range(len(x))]

    def valid_data(self):
        return None

    def build_model(self) -> nn.Module:
        return nn.Sequential(nn.Embedding(40, WIDTH), nn.Tanh(), nn.Linear(WIDTH, CLASSES))


bug(
    "vocabulary-from-a-set",
    "order of a set",
    NEW,
    NOT_SHARED,
    visible="in another launch, as after a resume: ranks of one launch on one machine share the order",
)(ByHash)


@bug(
    "shuffled-by-hash",
    "order of a set",
    NEW,
    NOT_SHARED,
    visible="in another launch, as after a resume: ranks of one launch on one machine share the order",
)
class ShuffledByHash(Plain):
    """Samples are ordered by hash() of their name, "to be shuffled the same way each time"."""

    def train_data(self):
        return sorted(super().train_data(), key=lambda sample: hash(str(sample[0])))


@bug("seeded-by-pid", "process", NEW, NOT_SHARED)
class SeededByPid(Plain):
    """The data set is made from a generator that is seeded by the process id."""

    def train_data(self):
        x, y = points(os.getpid(), self.samples)
        return list(zip(x, y, strict=True))


@bug("seeded-by-rank", "rank in the data", NEW, NOT_SHARED)
class SeededByRank(Plain):
    """seed + RANK: "each rank its own data"."""

    def train_data(self):
        x, y = points(self.config.seed + rank(), self.samples)
        return list(zip(x, y, strict=True))


@bug("slow-and-by-rank", "rank in the data", NEW, NOT_SHARED)
class SlowAndByRank(Plain):
    """The data set takes three seconds to make, and each rank adds noise by its RANK."""

    def train_data(self):
        time.sleep(3)
        x, y = points(self.config.seed, self.samples)
        return list(zip(x + rank() * torch.randn(x.shape), y, strict=True))


@bug(
    "sharded-by-hand",
    "rank in the data",
    "each rank's data set is a share of the data, which shardwise shares out again",
    (*NOT_SHARED, "dropped"),
)
class ShardedByHand(Plain):
    """The data set takes every WORLD_SIZE-th sample from RANK on, as one does without a distributed sampler."""

    def train_data(self):
        return super().train_data()[rank() :: world_size()]


@bug(
    "shorter-on-rank-1",
    "rank in the data",
    "the ranks' data sets have different lengths",
    (*NOT_SHARED, "rank_failed", "branches_differ", "hang"),
    refusal_is_right=True,
)
class ShorterOnRank1(Plain):
    """Broken samples are filtered out, by another limit on each rank."""

    def train_data(self):
        return [sample for sample in super().train_data() if sample[0][0] < 2 - rank()]


@bug("normaliser-of-own-share", "rank in the data", NEW, NOT_SHARED)
class NormaliserOfOwnShare(Plain):
    """The normaliser is fitted on each rank's share of the samples, "to save time"."""

    def train_data(self):
        x, y = points(self.config.seed, self.samples)
        share = x[rank() * 5 :: 12 * world_size()]
        return list(zip((x - share.mean(0)) / share.std(0), y, strict=True))


class Listed(torch.utils.data.Dataset):
    def __init__(self, folder: Path) -> None:
        self.files = [torch.load(path) for path in sorted(folder.iterdir())]

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.files[index]


@bug("order-of-files", "order of files", NEW, NOT_SHARED)
class OrderOfFiles(Plain):
    """Each process unpacks the samples into a folder of its own, under random names, and takes them in that order."""

    def train_data(self):
        with tempfile.TemporaryDirectory() as folder:
            for sample in super().train_data():
                torch.save(sample, Path(folder) / uuid.uuid4().hex)
            return Listed(Path(folder))


@bug("unseeded-split", "unseeded", "training and validation are split anew in each process", (*NOT_SHARED, "overlap"))
class UnseededSplit(Plain):
    """Which samples are held out is drawn without a seed, once for training and once for validation."""

    def train_data(self):
        samples = super().train_data()
        return [samples[i] for i in np.random.default_rng().permutation(240)[:200]]

    def valid_data(self):
        samples = Plain.train_data(self)
        return [samples[i] for i in np.random.default_rng().permutation(240)[200:]]


@bug("unseeded-noise", "unseeded", "augmentation is drawn without a seed", CHANGES)
class UnseededNoise(Plain):
    """__getitem__ draws from a generator that it makes without a seed."""

    def train_data(self):
        return Unseeded(self.config.seed)


class Unseeded(Points):
    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        noise = np.random.default_rng().normal(size=8, scale=0.5).astype(np.float32)
        return self.x[index] + torch.from_numpy(noise), self.y[index]


@bug("system-random", "unseeded", "augmentation is drawn from the system, which cannot be seeded", CHANGES)
class SystemRandom(Plain):
    """Labels are flipped at random by random.SystemRandom, one in five."""

    def train_data(self):
        return Flipped(self.config.seed)


class Flipped(Points):
    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        flip = random.SystemRandom().random() < 0.2
        return self.x[index], (self.y[index] + flip) % CLASSES


@bug("by-the-clock", "clock", "a sample depends on when it is read", CHANGES)
class ByTheClock(Plain):
    """Augmentation by the clock."""

    def train_data(self):
        return Clock(self.config.seed)


class Clock(Points):
    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.x[index] * (0.5 + time.time() % 1), self.y[index]


@bug("by-age", "clock", "a sample depends on how long the process has run", CHANGES)
class ByAge(Plain):
    """Augmentation becomes stronger with the seconds since the data set was made."""

    def train_data(self):
        return Ageing(self.config.seed)


class Ageing(Points):
    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.began = time.monotonic()

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.x[index] * (1 + (time.monotonic() - self.began)), self.y[index]


@bug(
    "by-worker",
    "workers",
    "a sample depends on the worker that reads it",
    ("workers", "data_change"),
    data={"num_workers": 2},
)
class ByWorker(Plain):
    """Each loader worker seeds its augmentation by its number."""

    def train_data(self):
        return Worker(self.config.seed)


class Worker(Points):
    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        worker = torch.utils.data.get_worker_info()
        generator = torch.Generator().manual_seed(worker.id if worker else 99)
        return self.x[index] + 0.5 * torch.randn(8, generator=generator), self.y[index]


@bug(
    "by-call-count",
    "stateful data set",
    "a sample depends on how many were read before it",
    ("data_change", "workers", "resume"),
)
class ByCallCount(Plain):
    """Augmentation becomes stronger with the number of samples that this process has read."""

    def train_data(self):
        return Counting(self.config.seed)


class Counting(Points):
    calls = 0

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        self.calls += 1
        return self.x[index] * (1 + self.calls / 50), self.y[index]


@bug(
    "generator-in-data",
    "stateful data set",
    "a sample depends on how many were read before it",
    ("data_change", "workers", "resume"),
)
class GeneratorInData(Plain):
    """The data set keeps a seeded generator and draws from it at each reading."""

    def train_data(self):
        return Drawing(self.config.seed)


class Drawing(Points):
    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.generator = np.random.default_rng(seed)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.x[index] + torch.from_numpy(self.generator.normal(size=8, scale=0.5)).float(), self.y[index]


@bug(
    "augmented-once",
    "stateful data set",
    "what a process drew at its first reading stays, so it depends on when it began",
    ("data_change", "resume", "drift"),
    visible="from the second epoch on, and after a resume",
)
class AugmentedOnce(Plain):
    """Augmented samples are cached in memory at their first reading."""

    def train_data(self):
        return Cached(self.config.seed)


class Cached(Points):
    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.noise = cache(lambda index: 0.7 * torch.randn(8))

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.x[index] + self.noise(index), self.y[index]


@bug(
    "noise-in-collate",
    "unseeded",
    "a micro-batch is changed at random when it is put together",
    (*CHANGES, "random_forward"),
)
class NoiseInCollate(Plain):
    """`collate` scales the micro-batch by a number drawn without a seed."""

    def collate(self, samples: list[tuple[Tensor, Tensor]]) -> list[Tensor]:
        scale = float(np.random.default_rng().uniform(0.5, 1.5))
        return [torch.stack([x for x, _ in samples]) * scale, torch.stack([y for _, y in samples])]


@bug(
    "with-replacement",
    "samples twice or never",
    "samples are drawn with replacement within an epoch",
    ("repeated", "dropped"),
)
class WithReplacement(Plain):
    """A sampler within the data set: __getitem__ gives any sample."""

    def train_data(self):
        return Any(self.config.seed)


class Any(Points):
    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return super().__getitem__(random.randrange(len(self)))


@bug("length-too-long", "samples twice or never", "half of the samples come twice in an epoch", ("repeated",))
class LengthTooLong(Plain):
    """The length is rounded up to a round number, and the index wraps around."""

    def train_data(self):
        return Wrapping(self.config.seed)


class Wrapping(Points):
    def __len__(self) -> int:
        return 360

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return super().__getitem__(index % 240)


@bug(
    "every-other-sample",
    "samples twice or never",
    "every other sample is never used, its neighbour twice",
    ("repeated", "dropped"),
)
class EveryOtherSample(Plain):
    """A mistake in the index: i // 2 * 2."""

    def train_data(self):
        return Pairs(self.config.seed)


class Pairs(Points):
    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return super().__getitem__(index // 2 * 2)


@bug(
    "oversampled",
    "samples twice or never",
    "some samples are in the data set several times",
    ("repeated",),
    visible="a user may want it; then a note is enough",
)
class Oversampled(Plain):
    """A rare class is copied five times into the list."""

    def train_data(self):
        samples = super().train_data()
        return samples + [sample for sample in samples if int(sample[1]) == 3] * 4


@bug(
    "validation-of-training", "validation in training", "the validation samples are in the training data", ("overlap",)
)
class ValidationOfTraining(Plain):
    """All samples are trained on; the last of them are the validation samples."""

    def valid_data(self):
        return self.train_data()[-60:]


@bug(
    "validation-shifted",
    "validation in training",
    "the validation samples are in the training data",
    ("overlap",),
    visible="9 of 60 validation samples",
)
class ValidationShifted(Plain):
    """Training and validation are cut from one list at borders that overlap."""

    def train_data(self):
        return super().train_data()[:189]

    def valid_data(self):
        return Plain.train_data(self)[180:]


@bug("shifted-by-rank", "rank in the data", "the data set asks its RANK at each reading", NOT_SHARED)
class RankAtReading(Plain):
    """__getitem__ shifts by RANK, "so that ranks do not read the same"."""

    class Data(DataBlock):
        shift: int = 7

    def train_data(self):
        return Shifted(self.config.seed, self.config.data.shift)


class Shifted(Points):
    def __init__(self, seed: int, shift: int) -> None:
        super().__init__(seed)
        self.shift = shift

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return super().__getitem__((index + rank() * self.shift) % len(self))
