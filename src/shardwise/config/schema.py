"""The keys of a config file, each with its help text, type, default and bounds.

`task` decides which models describe the blocks `data`, `tokenizer` and `model`; everything under `training`
is the same for every task.
"""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    PlainValidator,
    PrivateAttr,
    SerializeAsAny,
    WithJsonSchema,
    model_validator,
)
from pydantic_core import PydanticCustomError

from shardwise.config.commands import ConfigSource
from shardwise.config.registry import ALONE, BUILT_IN, TOGETHER, Group, known, lookup, nearest

Precision = Literal["32-true", "bf16-mixed", "16-mixed", "bf16-true", "fp8-mixed"]


class Block(BaseModel):
    """One block of the config: unknown keys are errors, values are not coerced, nothing changes after loading."""

    model_config = ConfigDict(
        extra="forbid",
        strict=True,
        frozen=True,
        validate_default=True,
        allow_inf_nan=False,
        protected_namespaces=(),
    )


def _registered(group: Group, *more: str) -> Any:
    """The type of a name that the registry knows. Checked by name alone: what it stands for is imported when it is used."""

    def check(name: Any) -> str:
        if isinstance(name, str) and (name in more or lookup(group, name)):
            return name
        names = [*known(group), *more]
        near = nearest(name, names)
        hint = f" (nearest: {near})" if near else ""
        raise PydanticCustomError("unknown_name", "Allowed: {names}{near}", {"names": ", ".join(names), "near": hint})

    # Examples and not an enumeration: editors offer them, and take the names of other packages as well.
    schema = {"type": "string", "examples": [*BUILT_IN[group], *more]}
    return Annotated[str, PlainValidator(check), WithJsonSchema(schema)]


if TYPE_CHECKING:
    Logger = str
    Strategy = str
    OptimizerName = str
else:
    Logger = _registered("shardwise.trackers", "none")
    Strategy = _registered("shardwise.strategies")
    OptimizerName = _registered("shardwise.optimizers")


def _expanded(path: str) -> str:
    """With the home folder for ~, and the values of the environment's variables."""

    def value(found: re.Match[str]) -> str:
        name = found[1] or found[2]
        if not os.environ.get(name):
            raise PydanticCustomError("unset_variable", "the environment variable {name} is not set", {"name": name})
        return os.environ[name]

    # Not Path.expanduser, which drops a slash at the end, and ./ at the beginning.
    return os.path.expanduser(re.sub(r"\$(?:([A-Za-z_]\w*)|\{([A-Za-z_]\w*)\})", value, path))  # noqa: PTH111


PathText = Annotated[str, AfterValidator(_expanded)]
"""The type of a key that is a path, or may be one: ~, $NAME and ${NAME} in it are replaced."""


def hub_name(kind: Literal["model", "dataset"]) -> dict[str, Any]:
    """Marks a field as a name on the Hugging Face hub: json_schema_extra=hub_name("model"). `shardwise fetch` downloads it."""
    return {"hub": kind}


class DataBlock(Block):
    """What every task's `data` block has: how samples are loaded, not what they are."""

    num_workers: int = Field(0, ge=0, le=256, description="Loader processes per rank; 0 loads in the rank itself.")
    prefetch_factor: int = Field(2, ge=1, le=64, description="Micro-batches that each worker keeps ready.")
    pin_memory: bool | None = Field(None, description="Page-locked host memory for faster copies; default: on CUDA.")
    allow_shared_samples: bool = Field(
        False,
        description="Train although samples to validate on are in the training data as well: told as a warning then.",
    )


class Optimizer(Block):
    name: OptimizerName = Field("adamw", description="Which optimizer.")
    lr: float = Field(1e-3, gt=0, description="Peak learning rate, before `lr_scaling`.")
    weight_decay: float = Field(0.01, ge=0, description="Not applied to norms and biases.")
    betas: list[float] = Field(
        [0.9, 0.999], min_length=2, max_length=2, description="adam, adamw and the adamw of muon."
    )
    eps: float = Field(1e-8, gt=0, description="adam, adamw and the adamw of muon.")
    momentum: float = Field(0.0, ge=0, lt=1, description="sgd only.")
    muon_momentum: float = Field(0.95, ge=0, lt=1, description="muon only: of its matrices.")

    @model_validator(mode="after")
    def _betas_below_one(self) -> Optimizer:
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"betas must lie in [0, 1), not {self.betas}")
        return self


