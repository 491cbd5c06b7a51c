"""Every way to spread a model computes what one process computes, in every combination that is not refused."""

from __future__ import annotations

import functools
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.distributed import work
from tests.distributed.pool import FreshRanks
from tests.distributed.test_parity import assert_same_curve
from tests.tasks import Ragged

# 53 samples in global batches of 12: four whole ones and a tail of 5, which no way can share evenly.
CONFIG = """
task: tests.tasks:Ragged
model: {layers: 4}
training:
  total_batch_size: 12
  gradient_clip: 0.5
  max_epochs: 2
  optimizer: {name: adamw, lr: 0.01, weight_decay: 0.1}
  scheduler: {name: cosine_warmup, warmup_steps: 2}
"""
STEPS = 10

WAYS: dict[str, tuple[int, list[str]]] = {
    # name: (ranks, overrides)
    "dp": (1, ["strategy=dp", "batch_size=6"]),
    "zero1": (2, ["strategy=zero1", "batch_size=3"]),
    "zero1 on 4": (4, ["strategy=zero1", "batch_size=3"]),
    "ddp, no views": (
        2,
        ["strategy=ddp", "batch_size=3", "ddp.gradient_as_bucket_view=false", "ddp.bucket_cap_mb=0.001"],
    ),
    "SHARD_GRAD_OP": (4, ["fsdp.sharding_strategy=SHARD_GRAD_OP", "batch_size=1"]),
    "NO_SHARD": (2, ["fsdp.sharding_strategy=NO_SHARD", "batch_size=2"]),
    "HYBRID_SHARD of 2": (4, ["fsdp.sharding_strategy=HYBRID_SHARD", "fsdp.shard_size=2", "batch_size=3"]),
    "cpu_offload": (2, ["fsdp.cpu_offload=true", "batch_size=3"]),
    "recompute": (2, ["fsdp.activation_checkpointing=true", "batch_size=3"]),
    "recompute every 2nd": (2, ["fsdp.activation_checkpointing=selective", "batch_size=3"]),
    "recompute operations": (
        2,
        ["fsdp.activation_checkpointing=selective", "fsdp.selective=operations", "batch_size=3"],
    ),
    "prefetch": (2, ["fsdp.prefetch=2", "batch_size=6"]),
    "reduce every micro-batch": (2, ["fsdp.reduce_every_micro_batch=true", "batch_size=2"]),
    "min_num_params": (2, ["fsdp.min_num_params=100000", "batch_size=6"]),
    "tensor": (2, ["tensor.size=2", "batch_size=4"]),
    "tensor and fsdp": (4, ["tensor.size=2", "batch_size=3"]),
    "tensor and replicas": (4, ["tensor.size=2", "fsdp.sharding_strategy=NO_SHARD", "batch_size=3"]),
    "gpipe": (2, ["pipeline.schedule=gpipe", "batch_size=4"]),
    "1f1b": (2, ["pipeline.schedule=1f1b", "batch_size=3"]),
    "1f1b on 4 stages": (4, ["pipeline.schedule=1f1b", "batch_size=2"]),
    "interleaved": (2, ["pipeline.schedule=interleaved", "batch_size=3"]),
    "balanced by time": (2, ["pipeline.balance=time", "batch_size=3"]),
    "1f1b and ddp": (4, ["pipeline.stages=2", "batch_size=3"]),
    "1f1b and fsdp": (4, ["pipeline.stages=2", "fsdp.sharding_strategy=FULL_SHARD", "batch_size=3"]),
    "interleaved and ddp": (4, ["pipeline.stages=2", "pipeline.schedule=interleaved", "batch_size=3"]),
    "interleaved and fsdp": (
        4,
        ["pipeline.stages=2", "pipeline.schedule=interleaved", "fsdp.sharding_strategy=FULL_SHARD", "batch_size=3"],
    ),
    "1f1b, recompute and fsdp": (4, ["pipeline.stages=2", "fsdp.activation_checkpointing=true", "batch_size=3"]),
}


