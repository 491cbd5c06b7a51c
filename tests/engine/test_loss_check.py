"""A mean in place of a sum is noticed before the first step, with the line to write; a sum never is."""

from __future__ import annotations

import inspect
import logging
import os
import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shardwise import BatchedSamples, Loss, Session, Task
from shardwise.config import parse_config
from shardwise.engine.loss_check import ROUNDS, Finding, Pair, examine_loss, judge
from shardwise.errors import NoSum

CONFIG = (
    "task: own\ntraining: {{strategy: single, device: cpu, batch_size: {size}, max_steps: 3, precision: {precision}}}\n"
)
CLASSES = 5

LossFunction = Callable[[nn.Module, Any], Loss]


def session_of(folder: Path, *, size: int = 8, precision: str = "32-true") -> Session:
    return Session(parse_config(CONFIG.format(size=size, precision=precision), [f"run_dir={folder}"]))


def finding(folder: Path, loss: LossFunction, *, size: int = 8, precision: str = "32-true", **prepare: Any) -> Finding:
    """What is found before the first step of such a run; by default on points in several dimensions, with classes."""
    prepare = {"model": network, "data": points(), "loss": loss, **prepare}
    prepare["model"] = prepare["model"]()
    with session_of(folder, size=size, precision=precision) as session:
        session.prepare(**prepare)
        return examine_loss(session.parts, session.train_data, next(session.batches()), 1)


def network(*between: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), *between, nn.Tanh(), nn.Linear(16, CLASSES))


def points(number: int = 40) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(number, 6, generator=generator)
    return [(each, (10 * each[0]).abs().long() % CLASSES) for each in x]


def texts(number: int = 40) -> list[Tensor]:
    """Of lengths from 3 to 30."""
    generator = torch.Generator().manual_seed(1)
    lengths = torch.randint(3, 31, (number,), generator=generator).tolist()
    return [torch.randint(1, 20, (length,), generator=generator) for length in lengths]


def padded(samples: list[Tensor]) -> Tensor:
    return nn.utils.rnn.pad_sequence(samples, batch_first=True)


def words() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(20, 12), nn.Linear(12, 20))


def tokens(batch: Tensor) -> int:
    return int((batch[:, 1:] > 0).sum())


TEXT: dict[str, Any] = {"model": words, "data": texts(), "collate": padded, "count": tokens}


# ---------------------------------------------------------------- losses: sums, and the same as means


def classes(reduction: str) -> LossFunction:
    return lambda model, batch: Loss(F.cross_entropy(model(batch[0]), batch[1], reduction=reduction), len(batch[0]))


def next_token(reduction: str) -> LossFunction:
    def loss(model: nn.Module, batch: Tensor) -> Loss:
        logits = model(batch[:, :-1]).flatten(0, 1)
        return Loss(F.cross_entropy(logits, batch[:, 1:].flatten(), ignore_index=0, reduction=reduction), tokens(batch))

    return loss


def masked_tokens(*, mean: bool) -> LossFunction:
    """A mask multiplied by hand."""

    def loss(model: nn.Module, batch: Tensor) -> Loss:
        each = F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten(), reduction="none")
        mask = (batch[:, 1:] > 0).flatten()
        total = (each * mask).sum()
        return Loss(total / mask.sum() if mean else total, mask.sum())

    return loss


def squares(*, mean: str = "") -> LossFunction:
    """Five values for each sample: summed; averaged over all; or averaged over the batch alone."""

    def loss(model: nn.Module, batch: Any) -> Loss:
        errors = (model(batch[0]) - batch[0][:, :CLASSES]).square()
        total = {"": errors.sum(), "all": errors.mean(), "batch": errors.sum(1).mean()}[mean]
        return Loss(total, len(batch[0]))

    return loss


def binary(reduction: str) -> LossFunction:
    def loss(model: nn.Module, batch: Any) -> Loss:
        truth = F.one_hot(batch[1], CLASSES).float()
        return Loss(F.binary_cross_entropy_with_logits(model(batch[0]), truth, reduction=reduction), len(truth))

    return loss


