"""Blocks recorded as CUDA graphs train what they train without."""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shardwise import Loss, Task
from shardwise.engine.graphs import WATCHED
from shardwise.engine.session import Session
from shardwise.errors import ShardwiseError
from tests.distributed import work
from tests.distributed.pool import RankPool
from tests.images_task.made import RESNET, VIT

pytestmark = pytest.mark.gpu

GPU = ["training.device=cuda", "training.strategy=single", "training.precision=bf16-mixed", "training.compile=true"]
LAYERS = """
task: tests.gpu.test_graphs:Layers
training: {batch_size: 32, gradient_clip: 1.0, max_epochs: 40, log_every_n_steps: 10, optimizer: {lr: 0.001}}
"""


class Layers(Task):
    """So little work per block that the device waits for the host. Dropout and running statistics are in it."""

    one_size = True

    def train_data(self) -> Any:
        # Three batches and a short one per epoch.
        rows = torch.randn(100, 64, generator=torch.Generator().manual_seed(0))
        return [{"x": row, "y": (row > 0).long()} for row in rows]

    def valid_data(self) -> Any:
        return self.train_data()[:10]

    def build_model(self) -> nn.Module:
        blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.GELU(), nn.Dropout(0.1)) for _ in range(24)
        )
        return nn.ModuleDict({"blocks": blocks, "head": nn.Linear(64, 2 * 64)})

    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> Loss:
        hidden = batch["x"]
        for block in model["blocks"]:  # type: ignore[index]
            hidden = hidden + block(hidden)
        logits = model["head"](hidden).view(-1, 2, 64)  # type: ignore[index]
        losses = F.cross_entropy(logits.float(), batch["y"], reduction="none").mean(dim=1)
        return Loss(losses.sum(), len(losses))


class NotANumber(Layers):
    def train_data(self) -> Any:
        samples = super().train_data()
        samples[7]["x"][3] = float("nan")
        return samples


@pytest.mark.parametrize("narrow", ["false", "true"])
@pytest.mark.parametrize("text", [LAYERS, VIT, RESNET], ids=["layers", "vit", "resnet"])
def test_what_is_recorded_trains_as_what_is_compiled(ranks: RankPool, text: str, narrow: str) -> None:
    """To the bit, dropout and running statistics included: it is the same kernels on the same numbers."""
    job = functools.partial(work.train, steps=12)
    options = [*GPU, "training.max_epochs=12", f"training.narrow_weights={narrow}"]
    compiled = ranks.run(1, job, text, [*options, "training.cuda_graphs=false"])[0]
    recorded = ranks.run(1, job, text, [*options, "training.cuda_graphs=true"])[0]
    assert recorded["losses"] == compiled["losses"]
    assert recorded["norms"] == compiled["norms"]
    for name, weight in compiled["weights"].items():
        assert torch.equal(recorded["weights"][name], weight), name


def test_a_run_in_which_the_gpu_waits_is_recorded_and_says_so(ranks: RankPool, tmp_path: Path) -> None:
    found = ranks.run(1, work.run_fit, LAYERS, [*GPU, "training.eval_every_n_steps=50"], str(tmp_path))[0]
    lines = [line for line in found["output"].splitlines() if "CUDA graphs" in line]
    assert len(lines) == 1
    step = re.search(r"step (\d+): the GPU waits for the host in \d+% of the steps", lines[0])
    assert step and WATCHED < int(step[1]) <= 3 * WATCHED
    assert found["steps"] == 160 and found["after"]["loss"] < found["before"]["loss"]


def test_resumed_it_goes_on_as_if_nothing_had_been(ranks: RankPool, tmp_path: Path) -> None:
    options = [*GPU, "training.max_epochs=5", "training.cuda_graphs=true", *work.folder_of(tmp_path)]
    work.resumed_bit_for_bit(ranks, 1, LAYERS, options, steps=9)


def test_the_samples_to_blame_are_known(ranks: RankPool, tmp_path: Path) -> None:
    text = LAYERS.replace("Layers", "NotANumber")
    options = [*GPU, "training.batch_size=8", "training.cuda_graphs=true", *work.folder_of(tmp_path)]
    said = ranks.run(1, work.with_session, text, options, _until_it_stops)[0]
    assert re.search(r"\b7\b", said), said


def _until_it_stops(session: Session) -> str:
    try:
        for batch in session.batches():
            session.step(batch)
    except ShardwiseError as error:
        return str(error)
    return "nothing"
