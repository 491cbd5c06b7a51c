"""Games laid end to end: the same loss, the same gradients, the same run, and next to no padding."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from shardwise.config import load_config
from shardwise.data.order import GlobalOrder
from shardwise.errors import ConfigError
from shardwise.kernels.attention import packed_arguments
from shardwise.kernels.sizes import packed_size
from shardwise.tasks.chess.games import random_game
from shardwise.tasks.chess.layout import IGNORED, packed, padding_share
from shardwise.tasks.chess.task import ChessTask
from tests.conftest import REPOSITORY
from tests.distributed import work
from tests.distributed.pool import RankPool
from tests.distributed.test_parity import assert_same_curve
from tests.packing import BY_DEFAULT, REFUSED
from tests.tasks import config_of

RAGGED = """
task: chess
data: {source: local, paths: [PATH], valid_fraction: 0.2}
tokenizer: {max_seq_len: 50}
model: {hidden_dim: 16, num_layers: 2, num_heads: 2}
training: {device: cpu, batch_size: 3, gradient_accumulation: 2, max_steps: 20, max_epochs: 9, gradient_clip: 1.0,
           optimizer: {name: adamw, lr: 0.003}}
"""
PACKED, PADDED = "tokenizer.packing=true", "tokenizer.packing=false"
MODELS = {
    "llama": ["model.architecture=llama"],
    "gpt2": ["model.architecture=gpt2"],
    "qwen2 with grouped heads": [
        "model.architecture=qwen2",
        "model.num_heads=4",
        "model.extra={num_key_value_heads: 2}",
    ],
}


@pytest.fixture(scope="module")
def ragged(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A config with games of 5 to 60 half-moves, the longest of which are cut."""
    path = tmp_path_factory.mktemp("games") / "games.jsonl"
    texts = [random_game(0, index, max_plies=5 + 23 * index % 56) for index in range(120)]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return RAGGED.replace("PATH", str(path))


@pytest.fixture
def task_of(ragged: str) -> Callable[..., ChessTask]:
    return lambda *overrides: ChessTask(config_of(ragged, list(overrides)))


def loss_and_gradients(task: ChessTask, model: nn.Module, micro_batches: list[list[Any]]) -> tuple[float, list[Any]]:
    model.zero_grad()
    total = 0.0
    for games in micro_batches:
        batch = task.collate(games)
        loss = task.loss(model, batch)
        assert int(loss.count) == task.count(batch) == sum(len(game.ids) - 1 for game in games)
        loss.sum.backward()
        total += float(loss.sum.detach())
    return total, [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


@pytest.mark.parametrize("overrides", MODELS.values(), ids=MODELS.keys())
@pytest.mark.parametrize("cuts", [[6], [1, 3, 2]], ids=["one micro-batch", "several"])
def test_packed_games_have_the_loss_and_the_gradients_of_padded_ones(
    task_of: Callable[..., ChessTask], overrides: list[str], cuts: list[int]
) -> None:
    packing, padding = task_of(PACKED, *overrides), task_of(PADDED, *overrides)
    data = packing.train_data()
    games = iter([data[index] for index in range(6)])
    micro_batches = [[next(games) for _ in range(size)] for size in cuts]
    assert len({len(game.ids) for batch in micro_batches for game in batch}) > 3
    model = packing.build_model().train()
    expected, wanted = loss_and_gradients(padding, model, micro_batches)
    found, got = loss_and_gradients(packing, model, micro_batches)
    assert found == pytest.approx(expected, rel=1e-6)
    assert len(got) == len(wanted)
    for mine, theirs in zip(got, wanted, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5 * float(theirs.abs().max()))


@pytest.mark.parametrize("overrides", MODELS.values(), ids=MODELS.keys())
def test_a_change_in_one_game_changes_no_other_games_loss(
    task_of: Callable[..., ChessTask], overrides: list[str]
) -> None:
    task = task_of(PACKED, *overrides)
    data = task.train_data()
    games = [data[index] for index in range(4)]
    model = task.build_model().eval()
    batch = task.collate(games)
    first, last = batch["starts"][1], batch["starts"][2]
    before = _losses(task, model, batch)
    batch["ids"][0, first : last - 1] = 7
    after = _losses(task, model, batch)
    assert torch.equal(before[:first], after[:first])
    assert torch.equal(before[last:], after[last:])
    assert not torch.equal(before[first:last], after[first:last])


def _losses(task: ChessTask, model: nn.Module, batch: dict[str, Any]) -> torch.Tensor:
    """Of every token; together they are the task's loss."""
    texts = packed_arguments(batch["positions"], batch["starts"], batch["longest"])
    with torch.no_grad():
        whole = task.loss(model, batch).sum
        logits = model(input_ids=batch["ids"], **texts).logits[0].float()
    losses = F.cross_entropy(logits, batch["targets"][0], ignore_index=IGNORED, reduction="none")
    torch.testing.assert_close(losses.sum(), whole)
    return losses


def test_a_packed_row_says_where_games_begin_and_predicts_nothing_across_them() -> None:
    row = packed([[5, 6, 7], [8, 9]], pad_id=0, max_seq_len=16)
    assert row["ids"].tolist() == [[5, 6, 7, 8, 9, 0, 0, 0]]
    assert row["targets"].tolist() == [[6, 7, IGNORED, 9, IGNORED, IGNORED, IGNORED, IGNORED]]
    assert row["positions"].tolist() == [[0, 1, 2, 0, 1, 0, 0, 0]]
    assert row["starts"].tolist() == [0, 3, 5, 8] and row["starts"].dtype == torch.int32
    assert row["longest"] == 4


def test_rows_have_few_lengths_and_always_a_text_of_padding() -> None:
    for tokens in range(2, 40_000, 7):
        size = packed_size([tokens])
        assert 0 < size - tokens <= max(8, tokens / 64)
    assert len({packed_size([tokens]) for tokens in range(8_000, 16_000)}) < 70
    for lengths in ([8], [1000, 24], [3] * 500):
        row = packed([[4] * length for length in lengths], pad_id=0, max_seq_len=1024)
        lasts = row["starts"].diff()
        assert len(lasts) == len(lengths) + 1 and int(lasts.min()) > 0
        assert max(lengths) <= row["longest"] and int(lasts.max()) <= row["longest"]
        assert row["ids"].shape == row["targets"].shape == row["positions"].shape == (1, int(row["starts"][-1]))


@pytest.mark.parametrize("overrides", [[], ["data.num_workers=1"]], ids=["", "with a worker"])
def test_a_packed_run_has_the_curve_of_the_padded_one(ragged: str, ranks: RankPool, overrides: list[str]) -> None:
    packs = ranks.run(1, work.train, ragged, [PACKED, *overrides])[0]
    pads = ranks.run(1, work.train, ragged, [PADDED])[0]
    assert len(packs["losses"]) == 20
    assert packs["ids"] == pads["ids"]
    assert_same_curve(packs, pads)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "tensor"])
