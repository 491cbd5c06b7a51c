"""Networks of MONAI on volumes that lie on the device already: what is compared is the step, not the reading."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import default_collate

from benchmarks.gpu.contenders import by_hand, with_lightning, with_shardwise
from benchmarks.gpu.contenders.meter import Meter
from benchmarks.gpu.contenders.problem import DEVICE, SEED, Contender, Options, Problem, Work, in_order, made
from shardwise import Loss
from shardwise.tasks.segmentation.config import SegmentationData
from shardwise.tasks.segmentation.task import SegmentationTask

CHANNELS, CLASSES = 4, 3
DIFFERENT = 16
"""Volumes in memory."""
Size = tuple[int, int, int]


def segresnet(options: Options) -> Work:
    arguments = {"init_filters": 8} if options.tiny else {"init_filters": 32}
    contenders = []
    for batch in (1, 2) if options.tiny else (2, 8):
        row = _Rows("SegResNet", _size(options), batch, options)
        contenders += [
            row("plain loop", by_hand.train, arguments),
            row("Lightning", with_lightning.train, arguments),
            row.shardwise("shardwise", arguments),
            row("plain loop, torch.compile of the whole network", partial(by_hand.train, compiler=options.compiler), arguments),
        ]  # fmt: skip
    return Work(_title("SegResNet", arguments, _size(options)), "volumes", contenders)


def swin(options: Options) -> Work:
    arguments = {"feature_size": 12} if options.tiny else {"feature_size": 48}
    recomputing = {**arguments, "use_checkpoint": True}
    row = _Rows("SwinUNETR", (64, 32, 32) if options.tiny else _size(options), 1 if options.tiny else 2, options)
    contenders = [
        row("plain loop, use_checkpoint", by_hand.train, recomputing),
        row("plain loop", by_hand.train, arguments),
        row("Lightning, use_checkpoint", with_lightning.train, recomputing),
        row.shardwise("shardwise", arguments),
        row.shardwise("shardwise, use_checkpoint", recomputing),
    ]
    return Work(_title("SwinUNETR", arguments, row.size), "volumes", contenders)


def _size(options: Options) -> Size:
    # Of smaller ones, bf16 convolutions on the CPU give gradients that are now and then no numbers (torch 2.13).
    return (32, 32, 32) if options.tiny else (128, 128, 64)


def _title(network: str, arguments: dict[str, Any], size: Size) -> str:
    sides = "×".join(map(str, size))
    return (
        f"MONAI's {network} {arguments}, {CHANNELS} channels in, {CLASSES} classes out, volumes of {sides} that lie on the "
        "device; fp32 weights, computed in bf16; soft Dice and cross entropy"
    )


class _Rows:
    """Contenders of one network and batch."""

    def __init__(self, network: str, size: Size, batch: int, options: Options) -> None:
        self.network, self.size, self.batch, self.options = network, size, batch, options

    def __call__(self, name: str, train: Callable[[Problem, Meter], None], arguments: dict[str, Any]) -> Contender:
        def run(meter: Meter) -> None:
            problem = Problem(
                build=lambda: made(lambda: _build(self.network, arguments)),
                samples=in_order(_Volumes(meter.plan.total * self.batch, self.size)),
                loss=lambda model, batch: sample_losses(model(batch["image"]), batch["mask"]).mean(),
                batch=self.batch,
                units=lambda step: self.batch,
            )
            train(problem, meter)

        return Contender(name, run, self.batch, self.options.planned())

    def shardwise(self, name: str, arguments: dict[str, Any]) -> Contender:
        def run(meter: Meter) -> None:
            blocks = {
                "task": f"{__name__}:Volumes",
                "data": {
                    "rows": meter.plan.total * self.batch,
                    "size": list(self.size),
                    "classes": CLASSES,
                    "in_channels": CHANNELS,
                    "pin_memory": False,  # they are on the device
                },
                "model": {"name": self.network, "args": arguments},
            }
            training = {"batch_size": self.batch}
            with_shardwise.train(blocks, training, lambda result: result.samples, meter, self.options.overrides)

        return Contender(name, run, self.batch, self.options.planned())


def _build(network: str, arguments: dict[str, Any]) -> nn.Module:
    from monai.networks import nets

    return getattr(nets, network)(spatial_dims=3, in_channels=CHANNELS, out_channels=CLASSES, **arguments)


def sample_losses(logits: Tensor, mask: Tensor) -> Tensor:
    """Soft Dice over the foreground and cross entropy, one number per volume."""
    logits = logits.float()
    chances = logits.softmax(dim=1)[:, 1:].flatten(2)
    truth = F.one_hot(mask, CLASSES).movedim(-1, 1)[:, 1:].flatten(2).float()
    shared = (chances * truth).sum(dim=2)
    dice = 1 - (2 * shared + 1e-5) / (chances.sum(dim=2) + truth.sum(dim=2) + 1e-5)
    voxels = F.cross_entropy(logits, mask, reduction="none")
    return dice.mean(dim=1) + voxels.flatten(1).mean(dim=1)


class _Volumes:
    """A few, used over and over. The truth follows from the image, so that there is something to learn."""

    def __init__(self, number: int, size: Size) -> None:
        self.number = number
        generator = torch.Generator(DEVICE).manual_seed(SEED)
        images = [torch.randn(CHANNELS, *size, device=DEVICE, generator=generator) for _ in range(DIFFERENT)]
        self.pool = [{"image": image, "mask": (image[0] > 0.5).long() + (image[0] > 1.5).long()} for image in images]

    def __len__(self) -> int:
        return self.number

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return self.pool[index % DIFFERENT]


class Volumes(SegmentationTask):
    """shardwise's own task for segmentation, its networks and blocks included, with volumes made here."""

    class Data(SegmentationData):
        rows: int

    def prepare_data(self) -> None:
        pass

    def train_data(self) -> Any:
        x, y, z = self.config.data.size
        return _Volumes(self.config.data.rows, (x, y, z))

    def valid_data(self) -> Any:
        return None

    def build_model(self) -> nn.Module:
        return made(super().build_model)

    def collate(self, samples: list[Any]) -> Any:
        return default_collate(samples)

    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> Loss:
        losses = sample_losses(model(batch["image"]), batch["mask"])
        return Loss(losses.sum(), len(losses))
