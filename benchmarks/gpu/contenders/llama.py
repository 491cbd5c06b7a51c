"""Llamas of three sizes on random tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.gpu.contenders import by_hand, with_accelerate, with_lightning, with_shardwise, with_trainer
from benchmarks.gpu.contenders.meter import Meter, Plan
from benchmarks.gpu.contenders.problem import LEARNING_RATE, SEED, Contender, Options, Problem, Work, in_order, made
from benchmarks.gpu.contenders.tokens import learnable_tokens, random_tokens
from shardwise import DataBlock
from shardwise.tasks.chess.task import ChessTask
from shardwise.tasks.chess.tokens import Encoded


@dataclass(frozen=True)
class Shape:
    hidden: int
    mlp: int
    layers: int
    heads: int
    key_value_heads: int
    vocabulary: int
    sequence: int

    @property
    def weights(self) -> int:
        """Without the input embedding, and without norms."""
        attention = 2 * self.hidden * self.hidden * (1 + self.key_value_heads / self.heads)
        return round(self.layers * (attention + 3 * self.hidden * self.mlp) + self.vocabulary * self.hidden)

    @property
    def flops_per_token(self) -> float:
        return 6 * self.weights + 12 * self.layers * self.hidden * self.sequence

    def __str__(self) -> str:
        total = self.weights + self.vocabulary * self.hidden
        return (
            f"Llama of {total / 1e9:.2f}B: hidden {self.hidden}, MLP {self.mlp}, {self.layers} layers, {self.heads} heads, "
            f"{self.key_value_heads} for keys and values, vocabulary {self.vocabulary}; sequence {self.sequence}"
        )


TINY = Shape(64, 128, 2, 4, 4, 1000, 64)
LLAMA_1B = Shape(2048, 5632, 22, 16, 16, 32000, 2048)
LLAMA_7B = Shape(4096, 11008, 32, 32, 32, 32016, 2048)
LLAMA_8B = Shape(4096, 14336, 32, 32, 8, 128256, 4096)


def llama_1b(options: Options) -> Work:
    shape, batch = (TINY, 2) if options.tiny else (LLAMA_1B, 16)
    row = _Rows(shape, batch, options)
    contenders = [
        row("plain loop", by_hand.train),
        row("plain loop, torch.compile of the whole model", partial(by_hand.train, compiler=options.compiler)),
        row("Accelerate", with_accelerate.train),
        row("Lightning", with_lightning.train),
        row.trainer("Transformers Trainer"),
        row.shardwise("shardwise", {}),
        row.shardwise("shardwise, ddp", {"strategy": "ddp"}),
        row.shardwise("shardwise, fsdp", {"strategy": "fsdp"}),
        row.shardwise("shardwise, fp8-mixed", {"precision": "fp8-mixed"}),
    ]
    return Work(f"{shape}; fp32 weights, computed in bf16", "tokens", contenders)


def llama_7b(options: Options) -> Work:
    shape, batch, larger = (TINY, 2, 4) if options.tiny else (LLAMA_7B, 4, options.batch_7b)
    row = _Rows(shape, batch, options)
    recomputing = {"strategy": "fsdp", "fsdp": {"activation_checkpointing": True}}
    contenders = [
        contender
        for rows in (row, _Rows(shape, larger, options))
        for contender in (
            rows.trainer("Transformers Trainer, gradient_checkpointing", gradient_checkpointing=True),
            rows.shardwise("shardwise", {}),
        )
    ]
    contenders += [
        row.shardwise("shardwise, bf16-true", {"precision": "bf16-true"}),
        row.shardwise("shardwise, 4 micro-batches per step", {"gradient_accumulation": 4}),
        row.shardwise("shardwise, fsdp with activation_checkpointing", recomputing),
    ]
    title = f"{shape} (CodeLlama 7B's shape); fp32 weights, computed in bf16, where not said otherwise"
    return Work(title, "tokens", contenders)


def llama_8b(options: Options) -> Work:
    shape, batch = (TINY, 2) if options.tiny else (LLAMA_8B, options.batch_8b)
    row = _Rows(shape, batch, options)
    recomputing = {
        "precision": "bf16-true",
        "strategy": "fsdp",
        "fsdp": {"activation_checkpointing": True},
    }
    contenders = [
        row("plain loop, gradient checkpointing", partial(by_hand.train, precision="bf16-true"), recomputes=True),
        row.shardwise("shardwise", {"precision": "bf16-true"}),
        row.shardwise("shardwise, fsdp with activation_checkpointing", recomputing),
    ]
    return Work(f"{shape} (Llama 3 8B's shape); bf16 weights and arithmetic", "tokens", contenders)


@dataclass(frozen=True)
class _Rows:
    """Contenders of one shape and batch."""

    shape: Shape
    batch: int
    options: Options

    def __call__(self, name: str, train: Callable[[Problem, Meter], None], *, recomputes: bool = False) -> Contender:
        return self._contender(name, lambda meter: train(self._problem(meter.plan, recomputes), meter))

    def trainer(self, name: str, **arguments: Any) -> Contender:
        def run(meter: Meter) -> None:
            problem = self._problem(meter.plan)
            samples = [{"input_ids": row, "labels": row} for row in problem.samples]
            with_trainer.train(problem.build, samples, self.batch, problem.units, meter, **arguments)

        return self._contender(name, run)

    def shardwise(self, name: str, training: dict[str, Any]) -> Contender:
        def run(meter: Meter) -> None:
            with_shardwise.train(
                shardwise_blocks(self.shape, meter.plan.total * self.batch * training.get("gradient_accumulation", 1)),
                {"batch_size": self.batch, **training},
                lambda result: result.samples * self.shape.sequence,
                meter,
                self.options.overrides,
            )

        return self._contender(name, run)

    def _contender(self, name: str, run: Callable[[Meter], None]) -> Contender:
        return Contender(name, run, self.batch, self.options.planned(), self.shape.flops_per_token)

    def _problem(self, plan: Plan, recomputes: bool = False) -> Problem:
        rows = random_tokens(plan.total * self.batch, self.shape.sequence, self.shape.vocabulary)
        return llama_problem(self.shape, self.batch, rows, recomputes)


def llama_problem(
    shape: Shape,
    batch: int,
    rows: Tensor,
    recomputes: bool = False,
    learning_rate: float = LEARNING_RATE,
    seed: int = SEED,
) -> Problem:
    return Problem(
        build=lambda: made(lambda: _build(shape, recomputes), seed),
        samples=in_order(rows),
        loss=next_token_loss,
        batch=batch,
        units=lambda step: batch * shape.sequence,
        learning_rate=learning_rate,
    )


def next_token_loss(model: nn.Module, ids: Tensor) -> Tensor:
    """Over all positions, so that sizes stay round; the last has nothing to predict."""
    logits = model(input_ids=ids).logits
    targets = F.pad(ids[:, 1:], (0, 1), value=-100)
    return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


def _build(shape: Shape, recomputes: bool) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    model = LlamaForCausalLM(
        LlamaConfig(
            hidden_size=shape.hidden, intermediate_size=shape.mlp, num_hidden_layers=shape.layers,
            num_attention_heads=shape.heads, num_key_value_heads=shape.key_value_heads, vocab_size=shape.vocabulary,
            max_position_embeddings=shape.sequence, pad_token_id=0, bos_token_id=1, eos_token_id=2, use_cache=False,
            tie_word_embeddings=False,
        )
    )  # fmt: skip
    if recomputes:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model


# ---------------------------------------------------------------- for shardwise


def shardwise_blocks(shape: Shape, rows: int, *, learnable: bool = False) -> dict[str, Any]:
    return {
        "task": f"{__name__}:Tokens",
        "data": {"rows": rows, "learnable": learnable},
        "tokenizer": {"max_seq_len": shape.sequence},
        "model": {
            "architecture": "llama",
            "hidden_dim": shape.hidden,
            "intermediate_dim": shape.mlp,
            "num_layers": shape.layers,
            "num_heads": shape.heads,
            "tie_embeddings": False,
            "extra": {"num_key_value_heads": shape.key_value_heads, "vocab_size": shape.vocabulary},
        },
    }


class Tokens(ChessTask):
    """shardwise's own task for language models, with tokens in the place of games: what it does for them is measured."""

    class Data(DataBlock):
        rows: int
        learnable: bool = False

    def prepare_data(self) -> None:
        self.measure_attention()  # there are no games to check

    def train_data(self) -> Any:
        sequence, vocabulary = self.config.tokenizer.max_seq_len, self.config.model.extra["vocab_size"]
        make = learnable_tokens if self.config.data.learnable else random_tokens
        return _Texts(make(self.config.data.rows, sequence, vocabulary))

    def valid_data(self) -> Any:
        return None

    def build_model(self) -> nn.Module:
        return made(super().build_model)


class _Texts:
    def __init__(self, rows: Tensor) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Encoded:
        return Encoded(self.rows[index].tolist(), [], [])