def dice(*, mean: bool) -> LossFunction:
    """Of each sample."""

    def loss(model: nn.Module, batch: Any) -> Loss:
        p, truth = model(batch[0]).softmax(1), F.one_hot(batch[1], CLASSES)
        each = 1 - (2 * (p * truth).sum(1) + 1) / (p.sum(1) + truth.sum(1) + 1)
        return Loss(each.mean() if mean else each.sum(), len(each))

    return loss


def alignment(reduction: str) -> LossFunction:
    def loss(model: nn.Module, batch: Tensor) -> Loss:
        logits = model(batch).log_softmax(-1).transpose(0, 1)
        lengths = (batch > 0).sum(1)
        targets = batch[:, :2]
        found = F.ctc_loss(
            logits, targets, lengths, torch.full_like(lengths, 2), zero_infinity=True, reduction=reduction
        )
        return Loss(found, len(batch))

    return loss


def negative_likelihood(*, mean: bool) -> LossFunction:
    """Of a density: a loss below zero."""

    def loss(model: nn.Module, batch: Any) -> Loss:
        each = 0.5 * model(batch[0]).square().sum(1) - 40.0
        return Loss(each.mean() if mean else each.sum(), len(each))

    return loss


class Encoder(nn.Module):
    """A variational autoencoder: it draws in evaluation mode too."""

    def __init__(self) -> None:
        super().__init__()
        self.encode, self.decode = nn.Linear(6, 8), nn.Linear(4, 6)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mean, log = self.encode(x).chunk(2, dim=1)
        return self.decode(mean + torch.randn_like(mean) * (0.5 * log).exp()), mean, log


def variational(*, mean: bool) -> LossFunction:
    def loss(model: nn.Module, batch: Any) -> Loss:
        again, middle, log = model(batch[0])
        divergence = -0.5 * (1 + log - middle.square() - log.exp()).sum(1)
        each = (again - batch[0]).square().sum(1) + divergence
        return Loss(each.mean() if mean else each.sum(), len(each))

    return loss


class Denoiser(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(7, 32), nn.GELU(), nn.Linear(32, 6))

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        return self.layers(torch.cat([x, time], dim=1))


def diffusion(*, mean: bool) -> LossFunction:
    """Noise and times are drawn for the whole batch at once, and weigh differently: the loss is another one every time."""

    def loss(model: nn.Module, batch: Any) -> Loss:
        x = batch[0]
        time, noise = torch.rand(len(x), 1), torch.randn_like(x)
        found = model((1 - time) * x + time * noise, time)
        each = (found - noise).square().mean(1) / (0.3 + time[:, 0])
        return Loss(each.mean() if mean else each.sum(), len(x))

    return loss


SUMS: dict[str, tuple[LossFunction, dict[str, Any]]] = {
    "classes": (classes("sum"), {}),
    "tokens": (next_token("sum"), TEXT),
    "masked": (masked_tokens(mean=False), TEXT),
    "squares": (squares(), {}),
    "binary": (binary("sum"), {}),
    "dice": (dice(mean=False), {}),
    "ctc": (alignment("sum"), {**TEXT, "count": len}),
    "likelihood": (negative_likelihood(mean=False), {}),
}
MEANS: dict[str, tuple[LossFunction, dict[str, Any]]] = {
    "classes": (classes("mean"), {}),
    "tokens": (next_token("mean"), TEXT),
    "masked": (masked_tokens(mean=True), TEXT),
    "squares-all": (squares(mean="all"), {}),
    "squares-batch": (squares(mean="batch"), {}),
    "binary": (binary("mean"), {}),
    "dice": (dice(mean=True), {}),
    "ctc": (alignment("mean"), {**TEXT, "count": len}),
    "likelihood": (negative_likelihood(mean=True), {}),
}
PRECISIONS = ("32-true", "bf16-mixed", "bf16-true")


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("name", SUMS)
def test_a_sum_is_one(in_tmp: Path, name: str, precision: str) -> None:
    loss, prepare = SUMS[name]
    assert finding(in_tmp, loss, precision=precision, **prepare).kind == "sum"


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("name", MEANS)
def test_a_mean_is_found(in_tmp: Path, name: str, precision: str) -> None:
    if name == "ctc" and precision == "bf16-true":
        pytest.skip("PyTorch has no CTC in bf16 (2.13)")
    loss, prepare = MEANS[name]
    assert finding(in_tmp, loss, precision=precision, **prepare).kind == "mean"