# These change the numbers, or are there to be resumed.
OTHERS: dict[str, tuple[int, list[str]]] = {
    "ddp on 4": (4, ["strategy=ddp", "batch_size=3", "ddp.bucket_cap_mb=0.01"]),
    "powersgd": (2, ["strategy=ddp", "batch_size=3", "ddp.comm_hook=powersgd", "ddp.powersgd_warmup_steps=2",
                     "ddp.powersgd_rank=1", "ddp.bucket_cap_mb=0.01"]),
    "fp16 gradients": (2, ["strategy=zero1", "batch_size=3", "ddp.comm_hook=fp16"]),
    "local_sgd": (2, ["strategy=local_sgd", "batch_size=3", "local_sgd.every=3"]),
}  # fmt: skip


def overrides_of(way: str) -> list[str]:
    return [f"training.{each}" for each in (WAYS | OTHERS)[way][1]]


@pytest.fixture(scope="module")
def reference(fresh_ranks: FreshRanks) -> dict[str, Any]:
    single = ["training.strategy=single", "training.batch_size=12"]
    return fresh_ranks.run(1, functools.partial(work.train, evaluate=True), CONFIG, single)[0]


@pytest.mark.parametrize("way", WAYS)
def test_every_way_gives_the_numbers_of_one_process(fresh_ranks: FreshRanks, reference: Any, way: str) -> None:
    """LossHistory, norms, weights and the evaluation; with accumulation, clipping, ragged lengths and tied weights."""
    results = fresh_ranks.run(WAYS[way][0], functools.partial(work.train, evaluate=True), CONFIG, overrides_of(way))
    together = {name: weight for result in results for name, weight in result["weights"].items()}
    for result in results:
        assert_same_curve({**result, "weights": together}, reference)
        assert result["metrics"] == pytest.approx(reference["metrics"], rel=1e-5)


def test_a_zero_bubble_pipeline_gives_the_numbers_of_one_process(fresh_ranks: FreshRanks) -> None:
    untied = ["model.tied=false"]
    single = ["training.strategy=single", "training.batch_size=12", *untied]
    one = fresh_ranks.run(1, functools.partial(work.train, evaluate=True), CONFIG, single)[0]
    zero_bubble = ["training.pipeline.schedule=zero_bubble", "training.batch_size=3", *untied]
    results = fresh_ranks.run(2, functools.partial(work.train, evaluate=True), CONFIG, zero_bubble)
    together = {name: weight for result in results for name, weight in result["weights"].items()}
    assert_same_curve({**results[0], "weights": together}, one)


@pytest.mark.parametrize(
    "way", ["dp", "zero1", "zero1 on 4", "ddp, no views", "NO_SHARD", "1f1b", "1f1b and ddp", "interleaved"]
)
def test_muon_gives_the_numbers_of_one_process_wherever_it_is_not_refused(fresh_ranks: FreshRanks, way: str) -> None:
    text = CONFIG.replace("name: adamw", "name: muon")
    single = ["training.strategy=single", "training.batch_size=12"]
    one = fresh_ranks.run(1, _train_in_fp32, text, single)[0]
    results = fresh_ranks.run(WAYS[way][0], _train_in_fp32, text, overrides_of(way))
    together = {name: weight for result in results for name, weight in result["weights"].items()}
    assert_same_curve({**results[0], "weights": together}, one)


