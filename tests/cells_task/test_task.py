"""The cells task: its loss against a hand-written one, its metrics, and the configs that people in the field write."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from shardwise.errors import DataError
from shardwise.tasks.cells.export import embed, load_encoder
from shardwise.tasks.cells.neighbours import draw_cells, knn_agreement
from shardwise.tasks.cells.synthetic import synthetic_counts
from shardwise.tasks.cells.task import CellsTask
from shardwise.tasks.cells.tokens import revealed
from tests.cells_task.files import random_counts, write_cells
from tests.cells_task.test_tokens import STRATEGIES
from tests.distributed import work
from tests.distributed.pool import RankPool
from tests.tasks import config_of

TINY = """
task: cells
data: {num_cells: 300, num_genes: 30, num_types: 3, valid_fraction: 0.2}
model: {hidden_dim: 16, num_layers: 2, num_heads: 2}
"""


def task_of(*overrides: str) -> CellsTask:
    return CellsTask(config_of(TINY, list(overrides)))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_loss_is_the_sum_over_hidden_places_only(strategy: str) -> None:
    task = task_of(f"tokenizer.strategy={strategy}")
    batch = task.train_data().read(np.arange(8), 0)
    model = task.build_model()
    predictions = model(batch).detach()
    expected, places = 0.0, 0
    for row, predicted in zip(batch["targets"], predictions, strict=True):
        for place, target in enumerate(row[row >= 0]):
            if strategy == "continuous_projection":
                expected += float((predicted[place, 0] - target) ** 2)
            else:
                expected -= float(F.log_softmax(predicted[place], dim=0)[int(target)])
            places += 1
    loss = task.loss(model, batch)
    assert places == loss.count == task.count(batch) > 0
    torch.testing.assert_close(loss.sum, torch.tensor(expected))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_padding_changes_neither_the_loss_nor_the_embedding(strategy: str) -> None:
    task = task_of(f"tokenizer.strategy={strategy}", "model.pooling=mean")
    data, model = task.train_data(), task.build_model().eval()
    ids = sorted(range(100), key=lambda cell: data.read(np.array([cell]), 0)["genes"].shape[1])
    pair = [ids[0], ids[-1]]
    together = data.read(np.array(pair), 0)
    assert (together["genes"][0] == 0).any()
    alone = [data.read(np.array([cell]), 0) for cell in pair]
    torch.testing.assert_close(task.loss(model, together).sum, sum(task.loss(model, one).sum for one in alone))
    embeddings = torch.cat([model(revealed(one), want="embedding") for one in alone])
    torch.testing.assert_close(model(revealed(together), want="embedding"), embeddings)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_what_is_masked_cannot_be_seen_by_the_model(strategy: str) -> None:
    """The gradient of the predictions with respect to the true values at masked places: there is no way to them."""
    task = task_of(f"tokenizer.strategy={strategy}", "tokenizer.masking={keep_ratio: 0.0, random_replace_ratio: 0.0}")
    model = task.build_model().eval()
    batch = task.train_data().read(np.arange(8), 0)
    before = model(batch)
    changed = dict(batch)
    changed["targets"] = torch.where(batch["targets"] >= 0, 1, batch["targets"])
    torch.testing.assert_close(model(changed), before, rtol=0, atol=0)
    if strategy == "continuous_projection":
        values = batch["values"].clone()
        values[batch["hidden"]] = 1e6
        torch.testing.assert_close(model(batch | {"values": values}), before, rtol=0, atol=0)


def test_validation_masks_are_the_same_every_time_and_training_masks_are_not() -> None:
    task = task_of()
    valid, train = task.valid_data(), task.train_data()
    assert torch.equal(valid.read(np.arange(10), 0)["targets"], valid.read(np.arange(10), 0)["targets"])
    assert not torch.equal(train.read(np.arange(10), 0)["targets"], train.read(np.arange(10), 1)["targets"])


@pytest.mark.parametrize("streaming", ["true", "false"])
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_two_ranks_compute_what_one_does(ranks: RankPool, tmp_path: Path, strategy: str, streaming: str) -> None:
    text = (
        TINY
        + """