class Scheduler(Block):
    name: Literal["cosine_warmup", "linear_warmup", "constant"] = Field(
        "cosine_warmup", description="Shape after the warmup: half a cosine, a straight line, or flat."
    )
    warmup_steps: int | None = Field(None, ge=0, description="Steps of linear warmup; the first is above zero.")
    warmup_ratio: float | None = Field(None, ge=0, lt=1, description="Warmup as a share of all steps instead.")
    total_steps: int | None = Field(None, ge=1, description="Where the decay ends; default: the end of the run.")
    min_lr_ratio: float = Field(0.0, ge=0, le=1, description="The rate at the end, as a share of the peak.")

    @model_validator(mode="after")
    def _one_warmup(self) -> Scheduler:
        if self.warmup_steps is not None and self.warmup_ratio is not None:
            raise ValueError("warmup_steps and warmup_ratio are two ways to say one thing: give one of them")
        if self.total_steps is not None and (self.warmup_steps or 0) >= self.total_steps:
            raise ValueError(f"warmup_steps {self.warmup_steps} must be below total_steps {self.total_steps}")
        return self


class Ddp(Block):
    bucket_cap_mb: float = Field(25.0, gt=0, description="Gradients are reduced in buckets of about this size.")
    find_unused_parameters: bool = Field(
        False, description="Some parameters get no gradient in some steps; costs a walk over the graph per step."
    )
    static_graph: bool = Field(False, description="The same parameters are used in every step; lets DDP do less.")
    gradient_as_bucket_view: bool = Field(
        True, description="Gradients live in the buckets they are reduced in; saves one copy of them."
    )
    comm_hook: Literal["none", "fp16", "bf16", "powersgd"] = Field(
        "none",
        description="Gradients travel in fewer bits, or, powersgd, as matrices of low rank. Changes the numbers.",
    )
    powersgd_rank: int = Field(2, ge=1, description="Rank of powersgd's matrices: more is closer and larger.")
    powersgd_warmup_steps: int = Field(
        10, ge=2, description="Steps before powersgd sets in; until then gradients travel whole."
    )


class Fsdp(Block):
    sharding_strategy: Literal["FULL_SHARD", "SHARD_GRAD_OP", "HYBRID_SHARD", "NO_SHARD"] = Field(
        "FULL_SHARD",
        description="FULL_SHARD: parameters, gradients and optimizer state over all ranks. SHARD_GRAD_OP: the same, but a "
        "block stays gathered between forward and backward. HYBRID_SHARD: sharded within groups of `shard_size`, replicated "
        "across them. NO_SHARD: replicated, as ddp does.",
    )
    shard_size: int | None = Field(
        None, ge=1, description="HYBRID_SHARD: ranks that share one copy; default: those of a machine."
    )
    cpu_offload: bool = Field(
        False, description="Parameters, gradients and optimizer state stay in host memory, and the update runs there."
    )
    activation_checkpointing: bool | Literal["selective"] = Field(
        False,
        description="Recompute each block in the backward pass instead of keeping its activations; selective: see `selective`.",
    )
    selective: Annotated[int, Field(ge=2)] | Literal["operations"] = Field(
        2,
        description="activation_checkpointing: selective recomputes every n-th block, or all operations but matrix products "
        "and attention.",
    )
    min_num_params: int = Field(
        0, ge=0, description="A block below this many parameters joins the unit around it instead of being its own."
    )
    reduce_in: Literal["fp32", "compute"] = Field(
        "fp32", description="Type in which gradients are added up over the ranks: fp32, or that of the arithmetic."
    )
    prefetch: int = Field(
        1, ge=1, le=16, description="Blocks gathered ahead of the one that computes; each costs its size in memory."
    )
    reduce_every_micro_batch: bool = Field(
        False,
        description="With accumulation: reduce after every micro-batch, so that no rank keeps whole gradients; default: on "
        "the last, which sends less and keeps gradients of the whole model per rank in between.",
    )

    @model_validator(mode="after")
    def _consistent(self) -> Fsdp:
        if self.shard_size is not None and self.sharding_strategy != "HYBRID_SHARD":
            raise ValueError(f"shard_size belongs to HYBRID_SHARD, not {self.sharding_strategy}")
        return self