@pytest.mark.parametrize("size", [1, 2, 3, 40])
@pytest.mark.parametrize("name", ["tokens", "classes"])
def test_of_any_number_of_samples(in_tmp: Path, name: str, size: int) -> None:
    """One sample is put together with itself."""
    for kind, (loss, prepare) in {"sum": SUMS[name], "mean": MEANS[name]}.items():
        assert finding(in_tmp, loss, size=size, **prepare).kind == kind


# ---------------------------------------------------------------- neither a sum nor a mean


def contrastive(reduction: str) -> LossFunction:
    def loss(model: nn.Module, batch: Any) -> Loss:
        one, two = (F.normalize(model(each), dim=1) for each in (batch[0], batch[0].roll(1, dims=1)))
        return Loss(F.cross_entropy(one @ two.T / 0.2, torch.arange(len(one)), reduction=reduction), len(one))

    return loss


def partly(model: nn.Module, batch: Any) -> Loss:
    """Two terms, of which one is a mean."""
    answers = model(batch[0])
    total = F.cross_entropy(answers, batch[1], reduction="sum") + 5 * answers.square().mean()
    return Loss(total, len(batch[0]))


@pytest.mark.parametrize("loss", [contrastive("sum"), contrastive("mean"), partly])
def test_what_is_neither_is_told_apart_from_a_mean(in_tmp: Path, loss: LossFunction) -> None:
    assert finding(in_tmp, loss).kind == "depends"


def counted_once(*, mean: bool) -> LossFunction:
    return lambda model, batch: Loss(F.cross_entropy(model(batch[0]), batch[1], reduction="mean" if mean else "sum"), 1)


@pytest.mark.parametrize("mean", [True, False])
def test_a_count_that_is_always_the_same_is_found(in_tmp: Path, mean: bool) -> None:
    found = finding(in_tmp, counted_once(mean=mean), count=lambda batch: 1)
    assert found.kind == "count"
    assert "(count 1) for 4 samples" in found.said and "(count 1) for the same samples twice over" in found.said


def test_one_sample_at_a_time_may_count_as_one(in_tmp: Path) -> None:
    """A mean over the values of one sample is then what its author wants: each sample weighs the same."""
    assert finding(in_tmp, counted_once(mean=True), size=1, count=lambda batch: 1).kind == "unknown"


# ---------------------------------------------------------------- losses that draw random numbers


@pytest.mark.parametrize("size", [1, 2, 8, 40])
@pytest.mark.parametrize("seed", range(3))
def test_a_sum_that_draws_random_numbers_is_never_refused(in_tmp: Path, size: int, seed: int) -> None:
    for loss, model in ((diffusion(mean=False), Denoiser), (variational(mean=False), Encoder)):
        data = points(40 + seed)  # other samples first
        assert finding(in_tmp, loss, size=size, model=model, data=data).kind in ("sum", "unknown")


def test_a_mean_that_draws_random_numbers_is_found(in_tmp: Path) -> None:
    for loss, model in ((diffusion(mean=True), Denoiser), (variational(mean=True), Encoder)):
        found = finding(in_tmp, loss, size=40, model=model)
        assert found.kind == "mean" and "it is another one every time)" in found.said


def hidden(samples: list[Tensor]) -> dict[str, Tensor]:
    """Which tokens are hidden is drawn when a batch is put together."""
    batch = padded(samples)
    chosen = (torch.rand(batch.shape) < 0.3) & (batch > 0)
    return {"ids": batch.masked_fill(chosen, 0), "targets": batch * chosen}


def hidden_tokens(reduction: str) -> LossFunction:
    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Loss:
        logits, targets = model(batch["ids"]).flatten(0, 1), batch["targets"].flatten()
        return Loss(F.cross_entropy(logits, targets, ignore_index=0, reduction=reduction), (targets > 0).sum())

    return loss


