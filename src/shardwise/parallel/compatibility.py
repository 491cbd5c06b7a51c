"""What cannot be combined: refused before anything starts, with the reason and the nearest thing that works.

What only the model can tell (too few blocks, weights shared between stages, heads that do not divide) is refused when
it is built.
"""

from __future__ import annotations

from shardwise.config import Training
from shardwise.config.schema import Pipeline
from shardwise.errors import ConfigError
from shardwise.parallel.layout import Layout

FINE = ("interleaved", "zero_bubble")
"""Schedules that have several pieces of the model on a rank."""


def refuse_incompatible(strategy: str, training: Training, layout: Layout, micro_batches: int) -> None:
    ranks, hook = layout.world.size, training.ddp.comm_hook
    if strategy in ("single", "dp") and ranks > 1:
        raise ConfigError(f"strategy: {strategy} is one process, but {ranks} ranks were started; ddp is for several")
    if hook != "none" and strategy not in ("ddp", "zero1"):
        raise ConfigError(f"training.ddp.comm_hook: {hook} works under ddp and zero1, not under {strategy}")
    if hook == "bf16" and layout.world.device.type == "cpu":
        raise ConfigError("training.ddp.comm_hook: bf16 needs NCCL; between CPU ranks fp16 does the same")
    if strategy in ("ddp", "zero1") and training.ddp.static_graph and micro_batches > 1:
        raise ConfigError("training.ddp.static_graph does not go with gradient accumulation (torch 2.13 fails)")
    if strategy in ("pipeline", "tensor") and training.precision == "16-mixed":
        raise ConfigError(
            f"strategy {strategy} does not go with precision 16-mixed: its ranks would each judge on their own whether a "
            "gradient overflowed; use bf16-mixed"
        )
    if training.cuda_graphs is True and (problem := graphs_problem(strategy, micro_batches)):
        raise ConfigError(f"training.cuda_graphs: true does not go with {problem}; auto records where it can be done")
    if strategy == "pipeline" and (training.precision == "fp8-mixed" or training.compile is True):
        asked = "precision: fp8-mixed" if training.precision == "fp8-mixed" else "compile: true"
        raise ConfigError(f"training.{asked} does not go with strategy pipeline yet; fsdp can do it")
    if strategy == "pipeline":
        _refuse_in_pipeline(training, layout.size("stage"), micro_batches)


def graphs_problem(strategy: str, micro_batches: int) -> str | None:
    """What keeps blocks from being recorded as CUDA graphs: exchanges with other ranks are not recorded, and gradients lie where
    the next recording writes, so that nothing can be added to them."""
    if strategy != "single":
        return f"strategy {strategy}"
    return f"gradient accumulation, here over {micro_batches} micro-batches" if micro_batches > 1 else None


def _refuse_in_pipeline(training: Training, stages: int, micro_batches: int) -> None:
    options = training.pipeline or Pipeline()
    if training.fsdp is not None and training.fsdp.cpu_offload:
        raise ConfigError("training.fsdp.cpu_offload does not go with strategy pipeline; fsdp alone can do it")
    if options.schedule == "gpipe":
        return
    rounds = max(1, micro_batches // stages)
    fits = micro_batches % rounds == 0 if options.schedule in FINE else micro_batches >= stages
    if not fits:
        raise ConfigError(
            f"training.pipeline.schedule: {options.schedule} on {stages} stages cannot take {micro_batches} micro-batch(es) per "
            f"step: set training.gradient_accumulation to {stages * max(1, -(-micro_batches // stages))}"
        )
