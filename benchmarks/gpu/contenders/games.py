"""Games of chess of different lengths: who computes on padding, and who does not."""

from __future__ import annotations

import json
import random
import tempfile
from pathlib import Path
from typing import Any

from torch import nn

from benchmarks.gpu.contenders import with_shardwise, with_trainer
from benchmarks.gpu.contenders.meter import Meter
from benchmarks.gpu.contenders.problem import SEED, Contender, Options, Work, in_order, made
from shardwise.tasks.chess.config import ChessModel
from shardwise.tasks.chess.games import random_game
from shardwise.tasks.chess.model import build_language_model
from shardwise.tasks.chess.task import ChessTask
from shardwise.tasks.chess.tokens import MoveTokenizer

LONGEST = 256
DIFFERENT = 1024
"""Games, used over and over: to make legal ones takes longer than to train on them."""


def chess(options: Options) -> Work:
    if options.tiny:
        sizes, batch = {"hidden_dim": 32, "intermediate_dim": 64, "num_layers": 1, "num_heads": 2}, 4
    else:
        sizes, batch = {"hidden_dim": 1024, "intermediate_dim": 2816, "num_layers": 24, "num_heads": 16}, 256
    plan = options.planned(warmup=8)  # lengths differ from step to step, and with them what is made ready for them
    found = _Games(plan.total * batch, batch)
    model = {"architecture": "llama", "tie_embeddings": False, **sizes}

    def trainer(meter: Meter, *, flat: bool) -> None:
        with_trainer.train(
            lambda: made(lambda: _build(model)),
            found.samples(with_mask=not flat),
            batch,
            found.targets,
            meter,
            collate=_flattening() if flat else found.padding(),
        )

    def shardwise(meter: Meter) -> None:
        with tempfile.TemporaryDirectory() as folder:
            blocks = {
                "task": f"{__name__}:Games",
                "data": found.written(Path(folder)),
                "tokenizer": {"max_seq_len": LONGEST},
            }
            training = {"batch_size": batch}
            with_shardwise.train(
                {**blocks, "model": model}, training, lambda result: result.global_count, meter, options.overrides
            )

    flops = _flops_per_token(model, found.mean_length)
    contenders = [
        Contender(name, run, batch, plan, flops)
        for name, run in {
            "Transformers Trainer, padded to the longest of the batch": lambda meter: trainer(meter, flat=False),
            "Transformers Trainer, DataCollatorWithFlattening": lambda meter: trainer(meter, flat=True),
            "shardwise, task chess": shardwise,
        }.items()
    ]
    title = (
        f"Llama {sizes} over {MoveTokenizer().size} moves; {batch} games per step, of {found.mean_length:.0f} tokens on average "
        f"and {found.longest} at most, so that {found.padding_share:.0%} of a padded batch is padding; only tokens that are "
        "predicted count; fp32 weights, computed in bf16"
    )
    return Work(title, "tokens", contenders)


class _Games:
    """Legal games of random moves, whose lengths are spread about as those of people are: a gamma distribution."""

    def __init__(self, number: int, batch: int) -> None:
        draw = random.Random(SEED)
        self.batch = batch
        lengths = [min(LONGEST - 2, max(8, round(draw.gammavariate(4.5, 16)))) for _ in range(min(number, DIFFERENT))]
        texts = [random_game(SEED, index, length) for index, length in enumerate(lengths)]
        ids = [MoveTokenizer().encode(text, with_moves=False).ids for text in texts]
        self.texts = [texts[index % DIFFERENT] for index in range(number)]
        self.ids = [ids[index % DIFFERENT] for index in range(number)]
        self._in_order = in_order(self.ids)
        self.mean_length = sum(map(len, self.ids)) / number
        self.longest = max(map(len, self.ids))

    def targets(self, step: int) -> int:
        return sum(len(ids) - 1 for ids in self._step(step))

    def _step(self, step: int) -> list[list[int]]:
        return self._in_order[step * self.batch : (step + 1) * self.batch]

    @property
    def padding_share(self) -> float:
        steps = [self._step(step) for step in range(len(self.ids) // self.batch)]
        return 1 - sum(map(len, self.ids)) / sum(len(step) * max(map(len, step)) for step in steps)

    def samples(self, *, with_mask: bool) -> list[dict[str, list[int]]]:
        masks = [{"attention_mask": [1] * len(ids)} if with_mask else {} for ids in self._in_order]
        return [{"input_ids": ids, **mask} for ids, mask in zip(self._in_order, masks, strict=True)]

    def padding(self) -> Any:
        from transformers import AutoTokenizer, DataCollatorForLanguageModeling

        with tempfile.TemporaryDirectory() as folder:
            MoveTokenizer().save(Path(folder))
            return DataCollatorForLanguageModeling(AutoTokenizer.from_pretrained(folder), mlm=False)

    def written(self, folder: Path) -> dict[str, Any]:
        """As files, and the block `data` that reads them."""
        held_out = [random_game(SEED, DIFFERENT + number, 16) for number in range(2)]
        for name, texts in (("games", self.texts), ("held-out", held_out)):
            (folder / f"{name}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
        return {
            "source": "local",
            "paths": [str(folder / "games.jsonl")],
            "valid_paths": [str(folder / "held-out.jsonl")],
        }


class Games(ChessTask):
    """The task as it is, with the weights that the others begin with."""

    def build_model(self) -> nn.Module:
        return made(super().build_model)


def _flattening() -> Any:
    from transformers import DataCollatorWithFlattening

    return DataCollatorWithFlattening()


def _build(model: dict[str, Any]) -> nn.Module:
    return build_language_model(ChessModel(**model), MoveTokenizer(), LONGEST, our_attention=False)


def _flops_per_token(model: dict[str, Any], length: float) -> float:
    hidden, layers = model["hidden_dim"], model["num_layers"]
    weights = layers * (4 * hidden**2 + 3 * hidden * model["intermediate_dim"]) + MoveTokenizer().size * hidden
    return 6 * weights + 12 * layers * hidden * length
