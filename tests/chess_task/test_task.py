from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from shardwise.errors import ConfigError, DataError
from shardwise.tasks.chess.task import ChessTask
from tests.chess_task.files import json_lines
from tests.hub import write_model
from tests.tasks import config_of

TINY = """
task: chess
data: {num_games: 30, max_plies: 12, valid_fraction: 0.2}
model: {hidden_dim: 16, num_layers: 2, num_heads: 2}
"""


def task_of(*overrides: str) -> ChessTask:
    return ChessTask(config_of(TINY, list(overrides)))


def a_batch(task: ChessTask, data: Any, size: int = 4) -> dict[str, Any]:
    return task.collate([data[index] for index in range(size)])


def test_padding_changes_neither_the_loss_nor_its_count() -> None:
    """The loss of ragged games together is the sum of their losses alone."""
    task = task_of("data.num_games=200", "data.max_plies=300")
    data = task.train_data()
    games = sorted((data[index] for index in range(100)), key=lambda game: len(game.ids))
    short, long = games[0], games[-1]
    assert len(short.ids) < len(long.ids)
    model = task.build_model()
    together = task.loss(model, task.collate([short, long]))
    alone = [task.loss(model, task.collate([game])) for game in (short, long)]
    torch.testing.assert_close(together.sum, alone[0].sum + alone[1].sum)
    assert int(together.count) == len(short.ids) + len(long.ids) - 2 == task.count(task.collate([short, long]))


def test_the_loss_is_the_summed_cross_entropy_of_the_next_token() -> None:
    task = task_of()
    model = task.build_model()
    game = task.train_data()[0]
    ids = torch.tensor([game.ids])
    logits = model(input_ids=ids).logits
    expected = F.cross_entropy(logits[0, :-1], ids[0, 1:], reduction="sum")
    torch.testing.assert_close(task.loss(model, task.collate([game])).sum, expected)


class Oracle(nn.Module):
    """Answers with fixed token numbers, whatever it is asked."""

    def __init__(self, answers: torch.Tensor, size: int) -> None:
        super().__init__()
        self.answers, self.size = answers, size

    def forward(self, input_ids: torch.Tensor) -> Any:
        logits = F.one_hot(self.answers[:, : input_ids.shape[1]], self.size).float()
        return type("Output", (), {"logits": logits})


def test_a_model_that_always_plays_the_game_scores_one_and_one_that_never_does_scores_zero() -> None:
    task = task_of()
    batch = a_batch(task, task.valid_data())
    right = batch["targets"].clamp(min=0)
    metrics = task.evaluate(Oracle(right, task.tokenizer.size), batch)
    moves = sum(len(game.moves) for game in batch["games"])
    assert float(metrics["next_move_accuracy"].sum) == metrics["next_move_accuracy"].count == moves
    assert float(metrics["legal_move_share"].sum) == metrics["legal_move_share"].count == moves
    wrong = task.evaluate(Oracle(torch.zeros_like(right), task.tokenizer.size), batch)
    assert float(wrong["next_move_accuracy"].sum) == float(wrong["legal_move_share"].sum) == 0


def test_a_legal_move_that_was_not_played_is_legal_but_not_right() -> None:
    task = task_of()
    game = task.tokenizer.encode("e2e4", with_moves=True)
    answer = task.tokenizer.encode("d2d4", with_moves=True)
    batch = task.collate([game])
    metrics = task.evaluate(Oracle(torch.tensor([[*answer.ids[1:], 0]]), task.tokenizer.size), batch)
    assert float(metrics["legal_move_share"].sum) == 1
    assert float(metrics["next_move_accuracy"].sum) == 0


def test_a_game_from_a_position_is_evaluated_from_there() -> None:
    task = task_of()
    text = '[FEN "4k3/8/8/8/8/8/8/R3K2R b KQ - 0 10"]\ne8d7 e1c1 d7c7'
    games = [task.tokenizer.encode(each, with_moves=True) for each in (text, "e2e4 e7e5 g1f3")]
    batch = task.collate(games)
    metrics = task.evaluate(Oracle(batch["targets"].clamp(min=0), task.tokenizer.size), batch)
    assert float(metrics["legal_move_share"].sum) == float(metrics["next_move_accuracy"].sum) == 6