@pytest.mark.parametrize("size", [1, 2, 8, 40])
def test_what_collate_draws_is_no_fault_of_the_loss(in_tmp: Path, size: int) -> None:
    hides: dict[str, Any] = {
        "model": words,
        "data": texts(),
        "collate": hidden,
        "count": lambda batch: int((batch["targets"] > 0).sum()),
    }
    assert finding(in_tmp, hidden_tokens("sum"), size=size, **hides).kind in ("sum", "unknown")
    if size == 40:
        assert finding(in_tmp, hidden_tokens("mean"), size=size, **hides).kind == "mean"


# ---------------------------------------------------------------- nothing can be said


def times(factor: float) -> LossFunction:
    return lambda model, batch: Loss(model(batch[0]).sum() * factor, len(batch[0]))


def cancelling(model: nn.Module, batch: Any) -> Loss:
    """As a policy's gradient at its first step: what is left of the sum is rounding."""
    gains = batch[0][:, 0] - batch[0][:, 0].mean()
    answers = model(batch[0]).log_softmax(1)[:, 0]
    return Loss(-((answers - answers.detach()).exp() * gains).sum(), len(gains))


@pytest.mark.parametrize(
    ("loss", "why"),
    [
        (times(0.0), "the loss is zero"),
        (times(float("nan")), "the loss is not finite"),
        (times(float("inf")), "the loss is not finite"),
        (cancelling, "the loss is zero"),
    ],
)
def test_a_loss_that_is_nothing_or_no_number_is_left_to_others(in_tmp: Path, loss: LossFunction, why: str) -> None:
    assert finding(in_tmp, loss) == Finding("unknown", why)


def test_nothing_to_count_is_left_to_others(in_tmp: Path) -> None:
    nothing = lambda model, batch: Loss(model(batch[0]).sum(), 0)  # noqa: E731
    assert finding(in_tmp, nothing, count=lambda batch: 0) == Finding("unknown", "there is nothing to count")


def trains_only(model: nn.Module, batch: Any) -> Loss:
    """As detectors do: in evaluation mode the model gives something else."""
    answers = model(batch[0])
    if not model.training:
        raise TypeError("unsupported operand")
    return Loss(F.cross_entropy(answers, batch[1], reduction="sum"), len(answers))


def test_a_loss_that_cannot_be_computed_in_evaluation_mode_trains(in_tmp: Path) -> None:
    assert finding(in_tmp, trains_only) == Finding("unknown", "TypeError: unsupported operand")
    with session_of(in_tmp) as session:
        session.prepare(model=network(), data=points(), loss=trains_only)
        for batch in session.batches():
            session.step(batch)
        assert session.steps_done == 3


# ---------------------------------------------------------------- whatever collate returns


class Record:
    def __init__(self, name: str, x: Tensor, y: Tensor) -> None:
        self.name, self.x, self.y = name, x, y


