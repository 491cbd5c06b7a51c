"""A small vision transformer on images that lie on the device already: a step with little work, so that the host is the limit."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import default_collate

from benchmarks.gpu.contenders import by_hand, with_accelerate, with_lightning, with_shardwise
from benchmarks.gpu.contenders.meter import Meter
from benchmarks.gpu.contenders.problem import DEVICE, SEED, Contender, Options, Problem, Work, in_order, made
from shardwise.tasks.images.config import ImagesData, ImagesModel
from shardwise.tasks.images.model import build_classifier
from shardwise.tasks.images.task import ImagesTask

CLASSES = 1000
DIFFERENT = 512
"""Images in memory."""


def vit(options: Options) -> Work:
    architecture, size, batch = ("vit-ti16", 32, 2) if options.tiny else ("vit-s16", 224, 32)
    model = {"architecture": architecture, "channels_last": False} | ({"num_layers": 2} if options.tiny else {})
    plan = options.planned()

    def other(train: Callable[[Problem, Meter], None]) -> Callable[[Meter], None]:
        def run(meter: Meter) -> None:
            problem = Problem(
                build=lambda: made(lambda: build_classifier(ImagesModel(**model), _classes(), size)),
                samples=in_order(_Pictures(plan.total * batch, size)),
                loss=lambda network, images: F.cross_entropy(
                    network(pixel_values=images["pixels"]).logits.float(), images["labels"]
                ),
                batch=batch,
                units=lambda step: batch,
            )
            train(problem, meter)

        return run

    def shardwise(**training: Any) -> Callable[[Meter], None]:
        def run(meter: Meter) -> None:
            blocks = {
                "task": f"{__name__}:Pictures",
                "data": {"rows": plan.total * batch, "image_size": size, "pin_memory": False},
                "model": model,
            }
            settings = {"batch_size": batch, **training}
            with_shardwise.train(blocks, settings, lambda result: result.samples, meter, options.overrides)

        return run

    graphs = "auto" if DEVICE.type == "cpu" else True  # auto is that in runs that are long enough
    contenders = [
        Contender(name, run, batch, plan)
        for name, run in {
            "plain loop": other(by_hand.train),
            "Accelerate": other(with_accelerate.train),
            "Lightning": other(with_lightning.train),
            "plain loop, torch.compile of the whole model": other(partial(by_hand.train, compiler=options.compiler)),
            "the same, mode reduce-overhead": other(partial(by_hand.train, compiler=options.compiler, graphs=True)),
            "shardwise, cuda_graphs false": shardwise(cuda_graphs=False),
            "shardwise": shardwise(cuda_graphs=graphs),
        }.items()
    ]
    title = (
        f"Transformers' {architecture}, images of {size}×{size} that lie on the device, {CLASSES} classes; fp32 weights, "
        "computed in bf16"
    )
    return Work(title, "images", contenders)


def _classes() -> list[str]:
    return [str(number) for number in range(CLASSES)]


class _Pictures:
    """Noise whose class is drawn too, used over and over."""

    def __init__(self, number: int, size: int) -> None:
        self.number = number
        generator = torch.Generator(DEVICE).manual_seed(SEED)
        self.pixels = torch.randn(DIFFERENT, 3, size, size, device=DEVICE, generator=generator)
        self.labels = torch.randint(0, CLASSES, (DIFFERENT,), device=DEVICE, generator=generator)

    def __len__(self) -> int:
        return self.number

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"pixels": self.pixels[index % DIFFERENT], "labels": self.labels[index % DIFFERENT]}


class Pictures(ImagesTask):
    """shardwise's own task for images, with images made here."""

    class Data(ImagesData):
        rows: int

    def prepare_data(self) -> None:
        pass

    def train_data(self) -> Any:
        return _Pictures(self.config.data.rows, self.config.data.image_size)

    def valid_data(self) -> Any:
        return None

    def build_model(self) -> nn.Module:
        return made(lambda: build_classifier(self.config.model, _classes(), self.look.size))

    def collate(self, samples: list[Any]) -> Any:
        return default_collate(samples)

    def _logits(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return model(pixel_values=batch["pixels"]).logits  # type: ignore[no-any-return]