training: {max_steps: 4, gradient_clip: 1.0, optimizer: {name: sgd, lr: 0.1}}
"""
    )
    data = [f"data.streaming={streaming}", "data.streaming_chunk_size=10", "data.streaming_shuffle_buffer=50"]
    train = functools.partial(work.train, evaluate=True)
    one = ranks.run(1, train, text, [*data, "training.batch_size=12"])[0]
    two = ranks.run(2, train, text, [*data, "training.batch_size=6", f"training.strategy={strategy}"])
    for result in two:
        assert result["losses"] == pytest.approx(one["losses"], rel=1e-5)
        assert result["norms"] == pytest.approx(one["norms"], rel=1e-4)
        for name, value in one["weights"].items():
            torch.testing.assert_close(result["weights"][name], value, rtol=1e-5, atol=1e-6)
        assert result["metrics"] == pytest.approx(one["metrics"], rel=1e-4)
    assert [sorted([*a, *b]) for a, b in zip(two[0]["ids"], two[1]["ids"], strict=True)] == [
        sorted(i) for i in one["ids"]
    ]


# ---------------------------------------------------------------- the tutorial's configs

# Every YAML block of the field's tutorial on sharded training of single-cell models: keys and values as there.
TUTORIAL = {
    "ddp": """
training:
  strategy: ddp
  num_gpus: 4
  precision: bf16-mixed
  batch_size: 64
  max_epochs: 50
  gradient_clip: 1.0
""",
    "fsdp": """
training:
  num_gpus: 4
  precision: bf16-mixed
  batch_size: 32
  max_epochs: 50
  gradient_clip: 1.0
  fsdp:
    sharding_strategy: FULL_SHARD
    cpu_offload: false
    activation_checkpointing: true
    min_num_params: 1000000
""",
    "checkpointing": """
training:
  batch_size: 64
  fsdp:
    sharding_strategy: FULL_SHARD
    activation_checkpointing: true
""",
    "accumulation": """
training:
  batch_size: 16
  gradient_accumulation: 4
  num_gpus: 4
""",
    "bf16": "training: {precision: bf16-mixed}",
    "fp16": "training: {precision: 16-mixed}",
    "fp32": "training: {precision: 32-true}",
    "complete": """
data:
  source: local
  paths:
    - ./data/preprocessed.h5ad
  gene_vocab: human_protein_coding
  max_genes: 4096
  num_workers: 8
  streaming: true
  streaming_chunk_size: 10000
  streaming_shuffle_buffer: 50000
tokenizer:
  strategy: rank_value
  max_genes: 4096
  prepend_cls: true
  masking:
    mask_ratio: 0.15
model:
  architecture: transformer_encoder
  hidden_dim: 1024
  num_layers: 12
  num_heads: 16
  dropout: 0.1
  max_seq_len: 4096
training:
  num_gpus: 8
  batch_size: 16
  gradient_accumulation: 2
  max_epochs: 100
  precision: bf16-mixed
  gradient_clip: 1.0
  optimizer:
    name: adamw
    lr: 1.0e-4
    weight_decay: 0.01
  scheduler:
    name: cosine_warmup
    warmup_steps: 5000
    total_steps: 500000
  fsdp:
    sharding_strategy: FULL_SHARD
    cpu_offload: false
    activation_checkpointing: true
    min_num_params: 1000000
  logger: wandb
  wandb_project: scmodelforge-large
  log_every_n_steps: 50
  checkpoint_dir: ./checkpoints/large-model
  save_top_k: 3
""",
    "several machines": """
training:
  num_gpus: 32
  num_nodes: 4
  fsdp:
    sharding_strategy: HYBRID_SHARD
