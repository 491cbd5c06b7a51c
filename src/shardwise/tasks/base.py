"""The Task protocol: what somebody writes to train something new."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.utils.data import default_collate

from shardwise.config import Block, Config, DataBlock
from shardwise.data import BatchedSamples, SampleContents, Samples
from shardwise.data.fingerprint import contents_of_any


@dataclass(frozen=True)
class Loss:
    """A sum and a count, never a mean: only the engine divides, once, over all ranks and micro-batches."""

    sum: Tensor
    count: int | Tensor


@dataclass(frozen=True)
class Rows:
    """Results of single samples, to be looked at together: every rank's are brought to rank 0 and put in order."""

    keys: Tensor
    """Which samples: the order of the rows, on any number of ranks."""
    columns: dict[str, Tensor]
    """One row per key in each."""


class Task(ABC):
    """Three methods are needed: train_data, build_model, loss. The rest have defaults that suit most tasks."""

    Data: type[DataBlock] = DataBlock
    """The model of the config's `data` block; subclass shardwise.DataBlock to add keys of your own."""
    Tokenizer: type[Block] = Block
    Model: type[Block] = Block
    may_count_nothing: bool = False
    """Whether `count` may be 0 for a whole global batch. It then changes nothing; otherwise it is an error."""
    narrow_weights: bool = False
    """Whether its models may compute with narrow copies of the weights (training.narrow_weights: auto): nothing of theirs but
    the optimizer changes a weight, and no operation of theirs minds its type."""
    one_size: bool = False
    """Whether all samples of training have one size: what is compiled is compiled for that size then, and may be recorded as
    CUDA graphs (training.cuda_graphs)."""
    loss_is_a_sum: bool = True
    """Whether the loss of a micro-batch is the sum of those of its samples: engine/loss_check.py asks before the first step.
    False: it looks at the batch as a whole, as a contrastive one does (shardwise.gather_batch), and accumulation makes it another
    loss."""
    unit: str = "samples"
    """What `count` counts, for the log: samples, tokens, voxels."""
    trained_labels: Sequence[str] = ()
    """What `labels` gave when the checkpoint was written that is exported now."""

    def __init__(self, config: Config) -> None:
        # Any, because the blocks `data`, `tokenizer` and `model` are of the task's own types.
        self.config: Any = config

    def prepare_data(self) -> None:  # noqa: B027
        """Make or check files. One process per machine does so, before any rank calls train_data; an error here is
        told on every rank. Default: nothing."""

    @abstractmethod
    def train_data(self) -> Samples | BatchedSamples:
        """A data set with a length; sample i is the same on every rank."""

    @abstractmethod
    def build_model(self) -> nn.Module:
        """The model, on the device that is current. Called with the seed set; may be called on the meta device."""

    @abstractmethod
    def loss(self, model: nn.Module, batch: Any) -> Loss:
        """The loss of a micro-batch, summed; its count must equal `count(batch)`."""

    def valid_data(self) -> Samples | BatchedSamples | None:
        """A data set to evaluate on; none of its samples may be in the training data."""
        return None

    def sample_contents(self, train: Any, valid: Any) -> SampleContents | None:
        """What tells the samples apart, to find those that are in both parts; asked once per run, on rank 0. None: they are not
        compared. Default: places in one data set that both are taken from, else what some of the samples hold. A class that
        overrides `train_data` or `valid_data` below it gets the default."""
        return contents_of_any(train, valid, seed=self.config.seed)

    def labels(self) -> list[str]:
        """What the model's outputs stand for, in their order, where the data have decided it. It is kept in every checkpoint:
        a run does not go on with others, and they are exported (`trained_labels`). Default: nothing."""
        return []

    def collate(self, samples: list[Any]) -> Any:
        return default_collate(samples)

    def count(self, batch: Any) -> int:
        """What the loss of this batch is divided by, known before the forward pass. Default: the batch size."""
        return leading_size(batch)

    def evaluate(self, model: nn.Module, batch: Any) -> Mapping[str, Loss | Rows]:
        """Metrics of a batch, each a sum and a count; or rows for `study`. Every rank calls it equally often."""
        return {"loss": self.loss(model, batch)}

    def study(self, rows: dict[str, Rows], pictures: Path, step: int) -> dict[str, float]:
        """Metrics that need the rows of all samples at once, and pictures of them. Called on rank 0."""
        return {}

    def derived_metrics(self, metrics: dict[str, float]) -> dict[str, float]:
        """Metrics that follow from the averaged ones, such as perplexity."""
        return {}

    def metric_names(self) -> Collection[str]:
        """Every name that an evaluation may have, so that training.monitor is checked before a run. Asked after prepare_data.
        A class that overrides `evaluate`, `study` or `derived_metrics` below it is not held to them."""
        return ("loss",)

    def blocks(self, model: nn.Module) -> list[nn.Module]:
        """The repeated blocks: units of sharding and of activation checkpointing. Every rank must call each of them in every
        forward pass: of experts, the layers that hold them. Default: the longest ModuleList that is in no element of another."""
        lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
        lists = [each for each in lists if not any(isinstance(element, nn.ModuleList) for element in each)]
        within = {inner for each in lists for element in each for inner in element.modules()}
        return max((list(each) for each in lists if each not in within), key=len, default=[])

    def regions(self, model: nn.Module) -> list[nn.Module]:
        """What torch.compile takes, each on its own. Default: the blocks. Where the model is sharded, the blocks as well if one
        of these is larger than a block."""
        return self.blocks(model)

    def tensor_plan(self, model: nn.Module, ranks: int, sequence_parallel: bool) -> Mapping[str, Any] | None:
        """How strategy tensor splits the matrices over `ranks`: by name of module, a style of
        torch.distributed.tensor.parallel. None: this task cannot say, and the strategy is refused."""
        return None

    def flops_per_count(self, model: nn.Module) -> float | None:
        """Floating-point operations of a training step per counted unit, for MFU; None when no formula is known."""
        return None

    def export(self, model: nn.Module, folder: Path) -> None:
        """Write a trained model for use elsewhere. Default: one safetensors file."""
        from safetensors.torch import save_model

        save_model(model, str(folder / "model.safetensors"))


def leading_size(batch: Any) -> int:
    if isinstance(batch, Tensor):
        return batch.shape[0]
    if isinstance(batch, Mapping):
        return leading_size(next(iter(batch.values())))
    if isinstance(batch, Sequence) and batch:
        return leading_size(batch[0])
    raise TypeError(f"cannot tell the size of a batch of type {type(batch).__name__}: write the task's count(batch)")


def overridden_below(task: Task, method: str, others: Iterable[str]) -> bool:
    """Whether a class below the one that defines `method` defines one of the others, of which `method` then knows nothing."""
    place = {
        name: next(place for place, each in enumerate(type(task).__mro__) if name in vars(each))
        for name in (method, *others)
    }
    return any(place[name] < place[method] for name in others)