class Fresh:
    """A data set whose samples are made anew each time, so that a collate may take them to pieces."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> dict[str, Any]:
        x, y = points()[index]
        return {"name": f"sample {index}", "extra": None, "inner": (x, [y])}


def popped(samples: list[dict[str, Any]]) -> dict[str, Any]:
    inner = [sample.pop("inner") for sample in samples]
    return {
        "names": [sample["name"] for sample in samples],
        "none": None,
        "nested": (torch.stack([x for x, _ in inner]), {"y": torch.stack([y[0] for _, y in inner])}),
        "records": [Record(sample["name"], inner[0][0], inner[0][1][0]) for sample in samples],
    }


def packed(samples: list[Any]) -> Tensor:
    """One row, with the length of each text in front."""
    lengths = torch.tensor([len(sample) for sample in samples])
    return torch.cat([torch.tensor([len(samples)]), lengths, *samples])


def texts_of(row: Tensor) -> list[Tensor]:
    number = int(row[0])
    return list(row[1 + number :].split(row[1 : 1 + number].tolist()))


def unique(samples: list[tuple[Tensor, Tensor]]) -> list[Tensor]:
    """What comes twice is left out, as where the neighbours of nodes in a graph are looked up."""
    found = {tuple(x.tolist()): (x, y) for x, y in samples}.values()
    return [torch.stack([x for x, _ in found]), torch.stack([y for _, y in found])]


def test_batches_of_dicts_tuples_strings_objects_and_none(in_tmp: Path) -> None:
    def loss(model: nn.Module, batch: Any, *, reduction: str) -> Loss:
        assert len(batch["names"]) == len(batch["records"]) and batch["none"] is None
        x, truth = batch["nested"]
        return Loss(F.cross_entropy(model(x), truth["y"], reduction=reduction), len(x))

    nested: dict[str, Any] = {"data": Fresh(), "collate": popped, "count": lambda batch: len(batch["names"])}
    for reduction in ("sum", "mean"):
        assert finding(in_tmp, partial(loss, reduction=reduction), **nested).kind == reduction


def test_packed_rows(in_tmp: Path) -> None:
    def loss(model: nn.Module, batch: Tensor, *, mean: bool) -> Loss:
        each = torch.cat([F.cross_entropy(model(text[:-1]), text[1:], reduction="none") for text in texts_of(batch)])
        return Loss(each.mean() if mean else each.sum(), len(each))

    rows: dict[str, Any] = {
        "model": words,
        "data": texts(),
        "collate": packed,
        "count": lambda row: len(row) - 1 - 2 * int(row[0]),
    }
    assert finding(in_tmp, partial(loss, mean=False), **rows).kind == "sum"
    assert finding(in_tmp, partial(loss, mean=True), **rows).kind == "mean"


def test_a_collate_that_leaves_out_what_comes_twice_is_not_taken_for_a_mean(in_tmp: Path) -> None:
    assert finding(in_tmp, classes("sum"), collate=unique).kind == "unknown"


def test_a_collate_that_takes_one_sample_is_not_taken_for_a_mean(in_tmp: Path) -> None:
    def first(samples: list[Tensor]) -> Tensor:
        return samples[0].unsqueeze(0)

    assert finding(in_tmp, next_token("sum"), size=1, **{**TEXT, "collate": first}).kind == "unknown"


def test_a_collate_that_fails_on_the_same_samples_twice_is_no_problem(in_tmp: Path) -> None:
    def only_different(samples: list[tuple[Tensor, Tensor]]) -> list[Tensor]:
        if len({id(x) for x, _ in samples}) < len(samples):
            raise KeyError("twice")
        return unique(samples)

    with session_of(in_tmp) as session:
        session.prepare(model=network(), data=points(), loss=classes("sum"), collate=only_different)
        found = examine_loss(session.parts, session.train_data, next(session.batches()), 1)
        assert found == Finding("unknown", "samples cannot be put together twice over: KeyError: 'twice'")


class Batches(BatchedSamples):
    """Its file cannot give a row twice in one read."""

    def __len__(self) -> int:
        return 40

    def read(self, ids: Any, epoch: int) -> list[Tensor]:
        assert len(set(ids.tolist())) == len(ids)
        return unique([points()[index] for index in ids])

    def join(self, parts: list[Any]) -> list[Tensor]:
        return [torch.cat(columns) for columns in zip(*parts, strict=True)]

    def take_apart(self, batch: list[Tensor], sizes: list[int]) -> list[Any]:
        return list(zip(*(column.split(sizes) for column in batch), strict=True))


@pytest.mark.parametrize("kind", ["sum", "mean"])
def test_data_that_makes_whole_micro_batches(in_tmp: Path, kind: str) -> None:
    assert finding(in_tmp, classes(kind), data=Batches()).kind == kind


class Opened:
    """Knows in which processes it was read."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        (self.folder / str(os.getpid())).touch()
        return points()[index]


def test_what_workers_read_is_never_read_by_the_process_that_forks_them(in_tmp: Path) -> None:
    """A file that it had opened would be shared by all of them."""
    (in_tmp / "read").mkdir()
    config = CONFIG.format(size=8, precision="32-true") + "data: {num_workers: 1}\n"
    with Session(parse_config(config, [f"run_dir={in_tmp}"])) as session:
        session.prepare(model=network(), data=Opened(in_tmp / "read"), loss=classes("mean"))
        with pytest.raises(NoSum):
            session.step(next(session.batches()))
    readers = {file.name for file in (in_tmp / "read").iterdir()}
    assert len(readers) >= 2 and str(os.getpid()) not in readers