def test_two_ranks_pack_too(ragged: str, ranks: RankPool, strategy: str) -> None:
    few = ["training.max_steps=4"]
    pads = ranks.run(1, work.train, ragged, [PADDED, *few, "training.batch_size=6"])[0]
    spread = [f"training.strategy={strategy}", f"training.batch_size={6 if strategy == 'tensor' else 3}"]
    packs = ranks.run(2, work.train, ragged, [PACKED, *few, *spread])[0]
    assert_same_curve(packs, pads)


def test_a_packed_run_resumed_in_the_middle_is_bit_for_bit_the_uninterrupted_one(
    ragged: str, ranks: RankPool, tmp_path: Path
) -> None:
    overrides = [PACKED, "model.architecture=gpt2", "model.dropout=0.1", *work.folder_of(tmp_path)]
    work.resumed_bit_for_bit(ranks, 1, ragged, overrides, steps=7)


def test_evaluation_does_not_pack(task_of: Callable[..., ChessTask]) -> None:
    task = task_of(PACKED)
    data: Any = task.valid_data()
    batch = task.collate([data[0], data[1]])
    assert batch["ids"].shape[0] == 2 and len(batch["games"]) == 2
    metrics = task.evaluate(task.build_model(), batch)
    assert math.isfinite(float(metrics["loss"].sum.detach()))


@pytest.mark.slow
def test_packing_leaves_less_than_two_percent_of_padding(task_of: Callable[..., ChessTask]) -> None:
    ragged = task_of("training.batch_size=16")
    tiny = ChessTask(load_config(REPOSITORY / "configs" / "chess-tiny.yaml"))
    for name, task in (("chess-tiny", tiny), ("games of very different lengths", ragged)):
        data = task.train_data()
        order = GlobalOrder(len(data), task.config.seed)
        size = task.config.training.batch_size
        lengths = [len(data[index].ids) for index in order.part(0, 0, min(len(data), 40 * size)).tolist()]
        batches = [lengths[first : first + size] for first in range(0, len(lengths), size)]
        pads, packs = (
            sum(padding_share(batch, packs=packs) for batch in batches) / len(batches) for packs in (False, True)
        )
        print(f"{name}: {pads:.2%} padded, {packs:.2%} packed")
        assert packs < 0.02
    assert pads > 0.2


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        *REFUSED,
        (
            ["model.architecture=bloom"],
            "the model bloom cannot tell packed games apart: its attention does not go through",
        ),
        (
            ["model.architecture=mistral", "model.extra={sliding_window: 32}"],
            "mistral cannot .* only sees the last 32 tokens",
        ),
        (["model.architecture=roberta"], "roberta cannot .* counts positions from"),
    ],
)
def test_packing_that_cannot_be_is_refused_with_a_reason(
    task_of: Callable[..., ChessTask], overrides: list[str], message: str
) -> None:
    with pytest.raises(ConfigError, match=f"tokenizer.packing: true, but .*{message}"):
        task_of(PACKED, *overrides).train_data()


@pytest.mark.parametrize(
    ("overrides", "on_cuda", "packs"),
    [
        *BY_DEFAULT,
        (["model.architecture=bloom"], True, False),
        (["model.architecture=mistral", "model.extra={sliding_window: 32}"], True, False),
        (["model.architecture=mistral", "model.extra={sliding_window: 4096}"], True, True),
    ],
)
def test_by_default_games_are_packed_on_cuda_where_that_can_be(
    task_of: Callable[..., ChessTask], monkeypatch: pytest.MonkeyPatch, overrides: list[str], on_cuda: bool, packs: bool
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: on_cuda)
    task = task_of("training.device=auto", *overrides)
    assert task.packs is packs