class Pipeline(Block):
    """The micro-batches in the pipe are those of `gradient_accumulation`."""

    stages: int | None = Field(
        None, ge=2, description="Ranks that one copy of the model is cut into; default: all of them."
    )
    schedule: Literal["gpipe", "1f1b", "interleaved", "zero_bubble"] = Field(
        "1f1b",
        description="Who computes when. gpipe keeps all micro-batches' activations, 1f1b few; interleaved cuts the model finer "
        "and idles less; zero_bubble also puts off weight gradients to fill the gaps.",
    )
    pieces_per_rank: int = Field(
        2, ge=2, le=16, description="interleaved and zero_bubble: pieces of the model on each rank."
    )
    balance: Literal["parameters", "time"] = Field(
        "parameters", description="The stages are cut to equal numbers of parameters, or to equal measured time."
    )


class Tensor(Block):
    size: int | None = Field(
        None,
        ge=2,
        description="Ranks that share every matrix; default: those of a machine. The others shard as fsdp does.",
    )
    sequence_parallel: bool = Field(
        False, description="Norms and dropout work on a part of the sequence each, which saves activations."
    )


class Training(Block):
    strategy: Strategy | None = Field(
        None,
        description="How the model is spread. Default: what its block is there for, ddp on several devices, else single.",
    )
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="auto takes CUDA where there is one.")
    num_gpus: int | None = Field(
        None,
        ge=1,
        description="Devices in total, over all machines. Default: every local device; without a GPU, two CPU ranks.",
    )
    num_nodes: int = Field(1, ge=1, description="Machines that `num_gpus` is spread over.")
    precision: Precision = Field(
        "32-true",
        description="Type of the arithmetic; -mixed keeps fp32 weights, bf16-true does not. fp8-mixed: bf16-mixed with the "
        "matrix products of the blocks in eight bits, on Hopper GPUs and newer.",
    )
    narrow_weights: bool | Literal["auto"] = Field(
        "auto",
        description="Under -mixed, cast the weights once per step instead of at every use, under single, ddp and zero1 (fsdp "
        "always does). auto: for the tasks chess and cells; a task of your own says so with `narrow_weights = True`.",
    )
    compile: bool | Literal["auto"] = Field(
        "auto",
        description="Compile the model's repeated blocks with torch.compile: faster steps, after up to a minute. auto: on CUDA, "
        "in runs of 200 steps and more.",
    )
    cuda_graphs: bool | Literal["auto"] = Field(
        "auto",
        description="Record the compiled blocks as CUDA graphs and replay them: faster where a step has little work, for some "
        "memory. On one device, without accumulation, in tasks whose samples have one size. auto: when the GPU is seen waiting.",
    )
    batch_size: Annotated[int, Field(ge=1)] | Literal["auto"] = Field(
        8, description="Samples per device and micro-batch; auto finds the largest that fits, before training begins."
    )
    gradient_accumulation: int | None = Field(None, ge=1, description="Micro-batches per step; default 1.")
    total_batch_size: int | None = Field(
        None,
        ge=1,
        description="Samples per step over all devices, instead of gradient_accumulation; must divide evenly.",
    )
    lr_scaling: Literal["none", "linear"] = Field(
        "none", description="linear multiplies the rate by the effective batch size over base_batch_size."
    )
    base_batch_size: int | None = Field(None, ge=1, description="The batch size that optimizer.lr was chosen for.")
    gradient_clip: float | None = Field(None, gt=0, description="Largest global gradient norm; default: no clipping.")
    max_epochs: int = Field(1, ge=1, description="Passes over the training data.")
    max_steps: int | None = Field(None, ge=1, description="Stop after this many steps even if epochs are left.")
    on_nonfinite: Literal["stop", "skip", "rollback"] = Field(
        "stop",
        description="A loss or gradient that is no number ends the run; skip leaves out the steps whose gradient is none; "
        "rollback goes back to the last checkpoint and leaves that global batch out.",
    )
    hang_timeout: float = Field(
        600.0,
        gt=0,
        description="Seconds without a sign of life from a rank after which the run says who waits for whom.",
    )
    on_hang: Literal["restart", "stop"] = Field(
        "restart", description="What follows: the ranks start again from the last checkpoint, or the run ends."
    )
    on_spike: Literal["ignore", "stop", "skip", "rollback"] = Field(
        "ignore",
        description="The same for a loss far above those of the last 100 steps. Costs one small all-reduce per step.",
    )
    spike_factor: float = Field(
        10.0,
        gt=0,
        description="A spike is a loss above the median of the last 100 steps by this many times their median deviation.",
    )
    max_rollbacks: int = Field(3, ge=1, description="Rollbacks of a run, in all, before it stops.")
    sync_batch_norm: bool | None = Field(
        None,
        description="Batch norm takes its statistics over all ranks; needs CUDA. Default: on CUDA with several ranks.",
    )
    optimizer: Optimizer = Field(default_factory=Optimizer, description="The update rule.")
    scheduler: Scheduler = Field(default_factory=Scheduler, description="The learning rate over the steps.")
    ddp: Ddp = Field(
        default_factory=Ddp, description="Settings of ddp, of zero1, and of pipelines without an fsdp block."
    )
    fsdp: Fsdp | None = Field(
        None,
        description="Settings of strategy fsdp; its presence selects it. With pipeline or tensor: how each part is sharded.",
    )
    pipeline: Pipeline | None = Field(None, description="Settings of strategy pipeline; its presence selects it.")
    tensor: Tensor | None = Field(None, description="Settings of strategy tensor; its presence selects it.")
    eval_every_n_steps: int | None = Field(None, ge=1, description="Default: at the end of each epoch.")
    eval_at_start: bool = Field(True, description="Evaluate before the first step, to have something to compare with.")
    log_every_n_steps: int = Field(10, ge=1, description="Steps between two lines of the log.")
    logger: Logger | list[Logger] = Field(
        "none", description="Trackers beside metrics.jsonl: these, or those of installed packages, by name."
    )
    wandb_project: str = Field("shardwise", min_length=1, description="W&B project name.")
    checkpoint_dir: PathText | None = Field(None, description="Default: checkpoints/ in the run folder.")
    checkpoint_every_n_steps: int | None = Field(None, ge=1, description="Default: at the end of each epoch.")
    async_checkpoint: bool = Field(
        True, description="Write checkpoints while training goes on: it stands still for a copy in memory only."
    )
    keep_last: int = Field(
        2, ge=1, description="Newest checkpoints to keep: where the last is damaged, a run goes on from the one before."
    )
    save_top_k: int = Field(1, ge=0, description="Best checkpoints to keep, besides the newest.")
    monitor: str = Field("loss", min_length=1, description="The evaluation metric that decides what is best.")
    monitor_mode: Literal["min", "max"] = Field("min", description="Whether less or more of it is better.")

    @model_validator(mode="after")
    def _consistent(self) -> Training:
        if self.gradient_accumulation is not None and self.total_batch_size is not None:
            raise ValueError(
                "gradient_accumulation and total_batch_size are two ways to say one thing: give one of them"
            )
        if self.lr_scaling == "linear" and self.base_batch_size is None:
            raise ValueError(
                "lr_scaling: linear needs base_batch_size, the batch size that optimizer.lr was chosen for"
            )
        if self.pipeline is not None and self.tensor is not None:
            raise ValueError(
                "pipeline and tensor together are not built; the nearest that works is tensor with an fsdp block, or pipeline "
                "with one"
            )
        for name in ("fsdp", "pipeline", "tensor"):
            fits = (None, "fsdp", "pipeline", "tensor") if name == "fsdp" else (None, name)
            if getattr(self, name) is not None and self.strategy not in fits:
                raise ValueError(f"strategy: {self.strategy} contradicts the {name} block: leave one of them out")
        if self.strategy == "single" and (self.num_gpus or 1) > 1:
            raise ValueError(f"strategy: single runs on one device, but num_gpus is {self.num_gpus}")
        if self.num_gpus is not None and self.num_gpus % self.num_nodes:
            raise ValueError(
                f"num_gpus is the total over all machines: {self.num_gpus} cannot be spread evenly over "
                f"num_nodes: {self.num_nodes}"
            )
        return self

    @property
    def watches_loss(self) -> bool:
        """Whether the loss of all ranks must be known before the update. Otherwise a bad loss is told at the next step."""
        return self.on_spike != "ignore" or self.on_nonfinite == "rollback"

    @property
    def may_skip(self) -> bool:
        """Steps whose numbers are bad may be left out."""
        return "skip" in (self.on_spike, self.on_nonfinite)

    @property
    def may_roll_back(self) -> bool:
        return "rollback" in (self.on_spike, self.on_nonfinite)

    @property
    def loggers(self) -> list[str]:
        names = self.logger if isinstance(self.logger, list) else [self.logger]
        return [name for name in names if name != "none"]