# ---------------------------------------------------------------- what a run sees of it


class Custom(nn.Module):
    """Keeps part of itself in evaluation mode, counts, and has a train() that must not be called."""

    def __init__(self) -> None:
        super().__init__()
        steady = nn.BatchNorm1d(16).eval()
        self.layers = network(steady, nn.Dropout(0.3))
        self.frozen = nn.BatchNorm1d(6)
        self.frozen.eval()
        self.seen: Tensor
        self.register_buffer("seen", torch.zeros(()))
        self.last: Tensor
        self.register_buffer("last", torch.zeros(1))
        self.modes = 0

    def train(self, mode: bool = True) -> Custom:
        self.modes += 1
        return self

    def forward(self, x: Tensor) -> Tensor:
        self.seen = self.seen.add_(len(x))
        self.last = x[0]
        return self.layers(self.frozen(x)) * (1 + random.random() * np.random.rand() * float(torch.rand(())) / 1e6)


def numpy_state() -> list[int]:
    state: Any = np.random.get_state(legacy=True)
    return list(state[1])


def test_modes_buffers_and_random_states_are_put_back(in_tmp: Path) -> None:
    with session_of(in_tmp) as session:
        model: Any = session.prepare(model=Custom(), data=points(), loss=classes("sum"))
        batch = next(session.batches())
        modes, called, buffers = [each.training for each in model.modules()], model.modes, dict(model.named_buffers())
        values = {name: buffer.clone() for name, buffer in buffers.items()}
        states = random.getstate(), numpy_state(), torch.get_rng_state().tolist()
        assert not all(modes)
        assert examine_loss(session.parts, session.train_data, batch, 1).kind == "sum"
        assert [each.training for each in model.modules()] == modes and model.modes == called
        for name, buffer in model.named_buffers():
            assert buffer is buffers[name] and torch.equal(buffer, values[name]), name
        assert (random.getstate(), numpy_state(), torch.get_rng_state().tolist()) == states
        assert all(parameter.grad is None for parameter in model.parameters())


def test_a_module_beside_the_model_is_asked_in_evaluation_mode_too(in_tmp: Path) -> None:
    """As a network that judges pictures, which the task keeps for its loss."""

    class Judged(Points):
        def build_model(self) -> nn.Module:
            self.judge = nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, CLASSES))
            return super().build_model()

        def loss(self, model: nn.Module, batch: Any) -> Loss:
            assert self.judge.training == model.training
            return Loss((self.judge(batch[0]) - model(batch[0])).square().sum(), len(batch[0]))

    with session_of(in_tmp) as session:
        session.prepare(Judged(session.config))
        batch = next(session.batches())
        judge: nn.Module = vars(session.task)["judge"]
        before = [buffer.clone() for buffer in judge.buffers()]
        assert examine_loss(session.parts, session.train_data, batch, 1).kind == "sum"
        assert all(torch.equal(a, b) for a, b in zip(before, judge.buffers(), strict=True))
        session.step(batch)
        assert not all(torch.equal(a, b) for a, b in zip(before, judge.buffers(), strict=True))


class Points(Task):
    def train_data(self) -> Any:
        return points()

    def build_model(self) -> nn.Module:
        return network()

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        return Loss(F.cross_entropy(model(batch[0]), batch[1]), len(batch[0]))


class Meant(Points):
    loss_is_a_sum = False


def test_the_first_step_shows_the_line_to_write(in_tmp: Path) -> None:
    with session_of(in_tmp) as session:
        session.prepare(Points(session.config))
        with pytest.raises(NoSum) as told:
            session.step(next(session.batches()))
        assert session.steps_done == 0
    line = inspect.getsourcelines(Points.loss)[1]
    head, write, code, how = str(told.value).splitlines()
    assert head.startswith(f"step 1: the loss (Points.loss, test_loss_check.py:{line}) is a mean, not a sum: it is 1.")
    assert "(count 4) for 4 samples" in head and "(count 8) for the same samples twice over; a sum would be 3." in head
    assert "it would be divided twice" in head and write == "  Write"
    assert code == "      return Loss(sum=loss * count, count=count)"
    assert 'the number of values that the mean is taken over, or compute the loss with reduction="sum"' in how


