"""The four tasks under the strategies that take a model apart: the numbers of one process."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

from tests.distributed import work
from tests.distributed.pool import FreshRanks

# SGD: AdamW makes steps of full size of gradients that are nothing but rounding.
TRAINING = """
training:
  batch_size: 2
  gradient_accumulation: 4
  max_steps: 3
  gradient_clip: 0.5
  optimizer: {name: sgd, lr: 0.1}
"""
CHESS = """
task: chess
data: {source: synthetic, num_games: 40, max_plies: 12}
"""
TASKS: dict[str, str] = {
    **{
        name: f"{CHESS}model: {{architecture: {name}, hidden_dim: 16, num_layers: 2, num_heads: 2}}"
        for name in ("llama", "qwen2", "gpt2", "gpt_neox", "bert")
    },
    # With an even number of words, ranks that share matrices share the head too.
    "llama, even": f"""{CHESS}
model:
  {{architecture: llama, hidden_dim: 16, num_layers: 2, num_heads: 2, tie_embeddings: false, extra: {{vocab_size: 1972}}}}""",
    "cells": """
task: cells
data: {source: synthetic, num_cells: 120, num_genes: 60, num_types: 3}
tokenizer: {strategy: rank_value, max_genes: 17}
model: {hidden_dim: 16, num_layers: 2, num_heads: 2}
""",
    "cells, values": """
task: cells
data: {source: synthetic, num_cells: 120, num_genes: 60, num_types: 3}
tokenizer: {strategy: continuous_projection, max_genes: 17}
model: {hidden_dim: 16, num_layers: 2, num_heads: 2}
""",
    "resnet": """
task: images
data: {source: synthetic, num_images: 60, num_classes: 3, image_size: 32, valid_fraction: 0.2}
model: {architecture: resnet, depths: [1, 1], widths: [8, 16], extra: {embedding_size: 8, layer_type: basic}}
""",
    "vit": """
task: images
data: {source: synthetic, num_images: 60, num_classes: 3, image_size: 32, valid_fraction: 0.2}
model: {architecture: vit, hidden_dim: 16, num_layers: 2, num_heads: 2, patch_size: 8}
""",
}
# The pipeline's micro-batches are those of the reference, so that batch norm sees the same samples.
PIPELINE = ["training.pipeline.stages=2"]
TENSOR = ["training.tensor.size=2"]
ALONG = [*TENSOR, "training.tensor.sequence_parallel=true"]
CASES = {
    **{f"{task}, pipeline": (task, PIPELINE) for task in TASKS if task != "llama, even"},
    **{
        f"{task}, tensor": (task, TENSOR)
        for task in ("llama", "llama, even", "qwen2", "gpt_neox", "cells", "cells, values")
    },
    **{
        f"{task}, tensor along the sequence": (task, ALONG)
        for task in ("llama", "llama, even", "qwen2", "cells", "cells, values")
    },
    "llama, even, tensor and fsdp on 4 ranks": ("llama, even", [*TENSOR, "training.gradient_accumulation=2"]),
    **{
        f"{task}, zero1": (task, ["training.strategy=zero1", "training.gradient_accumulation=2"])
        for task in ("llama", "cells")
    },
}


@pytest.fixture(scope="module")
def reference(fresh_ranks: FreshRanks) -> Any:
    @functools.cache
    def run(task: str) -> dict[str, Any]:
        job = functools.partial(work.train, evaluate=True)
        return fresh_ranks.run(1, job, TASKS[task] + TRAINING, ["training.strategy=single"])[0]

    return run


@pytest.mark.parametrize("case", CASES)
def test_a_task_spread_over_two_ranks_computes_what_one_does(
    fresh_ranks: FreshRanks, reference: Any, case: str
) -> None:
    task, overrides = CASES[case]
    expected = reference(task)
    ranks = 4 if case.endswith("on 4 ranks") else 2
    results = fresh_ranks.run(ranks, functools.partial(work.train, evaluate=True), TASKS[task] + TRAINING, overrides)
    weights = {name: weight for result in results for name, weight in result["weights"].items()}
    assert weights.keys() == expected["weights"].keys()
    for name, value in expected["weights"].items():
        torch.testing.assert_close(
            weights[name], value, rtol=1e-5, atol=1e-5, msg=functools.partial("{}: {}".format, name)
        )
    for result in results:
        assert result["losses"] == pytest.approx(expected["losses"], rel=1e-5)
        assert result["norms"] == pytest.approx(expected["norms"], rel=1e-4)
        assert result["metrics"] == pytest.approx(expected["metrics"], rel=1e-4)