def _train_in_fp32(text: str, overrides: list[str]) -> Any:
    """Muon rounds the matrices that it makes orthogonal to bf16 (torch 2.13), where the last digit of a sum over the ranks may
    become a step of bf16: the same numbers to bf16's rounding, and too coarse to be compared."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "bfloat16", torch.Tensor.float)  # as 2.11 and 2.13 write it
        patch.setattr(sys.modules["torch.optim._muon"], "torch", _WithoutBf16())  # and 2.15
        return work.train(text, overrides)


class _WithoutBf16:
    """The module torch, to whoever takes it for that."""

    def __getattr__(self, name: str) -> Any:
        return torch.float32 if name == "bfloat16" else getattr(torch, name)


class _Uneven(Ragged):
    """One block that takes as long as all others together, with no more parameters."""

    def build_model(self) -> nn.Module:
        model: Any = super().build_model()
        inner = model.layers[0].inner
        model.layers[0].inner = nn.Sequential(*inner, _Slow())
        return model


class _Slow(nn.Module):
    def forward(self, hidden: Tensor) -> Tensor:
        time.sleep(0.05)
        return hidden


@pytest.mark.parametrize(("balance", "cut"), [("parameters", [0, 2, 4]), ("time", [0, 1, 4])])
def test_stages_are_cut_to_equal_parameters_or_equal_time(
    fresh_ranks: FreshRanks, balance: str, cut: list[int]
) -> None:
    text = CONFIG.replace("tests.tasks:Ragged", "tests.distributed.test_strategies:_Uneven")
    choice = [f"training.pipeline.balance={balance}", "training.batch_size=3"]
    assert fresh_ranks.run(2, work.with_session, text, choice, _edges) == [cut, cut]


def _edges(session: Any) -> list[int]:
    return list(session.strategy.model.edges)


# ---------------------------------------------------------------- resume and re-sharding

RESUMED = [
    "ddp on 4",
    "powersgd",
    "fp16 gradients",
    "local_sgd",
    "zero1",
    "cpu_offload",
    "HYBRID_SHARD of 2",
    "tensor and fsdp",
    "interleaved and ddp",
    "1f1b and fsdp",
]


@pytest.mark.parametrize("way", RESUMED)
def test_resumed_in_the_middle_it_is_bit_for_bit_the_uninterrupted_run(
    fresh_ranks: FreshRanks, tmp_path: Path, way: str
) -> None:
    size, overrides = (WAYS | OTHERS)[way][0], [*overrides_of(way), "model.dropout=0.2"]
    whole = fresh_ranks.run(size, work.train, CONFIG, overrides)
    folder = [*overrides, *work.folder_of(tmp_path)]
    head = fresh_ranks.run(size, functools.partial(work.train, steps=4, save=True), CONFIG, folder)
    tail = fresh_ranks.run(size, functools.partial(work.train, resume="latest"), CONFIG, folder)
    for before, after, undisturbed in zip(head, tail, whole, strict=True):
        assert after["from"] == 4
        assert before["losses"] + after["losses"] == undisturbed["losses"]
        assert before["norms"] + after["norms"] == undisturbed["norms"]
        for name, weight in undisturbed["weights"].items():
            assert torch.equal(after["weights"][name], weight), name


def test_a_run_goes_on_under_any_other_strategy(fresh_ranks: FreshRanks, reference: Any, tmp_path: Path) -> None:
    ways = [
        "zero1",
        "1f1b",
        "tensor and fsdp",
        "interleaved and fsdp",
        "SHARD_GRAD_OP",
        "gpipe",
        "tensor",
        "zero1 on 4",
    ]
    parts: list[dict[str, Any]] = []
    for until, way in zip([1, 2, 3, 5, 6, 7, 9, 10], ways, strict=True):
        job = functools.partial(work.train, steps=until, resume="auto", save=True)
        parts.append(fresh_ranks.run(WAYS[way][0], job, CONFIG, [*overrides_of(way), *work.folder_of(tmp_path)])[0])
    joined = {key: [value for part in parts for value in part[key]] for key in ("losses", "norms", "lrs")}
    assert_same_curve({**joined, "weights": parts[-1]["weights"]}, reference)


def test_powersgd_on_other_ranks_starts_its_memory_anew_and_says_so(fresh_ranks: FreshRanks, tmp_path: Path) -> None:
    folder = [*overrides_of("powersgd"), *work.folder_of(tmp_path)]
    fresh_ranks.run(2, functools.partial(work.train, steps=4, save=True), CONFIG, folder)
    assert fresh_ranks.run(2, work.with_session, CONFIG, folder, _forgot) == [False, False]
    assert fresh_ranks.run(4, work.with_session, CONFIG, folder, _forgot) == [True] * 4


def _forgot(session: Any) -> bool:
    session.resume("latest")
    return bool(session.extra_state_lost)


# ---------------------------------------------------------------- compressed gradients


@pytest.mark.parametrize("way", ["powersgd", "fp16 gradients"])
def test_compressed_gradients_learn_nearly_the_same_on_all_ranks_alike(
    fresh_ranks: FreshRanks, reference: Any, way: str
) -> None:
    results = fresh_ranks.run(2, functools.partial(work.train, evaluate=True), CONFIG, overrides_of(way))
    for name, weight in results[0]["weights"].items():
        assert torch.equal(results[1]["weights"][name], weight), f"{name}: the ranks have drifted apart"
    assert results[0]["losses"] != reference["losses"], "nothing was compressed"
    assert results[0]["metrics"]["loss"] == pytest.approx(reference["metrics"]["loss"], rel=0.02)


# ---------------------------------------------------------------- precisions

NARROW = ["zero1", "tensor", "tensor and fsdp", "1f1b and ddp", "1f1b and fsdp", "cpu_offload", "SHARD_GRAD_OP"]


PRECISIONS = [(way, precision) for way in NARROW for precision in ("bf16-mixed", "bf16-true")]
PRECISIONS += [
    (way, "16-mixed") for way in ("zero1", "cpu_offload", "SHARD_GRAD_OP")
]  # refused for the others, see below


@pytest.mark.parametrize(("way", "precision"), PRECISIONS)
def test_narrow_precisions_learn_the_same_under_every_strategy(
    fresh_ranks: FreshRanks, reference: Any, way: str, precision: str
) -> None:
    choice = [*overrides_of(way), f"training.precision={precision}"]
    results = fresh_ranks.run(WAYS[way][0], functools.partial(work.train, evaluate=True), CONFIG, choice)
    for result in results:
        assert result["losses"] == pytest.approx(reference["losses"], rel=0.05)
        assert result["metrics"]["loss"] == pytest.approx(reference["metrics"]["loss"], rel=0.05)


# ---------------------------------------------------------------- what cannot be combined


class _OutsideResidual(Ragged):
    """A model that adds a block's input to its output itself: a later stage would not have the input."""

    def build_model(self) -> nn.Module:
        return _Outside(super().build_model())


