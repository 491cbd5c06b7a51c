"""The Trainer of Hugging Face Transformers."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn
from torch.utils.data import SequentialSampler

from benchmarks.gpu.contenders.meter import Meter
from benchmarks.gpu.contenders.problem import CLIP, DEVICE, LEARNING_RATE, SEED, WEIGHT_DECAY


def train(
    build: Callable[[], nn.Module],
    samples: Sequence[dict[str, Any]],
    batch: int,
    units: Callable[[int], float],
    meter: Meter,
    *,
    collate: Any = None,
    **arguments: Any,
) -> None:
    """`collate`: one of its own collators. `arguments`: of TrainingArguments."""
    from transformers import PrinterCallback, Trainer, TrainerCallback, TrainingArguments, default_data_collator

    losses: list[Any] = []

    class InOrder(Trainer):  # type: ignore[misc]
        """Takes the samples as they come, and keeps the losses, which it tells no callback."""

        def _get_train_sampler(self, *args: Any, **kwargs: Any) -> SequentialSampler:
            return SequentialSampler(samples)

        def training_step(self, *args: Any, **kwargs: Any) -> Any:
            losses.append(super().training_step(*args, **kwargs))
            return losses[-1]

    class Clock(TrainerCallback):  # type: ignore[misc]
        def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
            meter.ready()

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            meter.done(losses[-1], units(len(losses) - 1))

    with tempfile.TemporaryDirectory() as folder:
        settings = TrainingArguments(
            output_dir=folder, per_device_train_batch_size=batch, max_steps=meter.plan.total, bf16=True,
            use_cpu=DEVICE.type == "cpu", optim="adamw_torch_fused", learning_rate=LEARNING_RATE, weight_decay=WEIGHT_DECAY,
            max_grad_norm=CLIP, lr_scheduler_type="constant", logging_strategy="no", save_strategy="no",
            report_to="none", disable_tqdm=True, dataloader_num_workers=0, remove_unused_columns=False, seed=SEED, **arguments,
        )  # fmt: skip
        trainer = InOrder(
            model=build(),
            args=settings,
            train_dataset=samples,
            data_collator=collate or default_data_collator,
            callbacks=[Clock()],
        )
        trainer.remove_callback(PrinterCallback)
        trainer.train()