class Config(Block):
    """A whole config file. `task` chooses the models of the blocks `data`, `tokenizer` and `model`."""

    task: str = Field(
        description="chess, cells, segmentation, images, the name of an installed package's task, or the import path of your "
        "own: mypackage.tasks:MyTask."
    )
    name: str = Field("run", min_length=1, description="Name of the run; default: the file's name.")
    run_dir: PathText | None = Field(None, description="Folder of the run; default: runs/<name>.")
    seed: int = Field(0, ge=0, lt=2**31, description="Everything random follows from it.")
    offline: bool = Field(False, description="Models and data sets of the hub are taken from fetch_dir, never the net.")
    fetch_dir: PathText = Field("fetched", min_length=1, description="Where `shardwise fetch` puts them.")
    data: SerializeAsAny[DataBlock] = Field(default_factory=DataBlock, description="What is trained on.")
    tokenizer: SerializeAsAny[Block] = Field(default_factory=Block, description="How samples become numbers.")
    model: SerializeAsAny[Block] = Field(default_factory=Block, description="What is trained.")
    training: Training = Field(default_factory=Training, description="How it is trained; the same for every task.")
    _source: ConfigSource | None = PrivateAttr(None)

    @property
    def source(self) -> ConfigSource | None:
        """The file and the overrides that it was read from; None: it was made otherwise."""
        return self._source

    def read_from(self, source: ConfigSource | None) -> Self:
        self._source = source
        return self

    @property
    def run_folder(self) -> str:
        return self.run_dir or f"runs/{self.name}"

    @property
    def checkpoint_folder(self) -> str:
        return self.training.checkpoint_dir or f"{self.run_folder}/checkpoints"

    def on_one_device(self) -> Config:
        """The same training without other ranks."""
        alone = {"num_gpus": None, "num_nodes": 1, "strategy": ALONE, "total_batch_size": None}
        training = self.training.model_copy(update=alone | dict.fromkeys(("fsdp", "pipeline", "tensor")))
        return self.model_copy(update={"training": training})

    def strategy_on(self, world: int) -> str:
        """The strategy for this many ranks: the one asked for, or the plainest that does it."""
        training = self.training
        if training.strategy is not None:
            return training.strategy
        if training.pipeline is not None:
            return "pipeline"
        if training.tensor is not None:
            return "tensor"
        if training.fsdp is not None:
            return "fsdp"
        return ALONE if world == 1 else TOGETHER
