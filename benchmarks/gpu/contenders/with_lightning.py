"""PyTorch Lightning, under either of its names."""

from __future__ import annotations

import logging
import warnings
from typing import Any

import torch
from torch import nn

from benchmarks.gpu.contenders.meter import Meter
from benchmarks.gpu.contenders.problem import CLIP, DEVICE, Problem


def train(problem: Problem, meter: Meter) -> None:
    lightning = _lightning()

    class Module(lightning.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.model = problem.build()

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            return problem.loss(self.model, batch)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return problem.optimizer(self)

        def configure_gradient_clipping(self, *args: Any, **kwargs: Any) -> None:
            # Its own clipping refuses a fused optimizer under mixed precision (2.6.6), and says to look here.
            nn.utils.clip_grad_norm_(self.parameters(), CLIP)

        def on_train_start(self) -> None:
            meter.ready()

        def on_train_batch_end(self, outputs: Any, batch: Any, index: int) -> None:
            meter.done(outputs["loss"], problem.units(index))

    trainer = lightning.Trainer(
        accelerator="gpu" if DEVICE.type == "cuda" else "cpu", devices=1, precision="bf16-mixed", max_epochs=1,
        gradient_clip_val=CLIP, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False,
    )  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.fit(Module(), problem.loader())


def _lightning() -> Any:
    try:
        import lightning.pytorch as lightning
    except ModuleNotFoundError:
        import pytorch_lightning as lightning
    for name in ("lightning.pytorch", "lightning.fabric", "pytorch_lightning", "lightning_fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    return lightning