class _Outside(nn.Module):
    def __init__(self, toy: Any) -> None:
        super().__init__()
        self.embedding, self.layers, self.head = toy.embedding, toy.layers, toy.head

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.embedding(ids)
        for layer in self.layers:
            hidden = hidden + layer(hidden)
        return self.head(hidden)


class _Around(nn.Module):
    """What models do around their blocks, by name."""

    def __init__(self, toy: Any, kind: str) -> None:
        super().__init__()
        self.kind, self.embedding = kind, toy.embedding
        self.condition = nn.Linear(16, 16)
        self.register_buffer("scale", torch.linspace(0.5, 1.5, 16))
        self.layers = nn.ModuleList(_Fed(layer) for layer in toy.layers)
        self.norm, self.head = toy.norm, toy.head

    def forward(self, ids: Tensor) -> Tensor:
        first = self.condition(self.embedding(ids))
        hidden, outputs = first, []
        for layer in [*self.layers, *(self.layers if self.kind == "twice" else [])]:
            extra = {"conditioned": lambda: self.condition(self.embedding(ids)), "fed a buffer": lambda: self.scale}
            hidden = layer(hidden, extra.get(self.kind, lambda: None)(), in_place=self.kind == "in place")
            outputs.append(hidden)
        if self.kind == "skip":
            hidden = hidden + first
        return self.head(self.norm(torch.stack(outputs).sum(0) if self.kind == "all outputs" else hidden))


class _Fed(nn.Module):
    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, hidden: Tensor, extra: Tensor | None, in_place: bool) -> Tensor:
        if in_place:
            hidden *= 0.5
        return self.block(hidden if extra is None else hidden * extra)


class _Conditioned(Ragged):
    kind = "conditioned"

    def build_model(self) -> nn.Module:
        return _Around(super().build_model(), self.kind)


class _Twice(_Conditioned):
    kind = "twice"


class _Skip(_Conditioned):
    kind = "skip"


class _AllOutputs(_Conditioned):
    kind = "all outputs"


class _FedABuffer(_Conditioned):
    kind = "fed a buffer"


class _InPlace(_Conditioned):
    kind = "in place"


