"""The chess task: next-token loss on real tokens, next-move accuracy, and the share of legal first choices."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from shardwise.errors import DataError, MissingExtra

try:
    import chess
except ImportError:
    raise MissingExtra.of("chess", "lm", "task: chess") from None

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shardwise.data import SampleContents
from shardwise.kernels.attention import Look, packed_arguments, prefer_backend
from shardwise.kernels.backend import Shape, fastest_backend, remembered_backend
from shardwise.kernels.head import summed_loss, use_loss_head, words_apart
from shardwise.tasks.base import Loss, Task
from shardwise.tasks.chess.config import ChessData, ChessModel, ChessTokenizer
from shardwise.tasks.chess.cuts import told_of_tokens
from shardwise.tasks.chess.games import Tell, load_games
from shardwise.tasks.chess.layout import IGNORED, packed, padded
from shardwise.tasks.chess.model import (
    attention_shape,
    build_language_model,
    look_at_language_model,
    split_language_model,
)
from shardwise.tasks.chess.moveword import read_move
from shardwise.tasks.chess.overlap import game_contents
from shardwise.tasks.chess.tokens import Encoded, GameTokenizer, MoveTokenizer, build_tokenizer
from shardwise.tasks.packing import (
    computes_in,
    decide_packing,
    measured_attention,
    on_cuda,
    strategy_against_packing,
)

log = logging.getLogger(__name__)

POSITIONS_PER_GAME = 4
"""Positions at which the first choice is decoded when a move takes several tokens; one-token moves are all checked."""


class ChessTask(Task):
    Data, Tokenizer, Model = ChessData, ChessTokenizer, ChessModel
    unit = "tokens"
    narrow_weights = True
    _length_multiple = 1
    """Games are padded to a multiple of this: ranks that share a sequence take equal parts of it."""

    @cached_property
    def tokenizer(self) -> GameTokenizer:
        return build_tokenizer(self._tokenizer_options, self._model_options)

    @cached_property
    def _games(self) -> tuple[Sequence[str], Sequence[str]]:
        return self._load_games(tell=None)

    def _load_games(self, tell: Tell | None) -> tuple[Sequence[str], Sequence[str]]:
        return load_games(self.config.data, self.config.seed, uci=isinstance(self.tokenizer, MoveTokenizer), tell=tell)

    @property
    def _model_options(self) -> ChessModel:
        return self.config.model

    @property
    def _tokenizer_options(self) -> ChessTokenizer:
        return self.config.tokenizer

    @cached_property
    def packs(self) -> bool:
        """Whether the games of a training micro-batch lie end to end. Follows from the config and the kind of device alone, so
        that ranks and loader workers agree."""
        return decide_packing(self._tokenizer_options.packing, cuda=self._on_cuda, problem=self._against_packing)

    def _against_packing(self) -> str:
        if problem := strategy_against_packing(self.config, "game"):
            return problem
        if not self._look.packs:
            kind = self._model_options.name or self._model_options.architecture
            return f"the model {kind} cannot tell packed games apart: {self._look.why_not}"
        return ""

    @property
    def _on_cuda(self) -> bool:
        return on_cuda(self.config.training)

    @cached_property
    def _look(self) -> Look:
        return look_at_language_model(self._model_options, self.tokenizer, self._tokenizer_options.max_seq_len)

    def prepare_data(self) -> None:
        """Games are checked, and which attention is fastest is measured, by one rank of a machine, before any other asks."""
        self.check_games()
        self.measure_attention()

    def check_games(self) -> None:
        self._games = self._load_games(tell=log.warning)
        for said in told_of_tokens(self.tokenizer, self._games, self._tokenizer_options.max_seq_len):
            log.warning(said)

    def measure_attention(self) -> None:
        if self._chooses_attention:
            with torch.device("meta"):
                model = self._build()
            fastest_backend(self._attention_shape(model), measured_attention())

    def train_data(self) -> _Games:
        _ = self.packs  # known before loader workers are forked, and refused before anything else is done
        return _Games(self._games[0], self.tokenizer, self._tokenizer_options.max_seq_len, with_moves=False)

    def valid_data(self) -> _Games:
        return _Games(self._games[1], self.tokenizer, self._tokenizer_options.max_seq_len, with_moves=True)

    def sample_contents(self, train: Any, valid: Any) -> SampleContents:
        return game_contents(train.texts, valid.texts, self.config.data)

    def build_model(self) -> nn.Module:
        model = self._build()
        if self._chooses_attention:
            prefer_backend(model, remembered_backend(self._attention_shape(model), measured_attention()))
        use_loss_head(model)
        return model

    def _build(self) -> nn.Module:
        return build_language_model(
            self._model_options, self.tokenizer, self._tokenizer_options.max_seq_len, our_attention=self._look.ours
        )

    @property
    def _chooses_attention(self) -> bool:
        """In a rank, that is, which has its GPU: a process that ranks are forked from must not touch one."""
        return torch.cuda.is_initialized() and self._on_cuda and self._look.ours

    def _attention_shape(self, model: Any) -> Shape:
        training = self.config.training
        length = self._tokenizer_options.max_seq_len
        return attention_shape(model.config, training.batch_size, length, computes_in(training))

    def tensor_plan(self, model: Any, ranks: int, sequence_parallel: bool) -> dict[str, Any] | None:
        self._length_multiple = ranks if sequence_parallel else 1
        plan = split_language_model(model, ranks, sequence_parallel=sequence_parallel)
        return None if plan is None else {**plan, **words_apart(model, ranks)}

    def collate(self, samples: list[Encoded]) -> dict[str, Any]:
        texts = [sample.ids for sample in samples]
        # Where there is nothing to pad, rows it is: their attention is faster.
        if self.packs and not samples[0].with_moves and len({len(text) for text in texts}) > 1:
            return packed(texts, self.tokenizer.pad_id, self._tokenizer_options.max_seq_len)
        return {**padded(texts, self.tokenizer.pad_id), "games": samples if samples[0].with_moves else []}

    def count(self, batch: dict[str, Any]) -> int:
        return int((batch["targets"] != IGNORED).sum())

    def loss(self, model: nn.Module, batch: dict[str, Any]) -> Loss:
        ids, targets = batch["ids"], batch["targets"]
        count = (targets != IGNORED).sum()
        if "starts" in batch:
            texts = packed_arguments(batch["positions"], batch["starts"], batch["longest"])
            return Loss(summed_loss(model, targets, input_ids=ids, **texts), count)
        return Loss(summed_loss(model, self._lengthened(targets, IGNORED), input_ids=self._lengthened(ids)), count)

    def evaluate(self, model: nn.Module, batch: dict[str, Any]) -> dict[str, Loss]:
        logits = self._logits(model, batch["ids"])
        choices = logits.argmax(dim=-1)
        right = (choices == batch["targets"]).tolist()
        # The logits at position t choose token t + 1.
        hits = [all(right[row][first - 1 : last - 1]) for row, _, (first, last) in _moves(batch["games"])]
        if self.tokenizer.tokens_per_move == 1:
            legal = self._legal_now(choices.tolist(), batch["games"])
        else:
            legal = self._legal_decoded(model, batch)
        return {
            "loss": self._loss(logits, batch["targets"]),
            "next_move_accuracy": _share(hits, logits),
            "legal_move_share": _share(legal, logits),
        }

    def derived_metrics(self, metrics: dict[str, float]) -> dict[str, float]:
        return {"perplexity": math.exp(min(metrics["loss"], 700.0))}

    def metric_names(self) -> tuple[str, ...]:
        return "loss", "next_move_accuracy", "legal_move_share", "perplexity"

    def flops_per_count(self, model: nn.Module) -> float:
        """6 × parameters without the input embedding + 12 × layers × hidden × mean length of the games, per token."""
        config: Any = model.config
        embedding = model.get_input_embeddings().weight  # type: ignore[operator]
        head = model.get_output_embeddings().weight  # type: ignore[operator]
        parameters = sum(parameter.numel() for parameter in model.parameters())
        weights = parameters if head is embedding else parameters - embedding.numel()
        attention = 12 * config.num_hidden_layers * config.hidden_size * self._mean_length
        return float(6 * weights + attention)

    @cached_property
    def _mean_length(self) -> float:
        """Tokens per game, over the first games of the training data."""
        data = self.train_data()
        lengths = [len(data[index].ids) for index in range(min(64, len(data)))]
        return sum(lengths) / len(lengths)

    def export(self, model: Any, folder: Path) -> None:
        """A folder that AutoModelForCausalLM.from_pretrained and AutoTokenizer.from_pretrained load."""
        model.save_pretrained(folder)
        self.tokenizer.save(folder)

    def _logits(self, model: nn.Module, ids: Tensor) -> Tensor:
        # No attention mask: with padding on the right, causal attention never reaches it, and the fast path stays open.
        return model(input_ids=self._lengthened(ids)).logits[:, : ids.shape[1]]

    def _lengthened(self, rows: Tensor, value: int | None = None) -> Tensor:
        filling = self.tokenizer.pad_id if value is None else value
        return F.pad(rows, (0, -rows.shape[1] % self._length_multiple), value=filling)

    def _loss(self, logits: Tensor, targets: Tensor) -> Loss:
        flat = F.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="sum")
        return Loss(flat, (targets != IGNORED).sum())

    def _legal_now(self, choices: list[list[int]], games: list[Encoded]) -> list[bool]:
        legal: list[bool] = []
        for row, game in enumerate(games):
            board = game.start.board()
            for move, (first, _) in zip(game.moves, game.spans, strict=True):
                legal.append(self._is_legal(board, [choices[row][first - 1]]))
                board.push(move)
        return legal

    def _legal_decoded(self, model: nn.Module, batch: dict[str, Any]) -> list[bool]:
        """Greedy continuations from a few positions of each game. The number of forward passes is fixed, so that
        ranks whose games differ in length still take part in the same collectives."""
        legal: list[bool] = []
        games: list[Encoded] = batch["games"]
        for slot in range(POSITIONS_PER_GAME):
            cuts = [self._cut(game, slot) for game in games]
            lengths = [1 if cut is None else game.spans[cut][0] for game, cut in zip(games, cuts, strict=True)]
            choices = self._continue(model, batch["ids"], lengths)
            for game, cut, choice in zip(games, cuts, choices, strict=True):
                if cut is None:
                    continue
                board = game.start.board()
                for move in game.moves[:cut]:
                    board.push(move)
                legal.append(self._is_legal(board, choice))
        return legal

    def _cut(self, game: Encoded, slot: int) -> int | None:
        """After how many moves to ask for the next: evenly spread, with a token to start from and room to answer."""
        room = self._tokenizer_options.max_seq_len - self.tokenizer.tokens_per_move
        usable = [index for index, (first, _) in enumerate(game.spans) if 0 < first <= room]
        return usable[slot * len(usable) // POSITIONS_PER_GAME] if usable else None

    def _continue(self, model: nn.Module, ids: Tensor, lengths: list[int]) -> list[list[int]]:
        rows = torch.arange(len(ids), device=ids.device)
        ends = torch.tensor(lengths, device=ids.device)
        extra = torch.full((len(ids), self.tokenizer.tokens_per_move), self.tokenizer.pad_id, device=ids.device)
        growing = torch.cat([ids, extra], dim=1)
        chosen = []
        for offset in range(self.tokenizer.tokens_per_move):
            logits = self._logits(model, growing[:, : max(lengths) + offset])
            choice = logits[rows, ends - 1 + offset].argmax(dim=-1)
            growing[rows, ends + offset] = choice
            chosen.append(choice)
        return torch.stack(chosen, dim=1).tolist()

    def _is_legal(self, board: chess.Board, ids: list[int]) -> bool:
        return read_move(board, self.tokenizer.move_word(ids)) is not None


class _Games:
    """Texts, tokenised when they are read."""

    def __init__(self, texts: Sequence[str], tokenizer: GameTokenizer, max_seq_len: int, *, with_moves: bool) -> None:
        self.texts, self.tokenizer, self.max_seq_len, self.with_moves = texts, tokenizer, max_seq_len, with_moves

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, index: int) -> Encoded:
        text = self.texts[index]
        try:
            encoded = self.tokenizer.encode(text, with_moves=self.with_moves)
        except ValueError as error:
            raise DataError(
                f"game {index} cannot be read as moves of chess: {error}. It begins: {text[:60]!r}"
            ) from None
        ids = encoded.ids[: self.max_seq_len]
        if len(ids) < 2:
            raise DataError(f"game {index} has fewer than two tokens, so there is nothing to predict: {text[:60]!r}")
        kept = sum(last <= len(ids) for _, last in encoded.spans)
        return Encoded(ids, encoded.moves[:kept], encoded.spans[:kept], self.with_moves, encoded.start)


def _moves(games: list[Encoded]) -> list[tuple[int, chess.Move, tuple[int, int]]]:
    return [
        (row, move, span)
        for row, game in enumerate(games)
        for move, span in zip(game.moves, game.spans, strict=True)
        if span[0] > 0  # a move that begins the text has nothing to be predicted from
    ]


def _share(hits: list[bool], like: Tensor) -> Loss:
    return Loss(torch.tensor(float(sum(hits)), device=like.device), len(hits))