@pytest.mark.parametrize("pretrained", [False, True])
def test_a_game_from_a_position_is_evaluated_there_when_read_from_a_file(tmp_path: Path, pretrained: bool) -> None:
    file = tmp_path / "a.jsonl"
    fen = '[FEN "4k3/8/8/8/8/8/8/R3K2R b KQ - 0 10"]\n'
    file.write_bytes(json_lines(*[f"{fen}e8d7 e1c1 d7c7 c1b1 c7c6 b1a2 c6c5 a2a3"] * 4))
    more = [f"model.name={write_model(tmp_path / 'model')}"] if pretrained else []
    task = task_of("data.num_games=2", "data.source=local", f"data.paths=[{file}]", *more)
    batch = task.collate([task.valid_data()[0]])
    assert batch["games"][0].start.fen == "4k3/8/8/8/8/8/8/R3K2R b KQ - 0 10"
    by_heart = torch.cat([batch["targets"].clamp(min=0), torch.zeros(1, 16, dtype=torch.long)], dim=1)
    metrics = task.evaluate(Oracle(by_heart, task.tokenizer.size), batch)
    assert float(metrics["legal_move_share"].sum) == metrics["legal_move_share"].count > 0


def test_games_that_are_cut_are_counted_and_told_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    texts = [" ".join(["g1f3 g8f6 f3g1 f6g8"] * times) for times in (1, 2, 3, 4)]
    file = tmp_path / "a.jsonl"
    file.write_bytes(json_lines(*texts))
    keys = ["data.source=local", f"data.paths=[{file}]"]
    task = task_of(*keys, "tokenizer.max_seq_len=12")
    task.prepare_data()
    assert len(task.train_data()) + len(task.valid_data()) == 4
    # 6, 10, 14 and 18 tokens, of which 2 and 6 are too many
    assert caplog.messages == [
        "2 of 4 games are longer than tokenizer.max_seq_len: 12 and are cut there: 16.7% of all tokens are lost, the "
        "ends of games"
    ]
    caplog.clear()
    task_of(*keys, "tokenizer.max_seq_len=18").prepare_data()
    assert not caplog.messages


def test_of_many_games_a_pretrained_tokenizer_looks_at_some(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shardwise.tasks.chess.cuts.LOOKED_AT", 10)
    task_of(f"model.name={write_model(tmp_path)}", "tokenizer.max_seq_len=8").prepare_data()
    assert "about 100.0% of 30 games are longer than tokenizer.max_seq_len: 8 and are cut there" in caplog.messages[0]
    assert "(by 10 games, spread evenly)" in caplog.messages[0] and len(caplog.messages) == 1


def test_a_tokenizer_that_does_not_know_the_notation_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """That of an exported model of moves knows UCI, and takes every word of SAN for padding."""
    task_of().tokenizer.save(tmp_path)
    file = tmp_path / "a.jsonl"
    for texts, share in ((["1. e4 e5", "1. d4 d5"], "60.0%"), (["e2e4 e7e5", "d2d4 d7d5"], None)):
        caplog.clear()
        file.write_bytes(json_lines(*texts))
        keys = [
            "tokenizer.strategy=pretrained",
            f"tokenizer.name={tmp_path}",
            "data.source=local",
            f"data.paths=[{file}]",
        ]
        task_of(*keys).prepare_data()
        told = [said for said in caplog.messages if "stand for what the tokenizer does not know" in said]
        assert len(told) == (share is not None) and all(str(share) in said for said in told), caplog.messages


def test_perplexity_follows_from_the_loss() -> None:
    assert task_of().derived_metrics({"loss": 2.0})["perplexity"] == pytest.approx(7.389056)


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "qwen2", "gpt_neox"])
def test_any_architecture_is_built_from_sizes(architecture: str) -> None:
    task = task_of(f"model.architecture={architecture}")
    model: Any = task.build_model()
    assert model.config.hidden_size == 16 and model.config.num_hidden_layers == 2
    assert len(task.blocks(model)) == 2
    assert model.get_input_embeddings().weight is model.get_output_embeddings().weight
    batch = a_batch(task, task.train_data())
    model.train()
    torch.testing.assert_close(task.loss(model, batch).sum, task.loss(model, batch).sum)  # dropout is off by default


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "bert"])
def test_no_model_sees_the_moves_it_is_to_predict(architecture: str) -> None:
    task = task_of(f"model.architecture={architecture}")
    model = task.build_model().eval()
    ids = torch.tensor([task.train_data()[0].ids])
    changed = ids.clone()
    changed[0, -1] = 7
    with torch.no_grad():
        before, after = (model(input_ids=tokens).logits[0, :-1] for tokens in (ids, changed))
    assert torch.equal(before, after)