@pytest.mark.parametrize("kind", ["_FedABuffer", "_InPlace"])
def test_a_pipeline_takes_blocks_that_are_given_buffers_or_change_their_input(
    fresh_ranks: FreshRanks, kind: str
) -> None:
    text = CONFIG.replace("tests.tasks:Ragged", f"tests.distributed.test_strategies:{kind}")
    train = functools.partial(work.train, evaluate=True)
    one = fresh_ranks.run(1, train, text, ["training.strategy=single", "training.batch_size=12"])[0]
    two = fresh_ranks.run(2, train, text, ["training.pipeline.stages=2", "training.batch_size=3"])
    together = {name: weight for result in two for name, weight in result["weights"].items()}
    assert_same_curve({**two[0], "weights": together}, one)
    assert two[0]["metrics"] == pytest.approx(one["metrics"], rel=1e-5)


def _cut(kind: str, message: str) -> tuple[int, list[str], str]:
    return 2, [f"task=tests.distributed.test_strategies:{kind}", "training.pipeline.schedule=gpipe"], message


REFUSED: dict[str, tuple[int, list[str], str]] = {
    "blocks with something between them": _cut(
        "_OutsideResidual", "block 1 does not take the output of the block before as it is"
    ),
    "blocks conditioned on what is made before them": _cut(
        "_Conditioned", "block 0 also takes what is made of weights"
    ),
    "blocks that are run twice": _cut("_Twice", "does not call its blocks once each and in their order"),
    "a sum of the first and the last": _cut("_Skip", "needs more than the output of the last one"),
    "a sum of all outputs": _cut("_AllOutputs", "needs more than the output of the last one"),
    "more pieces than blocks": (
        2,
        ["training.pipeline.schedule=interleaved", "model.layers=3"],
        "too few for 4 pieces",
    ),
    "fewer micro-batches than stages": (
        2,
        ["training.pipeline.schedule=1f1b", "training.batch_size=12"],
        "set training.gradient_accumulation to 2",
    ),
    "fp16 in a pipeline": (2, ["training.pipeline.stages=2", "training.precision=16-mixed"], "use bf16-mixed"),
    "fp16 in a tensor group": (2, ["training.tensor.size=2", "training.precision=16-mixed"], "use bf16-mixed"),
    "tied weights without a bubble": (
        2,
        ["training.pipeline.schedule=zero_bubble", "training.batch_size=3"],
        "use interleaved",
    ),
    "stages that do not divide the ranks": (
        4,
        ["training.pipeline.stages=3"],
        "training.pipeline.stages: 3 does not go with 4 rank",
    ),
    "a shard size that does not divide the ranks": (
        4,
        ["training.fsdp={sharding_strategy: HYBRID_SHARD, shard_size: 3}"],
        "shard_size: 3 does not divide the 4 ranks",
    ),
    "a compressed pipeline": (
        2,
        ["training.pipeline.stages=2", "training.ddp.comm_hook=fp16"],
        "works under ddp and zero1, not under pipeline",
    ),
    "bf16 gradients over gloo": (2, ["training.ddp.comm_hook=bf16"], "between CPU ranks fp16 does the same"),
    "muon where parameters are sharded": (
        2,
        ["training.optimizer.name=muon", "training.strategy=fsdp"],
        "muon needs whole matrices.* use strategy ddp or zero1",
    ),
    "muon where matrices are split": (
        2,
        ["training.optimizer.name=muon", "training.tensor.size=2"],
        "use strategy ddp",
    ),
    "dp on several ranks": (2, ["training.strategy=dp"], "ddp is for several"),
    "tensor for a task that cannot say": (
        2,
        ["task=tests.distributed.test_strategies:_NoPlan", "training.tensor.size=2"],
        "nearest that works is strategy: fsdp",
    ),
}


class _NoPlan(Ragged):
    def tensor_plan(self, model: nn.Module, ranks: int, sequence_parallel: bool) -> Any:
        return None


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_combined_is_refused_with_the_reason_and_what_works(fresh_ranks: FreshRanks, case: str) -> None:
    size, overrides, message = REFUSED[case]
    with pytest.raises(AssertionError, match=message):
        fresh_ranks.run(size, work.train, CONFIG, ["training.total_batch_size=12", "training.batch_size=3", *overrides])