def test_the_line_that_it_shows_is_right(in_tmp: Path) -> None:
    def loss(model: nn.Module, batch: Tensor) -> Loss:
        mean, count = next_token("mean")(model, batch).sum, tokens(batch)
        return Loss(sum=mean * count, count=count)

    assert finding(in_tmp, loss, **TEXT).kind == "sum"


@pytest.mark.parametrize(
    ("loss", "count", "said"),
    [
        (contrastive("sum"), len, "is not a sum over samples: it is "),
        (counted_once(mean=False), lambda batch: 1, "has a count that does not grow with the samples: it is "),
    ],
)
def test_what_is_no_mean_is_told_the_way_out(in_tmp: Path, loss: LossFunction, count: Any, said: str) -> None:
    count = (lambda batch: len(batch[0])) if count is len else count
    with session_of(in_tmp) as session:
        session.prepare(model=network(), data=points(), loss=loss, count=count)
        with pytest.raises(NoSum, match=said) as told:
            session.step(next(session.batches()))
    assert "`loss_is_a_sum = False` in the task, or session.prepare(..., loss_is_a_sum=False)" in str(told.value)


def test_a_loss_that_is_meant_to_be_no_sum_is_not_asked(in_tmp: Path) -> None:
    for own in (False, True):
        with session_of(in_tmp) as session:
            if own:
                session.prepare(model=network(), data=points(), loss=contrastive("mean"), loss_is_a_sum=False)
            else:
                session.prepare(Meant(session.config))
            session.step(next(session.batches()))
            assert session.steps_done == 1


def test_a_loop_of_its_own_that_leaves_out_batches_is_checked_at_its_first_step(in_tmp: Path) -> None:
    with session_of(in_tmp) as session:
        session.prepare(Points(session.config))
        _, _, third = (batch for batch, _ in zip(session.batches(), range(3), strict=False))
        with pytest.raises(NoSum):
            session.step(third)


def test_what_cannot_be_told_is_logged_for_who_looks(in_tmp: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, "shardwise.engine.loss_check"), session_of(in_tmp) as session:
        session.prepare(model=network(), data=points(), loss=trains_only)
        session.step(next(session.batches()))
    assert "step 1: whether the loss is a sum: unknown TypeError: unsupported operand" in caplog.text


# ---------------------------------------------------------------- what follows from the answers


def found_in_noise(seed: int, *, mean: bool, samples: int, spread: float) -> str:
    """Of losses of samples that are drawn anew each time, all above zero, some far above."""
    generator, total = np.random.default_rng(seed), np.mean if mean else np.sum
    pairs: list[Pair] = []
    kind = "doubt"
    for draws in ROUNDS:
        while len(pairs) < draws:
            once, twice = (float(total(generator.lognormal(0, spread, number))) for number in (samples, 2 * samples))
            pairs.append(Pair(once, samples, twice, 2 * samples))
        if kind == "doubt":
            kind = judge(pairs, samples, (2 * samples, 2 * samples)).kind
    return kind


@pytest.mark.parametrize("spread", [0.02, 0.3, 1.0, 2.0])
@pytest.mark.parametrize("samples", [1, 4, 64])
def test_noise_makes_no_mean_of_a_sum(samples: int, spread: float) -> None:
    for seed in range(200):
        assert found_in_noise(seed, mean=False, samples=samples, spread=spread) in ("sum", "unknown")


@pytest.mark.parametrize(("samples", "spread"), [(1, 0.02), (4, 0.3), (16, 0.5), (64, 1.0)])
def test_a_mean_shows_through_noise(samples: int, spread: float) -> None:
    for seed in range(200):
        assert found_in_noise(seed, mean=True, samples=samples, spread=spread) == "mean"