def test_flops_follow_the_named_formula() -> None:
    task = task_of("model.tie_embeddings=false")
    model: Any = task.build_model()
    embedding = model.get_input_embeddings().weight.numel()
    weights = sum(parameter.numel() for parameter in model.parameters()) - embedding
    assert task.flops_per_count(model) == 6 * weights + 12 * 2 * 16 * 14  # 12 half-moves, begin and end


def test_a_folder_with_a_pretrained_model_is_loaded_with_its_tokenizer(tmp_path: Path) -> None:
    write_model(tmp_path)
    task = task_of(f"model.name={tmp_path}")
    from transformers import AutoModelForCausalLM

    expected = AutoModelForCausalLM.from_pretrained(tmp_path).state_dict()
    model = task.build_model()
    for name, value in model.state_dict().items():
        assert torch.equal(value, expected[name]), name
    with torch.device("meta"):
        shape = task.build_model()
    assert all(parameter.is_meta for parameter in shape.parameters())
    batch = a_batch(task, task.valid_data())
    metrics = task.evaluate(model, batch)
    assert metrics["legal_move_share"].count == 4 * 4  # four games, four positions each
    assert 0 < int(metrics["next_move_accuracy"].count) <= sum(len(game.moves) for game in batch["games"])


def test_moves_that_take_several_tokens_are_decoded_to_the_move_that_was_played(tmp_path: Path) -> None:
    """A model that knows the games by heart has every first choice legal, through the pretrained tokenizer."""
    write_model(tmp_path)
    task = task_of(f"model.name={tmp_path}")
    batch = a_batch(task, task.valid_data())
    by_heart = torch.cat([batch["targets"].clamp(min=0), torch.zeros(4, 16, dtype=torch.long)], dim=1)
    metrics = task.evaluate(Oracle(by_heart, task.tokenizer.size), batch)
    assert float(metrics["legal_move_share"].sum) == metrics["legal_move_share"].count == 16
    assert float(metrics["next_move_accuracy"].sum) == metrics["next_move_accuracy"].count


def test_a_text_that_is_no_game_is_named() -> None:
    task = task_of()
    data = task.valid_data()
    data.texts = ["once upon a time"]
    with pytest.raises(
        DataError, match=r"game 0 cannot be read as moves of chess: 'once' is not a legal move .*once upon"
    ):
        data[0]
    data.texts = ["e2e4 e2e4"]
    with pytest.raises(
        DataError, match="game 0 cannot be read as moves of chess: 'e2e4' is not a legal move after 1 half"
    ):
        data[0]


@pytest.mark.parametrize(
    ("overrides", "error", "message"),
    [
        (["model.architecture=lama"], ConfigError, "'lama' is not a Hugging Face model type for causal"),
        (
            ["model.name=/nowhere/model", "tokenizer.strategy=moves"],
            DataError,
            "model.name: '/nowhere/model' is not a folder",
        ),
        (["model.name=/nowhere/model"], DataError, "the tokenizer of '/nowhere/model' cannot be loaded"),
        (["tokenizer.strategy=pretrained"], DataError, "needs tokenizer.name or model.name"),
    ],
)
def test_what_cannot_be_built_says_why(overrides: list[str], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        task_of(*overrides).build_model()


def test_a_tokenizer_larger_than_the_model_is_refused(tmp_path: Path) -> None:
    write_model(tmp_path)
    with pytest.raises(ConfigError, match=r"the tokenizer has 1971 tokens, but model.name: .* only knows"):
        task_of(f"model.name={tmp_path}", "tokenizer.strategy=moves").build_model()