""",
}
SMALL = [
    "training.num_gpus=2",
    "training.max_steps=3",
    "training.batch_size=4",
    "model.hidden_dim=16",
    "model.num_layers=2",
]
SMALL += ["model.num_heads=2", "data.num_workers=1"]


@pytest.mark.parametrize("block", TUTORIAL)
def test_every_config_of_the_tutorial_trains(ranks: RankPool, tmp_path: Path, block: str) -> None:
    (tmp_path / "data").mkdir()
    write_cells(tmp_path / "data" / "preprocessed.h5ad", random_counts(120, 30))
    small = list(SMALL)
    if block != "complete":
        small += ["data.num_cells=120", "data.num_genes=30"]
    if block == "several machines":
        small.append("training.num_nodes=2")
    results = ranks.run(2, work.run_fit, f"task: cells\n{TUTORIAL[block]}", small, str(tmp_path))
    assert [result["steps"] for result in results] == [3, 3]
    output = results[0]["output"]
    assert "step 3/3" in output
    if block == "complete":
        assert "human_protein_coding does not come with shardwise" in output
        assert (tmp_path / "checkpoints" / "large-model" / "step-00000003").is_dir()


# ---------------------------------------------------------------- metrics, pictures, export


def test_neighbours_agree_where_types_lie_apart_and_by_chance_where_they_do_not() -> None:
    labels = torch.arange(300) % 3
    apart = torch.eye(3)[labels] + 0.01 * torch.randn(300, 3, generator=torch.Generator().manual_seed(0))
    assert knn_agreement(apart, labels) == 1.0
    mixed = torch.randn(300, 8, generator=torch.Generator().manual_seed(0))
    assert knn_agreement(mixed, labels) == pytest.approx(1 / 3, abs=0.05)


def test_a_cell_is_not_its_own_neighbour() -> None:
    """Pairs far from all others: the nearest is the other of the pair, which has another label."""
    places = torch.nn.functional.one_hot(torch.arange(6) // 2).float() * 10
    assert knn_agreement(places, torch.tensor([0, 1, 0, 1, 0, 1]), neighbours=1) == 0.0


def test_synthetic_counts_are_overdispersed_and_their_types_can_be_told_apart() -> None:
    counts, types = synthetic_counts(1000, 200, 4, seed=0)
    one_type = counts[types == 0]
    mean, variance = one_type.mean(axis=0), one_type.var(axis=0)
    assert (variance > 1.5 * mean)[mean > 1].all()
    logged = torch.tensor(np.log1p(counts / counts.sum(axis=1, keepdims=True) * 1e4)).float()
    assert knn_agreement(logged, torch.tensor(types)) > 0.9


def test_an_evaluation_draws_the_cells_and_reports_agreement(ranks: RankPool, tmp_path: Path) -> None:
    result = ranks.run(2, work.run_fit, TINY, ["training.max_steps=2", "run_dir=runs/cells"], str(tmp_path))[0]
    assert {"loss", "masked_accuracy", "perplexity", "knn_agreement"} <= result["after"].keys()
    pictures = sorted(file.name for file in (tmp_path / "runs" / "cells" / "pictures").iterdir())
    assert pictures == ["step-00000000-cells.png", "step-00000002-cells.png"]
    assert (tmp_path / "runs" / "cells" / "pictures" / pictures[0]).read_bytes().startswith(b"\x89PNG")


def test_a_picture_can_be_drawn_of_cells_with_many_labels(tmp_path: Path) -> None:
    draw_cells(torch.randn(100, 5), torch.arange(100), [f"type {i}" for i in range(100)], "many", tmp_path / "p.png")
    assert (tmp_path / "p.png").stat().st_size > 5000


def test_cells_without_labels_are_trained_on_all_the_same(ranks: RankPool, tmp_path: Path) -> None:
    path = write_cells(tmp_path / "a.h5ad", random_counts(60, 20))
    overrides = [f"data={{source: local, paths: [{path}]}}", "training.max_steps=1"]
    result = ranks.run(1, work.run_fit, TINY, overrides, str(tmp_path))[0]
    assert "knn_agreement" not in result["after"] and "masked_accuracy" in result["after"]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_an_exported_encoder_embeds_cells_as_the_trained_one_does(tmp_path: Path, strategy: str) -> None:
    task = task_of(f"tokenizer.strategy={strategy}")
    model = task.build_model().eval()
    task.export(model, tmp_path)
    loaded, tokenizer, genes = load_encoder(tmp_path)
    data: Any = task.valid_data()
    rows = data.rows.take(np.arange(5))
    batch = revealed(tokenizer.encode(rows, data.cells[:5], 0))
    expected = revealed(data.read(np.arange(5), 0))
    assert torch.equal(loaded(batch, want="embedding"), model(expected, want="embedding"))
    assert genes == [f"gene{i}" for i in range(30)]
    corpus: Any = task._corpus
    vectors = embed(tmp_path, corpus.training.files[0].path, batch_size=64)
    assert vectors.shape == (300, 16)
    torch.testing.assert_close(torch.from_numpy(vectors[corpus.held_out[:5]]), model(expected, want="embedding"))


def test_max_seq_len_counts_cls_and_the_smaller_limit_holds() -> None:
    def longest(*overrides: str) -> int:
        return int(task_of("data.num_genes=200", *overrides).train_data().read(np.arange(100), 0)["genes"].shape[1])

    assert longest("model.max_seq_len=9") == 9
    assert longest("data.max_genes=12", "tokenizer.max_genes=8") == 9
    assert longest("data.max_genes=6", "tokenizer.max_genes=8", "tokenizer.prepend_cls=false") == 6


def test_the_head_is_as_wide_as_what_is_predicted() -> None:
    def width(strategy: str) -> int:
        model: Any = task_of(f"tokenizer.strategy={strategy}").build_model()
        return int(model.head[-1].out_features)

    assert [width(strategy) for strategy in STRATEGIES] == [30, 50, 1]


# ---------------------------------------------------------------- what goes wrong in practice


def test_a_step_of_cells_without_genes_changes_nothing_and_the_run_goes_on(ranks: RankPool, tmp_path: Path) -> None:
    counts = random_counts(60, 20)
    counts[30:] = 0  # half of them
    path = write_cells(tmp_path / "a.h5ad", counts)
    overrides = [f"data={{source: local, paths: [{path}]}}", "training.batch_size=1", "training.log_every_n_steps=1"]
    result = ranks.run(1, work.run_fit, TINY, overrides, str(tmp_path))[0]
    assert result["steps"] == 57 and "nan" not in result["output"]


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("cls", ["true", "false"])
@pytest.mark.parametrize("packing", ["true", "false"])
def test_cells_without_genes_count_nothing_and_leave_the_others_as_they_are(
    tmp_path: Path, strategy: str, cls: str, packing: str
) -> None:
    counts = random_counts(40, 20, density=0.5)
    counts[::3] = 0
    path = write_cells(tmp_path / "a.h5ad", counts)
    task = task_of(
        f"data={{source: local, paths: [{path}]}}", f"tokenizer={{strategy: {strategy}, prepend_cls: {cls}, packing: {packing}}}"
    )  # fmt: skip
    data, model = task.train_data(), task.build_model()
    cells = data.read(np.arange(len(data)), 0)["cells"].numpy()
    filled, empty = np.flatnonzero(counts[cells].any(axis=1)), np.flatnonzero(~counts[cells].any(axis=1))

    def loss_of(ids: Any) -> Any:
        model.zero_grad()
        batch = data.finish(data.read(ids, 0))
        loss = task.loss(model, batch)
        loss.sum.backward()
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        assert int(loss.count) == task.count(batch) and all(g.isfinite().all() for g in gradients)
        return loss.sum.detach(), int(loss.count), gradients

    alone, count, gradients = loss_of(filled)
    together, same, others = loss_of(np.sort(np.concatenate([filled, empty])))
    assert same == count > 0
    torch.testing.assert_close(together, alone)
    for one, other in zip(gradients, others, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    nothing, none, zeros = loss_of(empty)
    assert none == 0 and float(nothing) == 0 and all(not g.any() for g in zeros)


def test_held_out_cells_of_which_none_has_a_gene_are_told_before_training(tmp_path: Path) -> None:
    counts = random_counts(60, 20) + (np.arange(20) == 0)

    def task_with(name: str) -> CellsTask:
        return task_of(f"data={{source: local, paths: [{write_cells(tmp_path / name, counts)}]}}")

    held_out = task_with("a.h5ad")._corpus.held_out
    counts[held_out[1:]] = 0
    task_with("b.h5ad").prepare_data()
    counts[held_out] = 0
    with pytest.raises(
        DataError, match=r"none of the 3 cells held out of .*c.h5ad has any gene: there is nothing to valid"
    ):
        task_with("c.h5ad").prepare_data()


@pytest.mark.parametrize("labelled", [0, 1, 2, 30])
def test_few_labelled_cells_are_no_error(ranks: RankPool, tmp_path: Path, labelled: int) -> None:
    labels: Any = ["T"] * labelled + [None] * (60 - labelled)
    path = write_cells(tmp_path / "a.h5ad", random_counts(60, 20), labels=labels)
    overrides = [f"data={{source: local, paths: [{path}], valid_fraction: 0.5}}", "training.max_steps=1"]
    result = ranks.run(1, work.run_fit, TINY, overrides, str(tmp_path))[0]
    assert "knn_agreement" not in result["after"]
    assert labelled == 0 or "too few for knn_agreement" in result["output"]


@pytest.mark.parametrize(
    ("change", "goes_on"),
    [
        ("data.streaming=false", False),
        ("data.streaming_chunk_size=32", False),
        ("data.streaming_shuffle_buffer=64", False),
        ("training.batch_size=5", True),
        ("data.num_workers=2", True),
    ],
)
def test_a_resume_in_the_middle_of_an_epoch_keeps_the_order_or_is_refused(
    ranks: RankPool, tmp_path: Path, change: str, goes_on: bool
) -> None:
    stream = ["data.streaming=true", "data.streaming_chunk_size=16", "data.streaming_shuffle_buffer=128"]
    base = [*stream, "training.batch_size=8", "training.max_epochs=1", *work.folder_of(tmp_path)]
    head = ranks.run(1, functools.partial(work.train, steps=10, save=True), TINY, base)[0]
    if not goes_on:
        with pytest.raises(AssertionError, match="some would be used twice and some never"):
            ranks.run(1, functools.partial(work.train, resume="latest"), TINY, [*base, change])
        return
    tail = ranks.run(1, functools.partial(work.train, resume="latest"), TINY, [*base, change])[0]
    used = [index for step in [*head["ids"], *tail["ids"]] for index in step]
    assert sorted(used) == list(range(240))
