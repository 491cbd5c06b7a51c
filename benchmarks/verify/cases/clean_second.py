"""Correct tasks that are awkward on purpose: zero and tiny gradients, odd batches, shared weights, odd numbers."""

from __future__ import annotations

import contextlib
import csv
import itertools
import math
import os
import tempfile
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from case import ACCUMULATE, BF16, CASES, DDP, FSDP, clean
from plain import PAD, VOCABULARY, Plain, Sentences, pad, points, sentences
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize
from torch.utils.data import Subset, random_split

from shardwise import Loss, Rows, Task, gather_batch


def made(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def weights_folder() -> Path:
    return Path(os.environ.get("OWN_WEIGHTS", tempfile.gettempdir()))


def keep_weights(model: nn.Module, name: str) -> None:
    """As if downloaded; whole or not at all."""
    path = weights_folder() / name
    part = path.with_suffix(f".{os.getpid()}")
    torch.save(model.state_dict(), part)
    part.replace(path)


def next_tokens(logits: Tensor, tokens: Tensor) -> Tensor:
    return F.cross_entropy(
        logits[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten(), ignore_index=PAD, reduction="sum"
    )


# Language


@clean(
    "mamba",
    "state space",
    "MambaForCausalLM: states by a scan, padding behind what counts",
    ("ddp-accumulate", 2, DDP | ACCUMULATE),
    optimizer={"lr": 0.003},
)
class Mamba(Sentences):
    longest = 12

    def build_model(self) -> nn.Module:
        from transformers import MambaConfig, MambaForCausalLM

        return MambaForCausalLM(
            MambaConfig(
                vocab_size=VOCABULARY, hidden_size=16, state_size=4, num_hidden_layers=2, time_step_rank=2,
                pad_token_id=PAD, use_cache=False, residual_in_fp32=True,
            )
        )  # fmt: skip

    def loss(self, model: nn.Module, batch: Tensor) -> Loss:
        return Loss(sum=next_tokens(model(batch).logits, batch), count=self.count(batch))


@clean(
    "rwkv",
    "state space",
    "RwkvForCausalLM: a decaying sum in place of attention",
    optimizer={"lr": 0.003, "name": "adam"},
)
class Rwkv(Mamba):
    def build_model(self) -> nn.Module:
        from transformers import RwkvConfig, RwkvForCausalLM

        return RwkvForCausalLM(
            RwkvConfig(
                vocab_size=VOCABULARY, hidden_size=16, attention_hidden_size=16, num_hidden_layers=2, context_length=32,
                rescale_every=0, use_cache=False,
            )
        )  # fmt: skip


@clean(
    "mistral-window",
    "decoder",
    "MistralForCausalLM, a window of four tokens, tied, padded on the left",
    ("ddp-4", 4, DDP),
    optimizer={"lr": 0.003},
)
class Mistral(Sentences):
    def build_model(self) -> nn.Module:
        from transformers import MistralConfig, MistralForCausalLM

        return MistralForCausalLM(
            MistralConfig(
                vocab_size=VOCABULARY, hidden_size=16, intermediate_size=32, num_hidden_layers=3, num_attention_heads=4,
                num_key_value_heads=2, sliding_window=4, max_position_embeddings=64, tie_word_embeddings=True,
                pad_token_id=PAD, bos_token_id=None, eos_token_id=None, use_cache=False,
            )
        )  # fmt: skip

    def collate(self, samples: list[Tensor]) -> dict[str, Tensor]:
        tokens = nn.utils.rnn.pad_sequence(samples, batch_first=True, padding_value=PAD, padding_side="left")
        there = tokens != PAD
        places = (there.cumsum(1) - 1).clamp(min=0)
        return {"input_ids": tokens, "attention_mask": there.long(), "position_ids": places}

    def count(self, batch: dict[str, Tensor]) -> int:
        return int(batch["attention_mask"].sum()) - len(batch["attention_mask"])

    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> Loss:
        tokens = batch["input_ids"]
        known = batch["attention_mask"][:, :-1].bool()
        logits = model(**batch).logits[:, :-1]
        return Loss(
            sum=F.cross_entropy(logits[known].float(), tokens[:, 1:][known], reduction="sum"), count=self.count(batch)
        )

    def valid_data(self) -> list[Tensor]:
        return sentences(self.config.seed + 77, 41, self.shortest, self.longest)

    def derived_metrics(self, metrics: dict[str, float]) -> dict[str, float]:
        return {"perplexity": math.exp(metrics["loss"])}


@clean(
    "gemma",
    "decoder",
    "Gemma2ForCausalLM: norms that begin at zero, capped logits, tied and scaled embeddings",
    ("fsdp-bf16", 2, FSDP | BF16),
    optimizer={"lr": 0.003, "betas": [0.9, 0.95]},
    gradient_clip=1.0,
)
class Gemma(Sentences):
    longest = 16

    def build_model(self) -> nn.Module:
        from transformers import Gemma2Config, Gemma2ForCausalLM

        config = Gemma2Config(
            vocab_size=VOCABULARY, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
            num_key_value_heads=1, head_dim=8, query_pre_attn_scalar=8, sliding_window=8, max_position_embeddings=64,
            pad_token_id=PAD, bos_token_id=None, eos_token_id=None, use_cache=False, attn_implementation="eager",
        )  # fmt: skip
        return Gemma2ForCausalLM(config)

    def loss(self, model: nn.Module, batch: Tensor) -> Loss:
        return Loss(sum=next_tokens(model(batch).logits, batch), count=self.count(batch))


@clean(
    "mixtral",
    "mixture of experts",
    "MixtralForCausalLM: experts in one tensor of three dimensions",
    optimizer={"lr": 0.002},
)
class Mixtral(Sentences):
    longest = 12

    def build_model(self) -> nn.Module:
        from transformers import MixtralConfig, MixtralForCausalLM

        return MixtralForCausalLM(
            MixtralConfig(
                vocab_size=VOCABULARY, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
                num_key_value_heads=2, num_local_experts=6, num_experts_per_tok=2, max_position_embeddings=64,
                pad_token_id=PAD, bos_token_id=None, eos_token_id=None, use_cache=False, experts_implementation="eager",
            )
        )  # fmt: skip

    def loss(self, model: nn.Module, batch: Tensor) -> Loss:
        return Loss(sum=next_tokens(model(batch).logits, batch), count=self.count(batch))


LETTERS = "abcdefghij"


class Texts:
    """Nothing but strings; `collate` makes numbers of them."""

    def __init__(self, seed: int, number: int) -> None:
        generator = made(seed)
        self.rows = []
        for row in range(number):
            length = int(torch.randint(6, 18, (), generator=generator))
            letters = torch.randint(0, len(LETTERS), (length,), generator=generator).tolist()
            text = "".join(LETTERS[letter] for letter in letters)
            label = "early" if 2 * text.count("a") + text.count("b") > text.count("i") + text.count("j") else "late"
            self.rows.append({"text": text, "label": label, "row": row})

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, row: int) -> dict[str, Any]:
        return dict(self.rows[row])


@clean(
    "roberta-strings",
    "encoder",
    "RobertaForSequenceClassification: samples are strings, places are counted from the padding index",
    optimizer={"lr": 0.003},
)
class Roberta(Task):
    names = ("early", "late")

    def train_data(self) -> Texts:
        return Texts(self.config.seed, 200)

    def valid_data(self) -> Texts:
        return Texts(self.config.seed + 1, 45)

    def labels(self) -> list[str]:
        return list(self.names)

    def build_model(self) -> nn.Module:
        from transformers import RobertaConfig, RobertaForSequenceClassification

        return RobertaForSequenceClassification(
            RobertaConfig(
                vocab_size=16, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32,
                max_position_embeddings=24, pad_token_id=1, bos_token_id=0, eos_token_id=2, type_vocab_size=1,
                hidden_dropout_prob=0.1, attention_probs_dropout_prob=0.1, num_labels=2,
            )
        )  # fmt: skip

    def collate(self, samples: list[dict[str, Any]]) -> dict[str, Any]:
        texts = [torch.tensor([0, *(LETTERS.index(letter) + 3 for letter in each["text"]), 2]) for each in samples]
        tokens = nn.utils.rnn.pad_sequence(texts, batch_first=True, padding_value=1)
        return {
            "tokens": tokens,
            "labels": torch.tensor([self.names.index(each["label"]) for each in samples]),
            "rows": torch.tensor([each["row"] for each in samples]),
            "texts": [each["text"] for each in samples],
        }

    def loss(self, model: nn.Module, batch: dict[str, Any]) -> Loss:
        logits = model(input_ids=batch["tokens"], attention_mask=(batch["tokens"] != 1).long()).logits
        return Loss(sum=F.cross_entropy(logits, batch["labels"], reduction="sum"), count=len(batch["texts"]))

    def evaluate(self, model: nn.Module, batch: dict[str, Any]) -> dict[str, Loss | Rows]:
        logits = model(input_ids=batch["tokens"], attention_mask=(batch["tokens"] != 1).long()).logits
        guess = logits.argmax(1)
        return {
            "loss": Loss(F.cross_entropy(logits, batch["labels"], reduction="sum"), len(guess)),
            "accuracy": Loss((guess == batch["labels"]).float().sum(), len(guess)),
            "guesses": Rows(batch["rows"], {"guess": guess, "label": batch["labels"]}),
        }

    def study(self, rows: dict[str, Rows], pictures: Path, step: int) -> dict[str, float]:
        guess, label = rows["guesses"].columns["guess"], rows["guesses"].columns["label"]
        scores = []
        for each in range(2):
            hits = float(((guess == each) & (label == each)).sum())
            scores.append(2 * hits / max(float((guess == each).sum() + (label == each).sum()), 1.0))
        return {"macro_f1": sum(scores) / 2}


@clean(
    "albert-tags",
    "shared weights",
    "AlbertForTokenClassification: one layer four times; few tokens have a tag, some sentences none",
    ("ddp-accumulate", 2, DDP | ACCUMULATE),
    optimizer={"lr": 0.003},
)
class Albert(Sentences):
    unit = "tags"

    def build_model(self) -> nn.Module:
        from transformers import AlbertConfig, AlbertForTokenClassification

        return AlbertForTokenClassification(
            AlbertConfig(
                vocab_size=VOCABULARY, embedding_size=8, hidden_size=16, num_hidden_layers=4, num_hidden_groups=1,
                num_attention_heads=2, intermediate_size=32, max_position_embeddings=32, pad_token_id=PAD, num_labels=3,
                hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, classifier_dropout_prob=0.0,
            )
        )  # fmt: skip

    def collate(self, samples: list[Tensor]) -> dict[str, Tensor]:
        tokens = pad(samples)
        before = F.pad(tokens, (1, 0))[:, :-1]
        tags = torch.where((tokens % 5 == 0) & (tokens != PAD), before % 3, -100)
        return {"input_ids": tokens, "attention_mask": (tokens != PAD).long(), "tags": tags}

    def count(self, batch: dict[str, Tensor]) -> int:
        return int((batch["tags"] != -100).sum())

    may_count_nothing = True

    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> Loss:
        logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
        total = F.cross_entropy(logits.flatten(0, 1), batch["tags"].flatten(), reduction="sum")
        return Loss(sum=total, count=self.count(batch))


@clean(
    "distilbert-spans",
    "encoder",
    "DistilBertForQuestionAnswering: where a span begins and ends, never in the padding",
    optimizer={"lr": 0.003},
)
class DistilBert(Task):
    def spans(self, seed: int, number: int) -> list[tuple[Tensor, int, int]]:
        samples = []
        for row, tokens in enumerate(sentences(seed, number, 6, 20)):
            begin = row % (len(tokens) - 3)
            end = begin + 1 + row % 3
            tokens = tokens.clamp(min=4)
            tokens[begin], tokens[end] = 1, 2
            samples.append((tokens, begin, end))
        return samples

    def train_data(self) -> list[tuple[Tensor, int, int]]:
        return self.spans(self.config.seed, 160)

    def valid_data(self) -> list[tuple[Tensor, int, int]]:
        return self.spans(self.config.seed + 9, 37)

    def build_model(self) -> nn.Module:
        from transformers import DistilBertConfig, DistilBertForQuestionAnswering

        return DistilBertForQuestionAnswering(
            DistilBertConfig(
                vocab_size=VOCABULARY, dim=16, n_layers=2, n_heads=2, hidden_dim=32, max_position_embeddings=24,
                pad_token_id=PAD, dropout=0.1, attention_dropout=0.1, qa_dropout=0.1,
            )
        )  # fmt: skip

    def collate(self, samples: list[tuple[Tensor, int, int]]) -> tuple[Tensor, Tensor]:
        return pad([each[0] for each in samples]), torch.tensor([each[1:] for each in samples])

    def answers(self, model: nn.Module, tokens: Tensor) -> Tensor:
        out = model(input_ids=tokens, attention_mask=(tokens != PAD).long())
        both = torch.stack([out.start_logits, out.end_logits], 1).float()
        return both.masked_fill((tokens == PAD)[:, None], -1e4)

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Loss:
        tokens, spans = batch
        both = self.answers(model, tokens)
        return Loss(sum=F.cross_entropy(both.flatten(0, 1), spans.flatten(), reduction="sum") / 2, count=len(tokens))

    def evaluate(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> dict[str, Loss | Rows]:
        tokens, spans = batch
        guess = self.answers(model, tokens).argmax(2)
        inside = (guess[:, 0] <= guess[:, 1]).float()
        return {
            **super().evaluate(model, batch),
            "exact": Loss((guess == spans).all(1).float().sum(), len(tokens)),
            "possible": Loss(inside.sum(), len(tokens)),
            "distance": Loss((guess - spans).abs().sum().double(), 2 * len(tokens)),
        }


@clean(
    "bart-greedy",
    "encoder-decoder",
    "BartForConditionalGeneration: one embedding in four places; evaluation generates step by step",
    ("fsdp-4", 4, FSDP),
    optimizer={"lr": 0.003},
)
class Bart(Task):
    """The sequence backwards."""

    unit = "tokens"

    def train_data(self) -> list[Tensor]:
        return sentences(self.config.seed, 160, 3, 7)

    def valid_data(self) -> list[Tensor]:
        return sentences(self.config.seed + 5, 33, 3, 7)

    def build_model(self) -> nn.Module:
        from transformers import BartConfig, BartForConditionalGeneration

        return BartForConditionalGeneration(
            BartConfig(
                vocab_size=VOCABULARY + 2, d_model=16, encoder_layers=2, decoder_layers=2, encoder_attention_heads=2,
                decoder_attention_heads=2, encoder_ffn_dim=32, decoder_ffn_dim=32, max_position_embeddings=16,
                pad_token_id=PAD, bos_token_id=VOCABULARY, eos_token_id=VOCABULARY + 1, forced_eos_token_id=None,
                decoder_start_token_id=VOCABULARY, dropout=0.1, use_cache=False,
            )
        )  # fmt: skip

    def collate(self, samples: list[Tensor]) -> dict[str, Tensor]:
        backwards = [torch.cat([each.flip(0), torch.tensor([VOCABULARY + 1])]) for each in samples]
        return {"source": pad(samples), "target": pad(backwards)}

    def count(self, batch: dict[str, Tensor]) -> int:
        return int((batch["target"] != PAD).sum())

    def logits(self, model: nn.Module, source: Tensor, before: Tensor) -> Tensor:
        return model(
            input_ids=source, attention_mask=(source != PAD).long(), decoder_input_ids=before, use_cache=False
        ).logits

    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> Loss:
        target = batch["target"]
        before = F.pad(target, (1, 0), value=VOCABULARY)[:, :-1]
        logits = self.logits(model, batch["source"], before)
        total = F.cross_entropy(logits.flatten(0, 1), target.flatten(), ignore_index=PAD, reduction="sum")
        return Loss(sum=total, count=self.count(batch))

    def evaluate(self, model: nn.Module, batch: dict[str, Tensor]) -> dict[str, Loss | Rows]:
        source, target = batch["source"], F.pad(batch["target"], (0, 8 - batch["target"].shape[1]))
        said = torch.full((len(source), 1), VOCABULARY, device=source.device)
        for _ in range(8):  # always as often: each rank calls the model equally often
            said = torch.cat([said, self.logits(model, source, said)[:, -1:].argmax(-1)], 1)
        right = (said[:, 1:] == target) | (target == PAD)
        there = target != PAD
        return {
            **super().evaluate(model, batch),
            "tokens_right": Loss((right & there).float().sum(), there.sum()),
            "all_right": Loss(right.all(1).float().sum(), len(source)),
        }


class LowRank(nn.Module):
    """What a frozen linear layer gives, and a little more; nothing more in the beginning."""

    def __init__(self, base: nn.Linear, rank: int = 2) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Parameter(torch.randn(rank, base.in_features) / base.in_features**0.5)
        self.up = nn.Parameter(torch.zeros(base.out_features, rank))

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + F.linear(F.linear(x, self.down), self.up)


@clean(
    "low-rank-neox",
    "adapters",
    "GPTNeoXForCausalLM read from a file and frozen, its head tied; low-rank additions that begin at zero",
    ("ddp-bf16", 2, DDP | BF16),
    optimizer={"lr": 0.01},
)
class LowRankNeoX(Sentences):
    longest = 12

    def bare(self) -> nn.Module:
        from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

        return GPTNeoXForCausalLM(
            GPTNeoXConfig(
                vocab_size=VOCABULARY, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
                max_position_embeddings=32, rotary_pct=0.5, tie_word_embeddings=True, use_cache=False,
                bos_token_id=None, eos_token_id=None,
            )
        )  # fmt: skip

    def prepare_data(self) -> None:
        if not (weights_folder() / "neox.pt").exists():
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(4)
                keep_weights(self.bare(), "neox.pt")

    def build_model(self) -> nn.Module:
        model = self.bare()
        model.load_state_dict(torch.load(weights_folder() / "neox.pt"))
        model.requires_grad_(False)
        for layer in model.gpt_neox.layers:
            layer.attention.query_key_value = LowRank(layer.attention.query_key_value)
            layer.input_layernorm.requires_grad_(True)
        return model

    def loss(self, model: nn.Module, batch: Tensor) -> Loss:
        return Loss(sum=next_tokens(model(batch).logits, batch), count=self.count(batch))


class Rotary(nn.Module):
    """Its table is made when it is first needed, and anew for a longer text. It is the same whoever makes it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width
        self.table: Tensor | None = None

    def forward(self, x: Tensor, places: Tensor) -> Tensor:
        if self.table is None or len(self.table) <= int(places.max()):
            rates = 100.0 ** -(torch.arange(0, self.width, 2, device=x.device) / self.width)
            angles = torch.arange(int(places.max()) + 1, device=x.device)[:, None] * rates
            self.table = torch.cat([angles.cos(), angles.sin()], 1)
        cos, sin = self.table[places].to(x.dtype).chunk(2, -1)
        even, odd = x[..., ::2], x[..., 1::2]
        return torch.cat([even * cos - odd * sin, even * sin + odd * cos], -1)


class PackedBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.rotary = Rotary(width)
        self.slope = nn.Parameter(torch.zeros(1))
        self.out = nn.Linear(width, width, bias=False)
        self.mlp = nn.Sequential(nn.RMSNorm(width), nn.Linear(width, 2 * width), nn.SiLU(), nn.Linear(2 * width, width))

    def forward(self, x: Tensor, places: Tensor, document: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        back = places[:, :, None] - places[:, None]
        seen = (document[:, :, None] == document[:, None]) & (back >= 0)
        mask = torch.where(seen, -F.softplus(self.slope) * back, -math.inf).to(q.dtype)
        x = x + self.out(F.scaled_dot_product_attention(self.rotary(q, places), self.rotary(k, places), v, mask))
        return x + self.mlp(x)


class Packer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 16)
        nn.init.normal_(self.embed.weight, std=0.3)
        self.layers = nn.ModuleList(PackedBlock(16) for _ in range(2))
        self.norm = nn.RMSNorm(16)

    def forward(self, tokens: Tensor, places: Tensor, document: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x, places, document)
        return F.linear(self.norm(x), self.embed.weight)


@clean(
    "packed-rows",
    "packing",
    "all texts of a micro-batch in one row, with borders; rotary tables made when needed, a learned slope",
    ("ddp-4-accumulate", 4, DDP | ACCUMULATE),
    optimizer={"lr": 0.005},
)
class PackedRows(Sentences):
    def collate(self, samples: list[Tensor]) -> dict[str, Tensor]:
        lengths = torch.tensor([len(each) for each in samples])
        return {
            "tokens": torch.cat(samples)[None],
            "places": torch.cat([torch.arange(len(each)) for each in samples])[None],
            "document": torch.arange(len(samples)).repeat_interleave(lengths)[None],
        }

    def build_model(self) -> nn.Module:
        return Packer()

    def count(self, batch: dict[str, Tensor]) -> int:
        return int((batch["places"] > 0).sum())

    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> Loss:
        logits = model(**batch)[0, :-1]
        follows = batch["places"][0, 1:] > 0
        total = F.cross_entropy(logits[follows].float(), batch["tokens"][0, 1:][follows], reduction="sum")
        return Loss(sum=total, count=self.count(batch))


# Pictures and sounds


def pictures(seed: int, number: int, size: int = 16, channels: int = 3) -> tuple[Tensor, Tensor]:
    """Bytes; the class is the corner that is lightest."""
    generator = made(seed)
    images = torch.randint(0, 160, (number, channels, size, size), generator=generator, dtype=torch.uint8)
    classes = torch.randint(0, 4, (number,), generator=generator)
    half = size // 2
    for image, each in zip(images, classes.tolist(), strict=True):
        image[:, each // 2 * half :, each % 2 * half :][:, :half, :half] += 60
    return images, classes


class Pictures(Task):
    samples = 120

    def part(self, seed: int, number: int) -> list[tuple[Tensor, Tensor]]:
        return list(zip(*pictures(seed, number), strict=True))

    def train_data(self) -> list[tuple[Tensor, Tensor]]:
        return self.part(self.config.seed, self.samples)

    def valid_data(self) -> list[tuple[Tensor, Tensor]]:
        return self.part(self.config.seed + 3, 27)

    def loss(self, model: nn.Module, batch: list[Tensor]) -> Loss:
        images, classes = batch
        logits = model(images.float() / 127.5 - 1).logits
        return Loss(sum=F.cross_entropy(logits, classes, label_smoothing=0.1, reduction="sum"), count=len(images))


@clean(
    "convnext",
    "convolutions",
    "ConvNextForImageClassification: its layer scale of a millionth leaves the blocks tiny gradients",
    optimizer={"lr": 0.002, "weight_decay": 0.05},
)
class ConvNext(Pictures):
    def build_model(self) -> nn.Module:
        from transformers import ConvNextConfig, ConvNextForImageClassification

        return ConvNextForImageClassification(
            ConvNextConfig(
                num_channels=3, patch_size=2, image_size=16, num_stages=2, hidden_sizes=[8, 16], depths=[2, 2],
                num_labels=4,
            )
        )  # fmt: skip


@clean(
    "swin",
    "vision transformer",
    "SwinForImageClassification: shifted windows with learned relative biases",
    ("fsdp-4", 4, FSDP),
    optimizer={"lr": 0.002},
)
class Swin(Pictures):
    def build_model(self) -> nn.Module:
        from transformers import SwinConfig, SwinForImageClassification

        return SwinForImageClassification(
            SwinConfig(
                image_size=16, patch_size=2, num_channels=3, embed_dim=8, depths=[2, 2], num_heads=[2, 2],
                window_size=4, drop_path_rate=0.0, num_labels=4,
            )
        )  # fmt: skip


@clean(
    "segformer",
    "segmentation",
    "SegformerForSemanticSegmentation: pixels count, some have no label; batch norm in its head",
    optimizer={"lr": 0.002},
)
class Segformer(Pictures):
    unit = "pixels"
    samples = 80

    def part(self, seed: int, number: int) -> list[tuple[Tensor, Tensor]]:
        images, _ = pictures(seed, number, 32)
        smooth = F.avg_pool2d(images.float().mean(1, keepdim=True), 9, 1, 4)[:, 0]
        classes = torch.bucketize(smooth, torch.tensor([80.0, 100.0]))
        classes[:, :2] = 255
        classes[::5, :, 10:] = 255
        return list(zip(images, classes, strict=True))

    def build_model(self) -> nn.Module:
        from transformers import SegformerConfig, SegformerForSemanticSegmentation

        return SegformerForSemanticSegmentation(
            SegformerConfig(
                num_encoder_blocks=2, depths=[1, 1], sr_ratios=[2, 1], hidden_sizes=[8, 16], patch_sizes=[7, 3],
                strides=[4, 2], num_attention_heads=[1, 2], mlp_ratios=[2, 2], decoder_hidden_size=16, num_labels=3,
                drop_path_rate=0.0, classifier_dropout_prob=0.0,
            )
        )  # fmt: skip

    def count(self, batch: list[Tensor]) -> int:
        return int((batch[1] != 255).sum())

    def logits(self, model: nn.Module, images: Tensor) -> Tensor:
        return F.interpolate(model(images.float() / 127.5 - 1).logits, images.shape[-2:], mode="bilinear")

    def loss(self, model: nn.Module, batch: list[Tensor]) -> Loss:
        logits = self.logits(model, batch[0])
        return Loss(sum=F.cross_entropy(logits, batch[1], ignore_index=255, reduction="sum"), count=self.count(batch))

    def evaluate(self, model: nn.Module, batch: list[Tensor]) -> dict[str, Loss | Rows]:
        guess, known = self.logits(model, batch[0]).argmax(1), batch[1] != 255
        results: dict[str, Loss | Rows] = {**super().evaluate(model, batch)}
        for each in range(3):
            mine, truth = (guess == each) & known, batch[1] == each
            results[f"iou_{each}"] = Loss((mine & truth).sum().float(), (mine | truth).sum())
        return results

    def derived_metrics(self, metrics: dict[str, float]) -> dict[str, float]:
        return {"mean_iou": sum(metrics[f"iou_{each}"] for each in range(3)) / 3}


@clean(
    "clip-captions",
    "two towers",
    "CLIPModel: which of three captions is that of the picture, all within a sample; a learned temperature",
    optimizer={"lr": 0.002},
)
class ClipCaptions(Task):
    def part(self, seed: int, number: int) -> list[dict[str, Tensor]]:
        images, classes = pictures(seed, number)
        samples = []
        for row, (image, each) in enumerate(zip(images, classes.tolist(), strict=True)):
            told = [(each + row * step) % 4 for step in (0, 1, 2)] if row % 2 else [(each + s) % 4 for s in (0, 1, 3)]
            told = [told[0], *(other if other != told[0] else (told[0] + 2) % 4 for other in told[1:])]
            order = [(place + row) % 3 for place in range(3)]
            captions = torch.tensor([[1, 5 + told[place], 10 + (row + place) % 7, 30, PAD] for place in order])
            samples.append({"image": image, "captions": captions, "right": torch.tensor(order.index(0))})
        return samples

    def train_data(self) -> list[dict[str, Tensor]]:
        return self.part(self.config.seed, 120)

    def build_model(self) -> nn.Module:
        from transformers import CLIPConfig, CLIPModel

        shape = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
        words = {"vocab_size": VOCABULARY, "max_position_embeddings": 5, "eos_token_id": 30, "pad_token_id": PAD}
        return CLIPModel(
            CLIPConfig(
                text_config={**shape, **words, "bos_token_id": 1},
                vision_config={**shape, "image_size": 16, "patch_size": 8},
                projection_dim=8,
            )
        )

    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> Loss:
        number = len(batch["image"])
        every = model(input_ids=batch["captions"].flatten(0, 1), pixel_values=batch["image"].float() / 127.5 - 1)
        scores = every.logits_per_image.unflatten(1, (number, 3))
        own = torch.arange(number, device=scores.device)
        return Loss(sum=F.cross_entropy(scores[own, own], batch["right"], reduction="sum"), count=number)


@clean(
    "wav2vec2",
    "speech",
    "Wav2Vec2ForSequenceClassification: a weighted sum of its layers, masking off, convolutions frozen",
    optimizer={"lr": 0.002},
)
class Wav2Vec2(Task):
    def part(self, seed: int, number: int) -> list[tuple[np.ndarray, int]]:
        generator = np.random.default_rng(seed)
        time = np.arange(400)
        classes = generator.integers(0, 3, number)
        waves = [np.sin(time * (each + 1) / 9 + generator.uniform(0, 6)) for each in classes]
        return [
            ((8000 * wave + generator.normal(0, 2000, 400)).astype(np.int16), int(each))
            for wave, each in zip(waves, classes, strict=True)
        ]

    def train_data(self) -> list[tuple[np.ndarray, int]]:
        return self.part(self.config.seed, 100)

    def valid_data(self) -> list[tuple[np.ndarray, int]]:
        return self.part(self.config.seed + 50, 22)

    def build_model(self) -> nn.Module:
        from transformers import Wav2Vec2Config, Wav2Vec2ForSequenceClassification

        model = Wav2Vec2ForSequenceClassification(
            Wav2Vec2Config(
                vocab_size=8, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32,
                conv_dim=[8, 8], conv_stride=[8, 4], conv_kernel=[16, 8], num_feat_extract_layers=2,
                num_conv_pos_embeddings=8, num_conv_pos_embedding_groups=2, apply_spec_augment=False, layerdrop=0.0,
                classifier_proj_size=8, num_labels=3, use_weighted_layer_sum=True,
            )
        )  # fmt: skip
        model.freeze_feature_encoder()
        model.wav2vec2.masked_spec_embed.requires_grad_(False)  # no masks, no gradient
        return model

    def loss(self, model: nn.Module, batch: list[Tensor]) -> Loss:
        waves, classes = batch
        waves = waves.float()
        waves = (waves - waves.mean(1, keepdim=True)) / waves.std(1, keepdim=True)
        logits = model(waves).logits
        return Loss(sum=F.cross_entropy(logits, classes, reduction="sum"), count=len(waves))


class Detector(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 16, 4, 4)
        self.places = nn.Parameter(torch.randn(16, 16) / 4)
        self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, 0.0, batch_first=True), 1)
        self.queries = nn.Embedding(4, 16)
        self.layers = nn.ModuleList(nn.TransformerDecoderLayer(16, 2, 32, 0.0, batch_first=True) for _ in range(2))
        self.kind, self.box = nn.Linear(16, 3), nn.Linear(16, 4)

    def forward(self, images: Tensor) -> list[tuple[Tensor, Tensor]]:
        memory = self.encoder(self.patches(images).flatten(2).mT + self.places)
        x = self.queries.weight.expand(len(images), -1, -1)
        answers = []
        for layer in self.layers:
            x = layer(x, memory)
            answers.append((self.kind(x), self.box(x).sigmoid()))
        return answers


@clean(
    "detector",
    "detection",
    "learned queries, each matched to an object of its own picture; every layer answers",
    ("ddp-accumulate", 2, DDP | ACCUMULATE),
    optimizer={"lr": 0.003},
)
class Detection(Task):
    def train_data(self) -> list[dict[str, Tensor]]:
        generator = made(self.config.seed)
        samples = []
        for _ in range(100):
            image = torch.rand(3, 16, 16, generator=generator) / 4
            boxes, kinds = torch.zeros(3, 4), torch.full((3,), -1)
            for place in range(int(torch.randint(0, 4, (), generator=generator))):
                top, left = torch.randint(0, 10, (2,), generator=generator).tolist()
                kinds[place] = kind = int(torch.randint(0, 2, (), generator=generator))
                image[kind, top : top + 6, left : left + 6] += 1
                boxes[place] = torch.tensor([top, left, top + 6, left + 6]) / 16
            samples.append({"image": image, "boxes": boxes, "kinds": kinds})
        return samples

    def build_model(self) -> nn.Module:
        return Detector()

    @staticmethod
    @torch.no_grad()
    def match(kinds: Tensor, boxes: Tensor, truth: Tensor, where: Tensor) -> tuple[int, ...]:
        costs = torch.cdist(boxes.float(), where.float(), 1) - kinds.float().softmax(-1)[:, truth]
        table = costs.tolist()
        ways = itertools.permutations(range(4), len(truth))
        return min(ways, key=lambda way: sum(table[query][place] for place, query in enumerate(way)))

    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> Loss:
        parts = []
        for kinds, boxes in model(batch["image"]):
            for row, every in enumerate(batch["kinds"]):
                truth, where = every[every >= 0], batch["boxes"][row][every >= 0]
                way = list(self.match(kinds[row], boxes[row], truth, where))
                wanted = torch.full((4,), 2, device=truth.device)
                wanted[way] = truth
                parts.append(F.cross_entropy(kinds[row], wanted, reduction="sum") / 4)
                parts.append((boxes[row][way] - where).abs().sum())
        return Loss(sum=torch.stack(parts).sum(), count=len(batch["image"]))


class MixedNorms(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Sequential(
            nn.Conv2d(1, 8, 3, padding=1), nn.InstanceNorm2d(8, affine=True, track_running_stats=True)
        )
        norms = [nn.BatchNorm2d(8), nn.GroupNorm(2, 8), nn.InstanceNorm2d(8, affine=True, track_running_stats=True)]
        self.stages = nn.ModuleList(
            nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), norm, nn.LeakyReLU(0.1)) for norm in norms
        )
        self.heads = nn.ModuleList(nn.Conv2d(8, 3, 1) for _ in norms)

    def forward(self, x: Tensor) -> list[Tensor]:
        x = self.enter(x)
        answers = []
        for stage, head in zip(self.stages, self.heads, strict=True):
            x = x + stage(x)
            answers.append(head(x))
        return answers


@clean(
    "deep-supervision",
    "mixed norms",
    "batch, group and instance norm, two of them with running statistics; a head at every depth; pixels count",
    optimizer={"lr": 0.005, "name": "sgd", "momentum": 0.9},
)
class DeepSupervision(Segformer):
    unit = "pixels"

    def part(self, seed: int, number: int) -> list[tuple[Tensor, Tensor]]:
        return [(image[:1, ::2, ::2], classes[::2, ::2].long()) for image, classes in super().part(seed, number)]

    def build_model(self) -> nn.Module:
        return MixedNorms()

    def logits(self, model: nn.Module, images: Tensor) -> Tensor:
        return model(images.float() / 127.5 - 1)[-1]

    def loss(self, model: nn.Module, batch: list[Tensor]) -> Loss:
        answers = model(batch[0].float() / 127.5 - 1)
        parts = [
            share * F.cross_entropy(each, batch[1], ignore_index=255, reduction="sum")
            for share, each in zip((0.25, 0.5, 1.0), answers, strict=True)
        ]
        return Loss(sum=torch.stack(parts).sum(), count=self.count(batch))


# Odd layers


class Scan(torch.autograd.Function):
    """h[t] = a[t] h[t - 1] + x[t], with a backward pass by hand."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, x: Tensor) -> Tensor:
        state, states = torch.zeros_like(x[:, 0]), []
        for step in range(x.shape[1]):
            state = a[:, step] * state + x[:, step]
            states.append(state)
        h = torch.stack(states, 1)
        ctx.save_for_backward(a, h)
        return h

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        a, h = ctx.saved_tensors
        flow, flows = torch.zeros_like(grad[:, 0]), []
        for step in reversed(range(grad.shape[1])):
            flow = grad[:, step] + flow
            flows.append(flow)
            flow = a[:, step] * flow
        g = torch.stack(flows[::-1], 1)
        return g * F.pad(h, (0, 0, 1, 0))[:, :-1], g


class Scanner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(4, 12)
        self.gates = nn.ModuleList(nn.Linear(12, 24) for _ in range(2))
        self.head = nn.Linear(12, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for gate in self.gates:
            a, new = gate(x).float().chunk(2, -1)
            a = a.sigmoid()
            x = x + torch.tanh(Scan.apply(a, (1 - a) * new))
        return self.head(x[:, -1])


@clean(
    "scan-by-hand",
    "own function",
    "a gated recurrence as a torch.autograd.Function; counts are integer votes for each sample",
    ("ddp-bf16", 2, DDP | BF16),
)
class ScanByHand(Task):
    unit = "votes"

    def train_data(self) -> list[dict[str, Tensor]]:
        generator = made(self.config.seed)
        x = torch.randn(160, 16, 4, generator=generator)
        votes = torch.randint(1, 6, (160,), generator=generator)
        y = x.cumsum(1)[:, -1, :3].argmax(1)
        return [{"x": x[row], "y": y[row], "votes": votes[row]} for row in range(160)]

    def build_model(self) -> nn.Module:
        return Scanner()

    def count(self, batch: dict[str, Tensor]) -> int:
        return int(batch["votes"].sum())

    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> Loss:
        each = F.cross_entropy(model(batch["x"]), batch["y"], reduction="none")
        return Loss(sum=(each * batch["votes"]).sum(), count=self.count(batch))


class Spectral(nn.Module):
    def __init__(self, width: int, modes: int) -> None:
        super().__init__()
        self.modes = modes
        self.weight = nn.Parameter(torch.randn(width, width, modes, 2) / width)
        self.local = nn.Conv1d(width, width, 1)

    def forward(self, x: Tensor) -> Tensor:
        waves = torch.fft.rfft(x.float(), norm="ortho")
        kept = torch.einsum("bim,iom->bom", waves[..., : self.modes], torch.view_as_complex(self.weight))
        back = torch.fft.irfft(F.pad(kept, (0, waves.shape[-1] - self.modes)), n=x.shape[-1], norm="ortho")
        return F.gelu(back + self.local(x))


class Fourier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave = nn.Conv1d(1, 8, 1), nn.Conv1d(8, 1, 1)
        self.blocks = nn.ModuleList(Spectral(8, 6) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for block in self.blocks:
            x = x + block(x)
        return self.leave(x)


@clean("fourier", "Fourier operator", "complex weights of waves, as pairs; the error is relative to each sample")
class FourierOperator(Task):
    def curves(self, seed: int, number: int) -> list[tuple[Tensor, Tensor]]:
        waves = torch.fft.rfft(torch.randn(number, 1, 32, generator=made(seed)))
        decay = torch.exp(-0.1 * torch.arange(17) ** 2)
        return list(zip(torch.fft.irfft(waves * decay**0.3), torch.fft.irfft(waves * decay), strict=True))

    def train_data(self) -> list[tuple[Tensor, Tensor]]:
        return self.curves(self.config.seed, 140)

    def valid_data(self) -> list[tuple[Tensor, Tensor]]:
        return self.curves(self.config.seed + 2, 30)

    def build_model(self) -> nn.Module:
        return Fourier()

    def loss(self, model: nn.Module, batch: list[Tensor]) -> Loss:
        before, after = batch
        error = (model(before) - after).flatten(1).norm(dim=1) / after.flatten(1).norm(dim=1)
        return Loss(sum=error.sum(), count=len(before))


class Symmetric(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight.triu() + weight.triu(1).mT


class OrthogonalRnn(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(6, 10)
        self.turn = parametrizations.orthogonal(nn.Linear(10, 10, bias=False))
        self.mix = nn.Linear(10, 10)
        parametrize.register_parametrization(self.mix, "weight", Symmetric())
        self.bend = nn.Parameter(torch.zeros(10))
        self.head = nn.Linear(10, 4)

    def forward(self, x: Tensor) -> Tensor:
        state = torch.zeros(len(x), 10, device=x.device)
        with parametrize.cached():
            for step in self.enter(x).unbind(1):
                moved = self.turn(state) + step
                state = moved.sign() * F.relu(moved.abs() + self.bend)
        return self.head(torch.tanh(self.mix(state)))


@clean("orthogonal", "reparametrised", "an orthogonal recurrent matrix and a symmetric one, cached within a pass")
class Orthogonal(Task):
    def train_data(self) -> list[tuple[Tensor, Tensor]]:
        x = torch.randn(150, 9, 6, generator=made(self.config.seed))
        return list(zip(x, x[:, 0, :4].argmax(1), strict=True))

    def build_model(self) -> nn.Module:
        return OrthogonalRnn()

    def loss(self, model: nn.Module, batch: list[Tensor]) -> Loss:
        return Loss(sum=F.cross_entropy(model(batch[0]), batch[1], reduction="sum"), count=len(batch[0]))


class ReZero(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.line = nn.Linear(width, width)
        self.share = nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.share * torch.tanh(self.line(x))


class Deep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(8, 5)
        self.layers = nn.ModuleList(ReZero(5) for _ in range(32))
        self.head = nn.Sequential(nn.RMSNorm(5), nn.Linear(5, 4))
        nn.init.zeros_(self.head[1].weight), nn.init.zeros_(self.head[1].bias)

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


@clean(
    "rezero", "deep and narrow", "32 layers of five units; gates and head begin at zero, so nearly no gradient does not"
)
class ReZeroed(Plain):
    def build_model(self) -> nn.Module:
        return Deep()


class Half(nn.Module):
    """Half of its units never answer, nor does the second layer of the branch."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(8, 24), nn.Linear(24, 24), nn.Linear(24, 4)
        self.branch = nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 24), nn.ReLU())
        with torch.no_grad():
            self.first.bias[::2] = -50
            self.branch[2].bias.fill_(-50)

    def forward(self, x: Tensor) -> Tensor:
        x, branch = F.relu(self.first(x)), self.branch(x)
        return self.head(F.relu(self.second(x)) + branch)


@clean(
    "dead-units",
    "zero gradients",
    "units that never answer and a branch that is dead: their gradients are zero in every step",
    ("ddp-muon", 2, DDP | {"optimizer": {"name": "muon", "lr": 0.005}}),
    optimizer={"lr": 0.01, "weight_decay": 0.0},
)
class DeadUnits(Plain):
    def build_model(self) -> nn.Module:
        return Half()


@clean(
    "hinge",
    "zero gradients",
    "a hinge loss on classes far apart: after some steps, whole batches have no loss and no gradient",
    optimizer={"lr": 0.1, "name": "sgd", "momentum": 0.9, "weight_decay": 0.0},
    max_epochs=4,
)
class Hinge(Task):
    def clouds(self, seed: int, number: int) -> list[tuple[Tensor, Tensor]]:
        side = torch.arange(number) % 2 * 2.0 - 1
        x = torch.randn(number, 6, generator=made(seed)) * 0.3
        x[:, :3] += 2 * side[:, None]
        return list(zip(x, side, strict=True))

    def train_data(self) -> list[tuple[Tensor, Tensor]]:
        return self.clouds(self.config.seed, 200)

    def valid_data(self) -> list[tuple[Tensor, Tensor]]:
        return self.clouds(self.config.seed + 4, 40)

    def build_model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))

    def loss(self, model: nn.Module, batch: list[Tensor]) -> Loss:
        x, side = batch
        return Loss(sum=F.relu(0.5 - model(x)[:, 0] * side).sum(), count=len(x))

    def evaluate(self, model: nn.Module, batch: list[Tensor]) -> dict[str, Loss | Rows]:
        margin = model(batch[0])[:, 0] * batch[1]
        near = margin < 0.5
        return {
            "loss": Loss(F.relu(0.5 - margin).sum(), len(margin)),
            "wrong": Loss((margin < 0).float().sum(), len(margin)),
            "loss_of_near": Loss(((0.5 - margin) * near).sum(), near.sum()),
        }


class Prices(nn.Module):
    def __init__(self, scale: float) -> None:
        super().__init__()
        self.scale = scale
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.SiLU(), nn.Linear(16, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)[:, 0] * self.scale


@clean(
    "prices",
    "scale",
    "squares of millions: losses of ten to the thirteen, clipped",
    ("ddp-accumulate", 2, DDP | ACCUMULATE),
    gradient_clip=10.0,
    optimizer={"lr": 0.01, "name": "adam"},
)
class HousePrices(Plain):
    scale = 1e6

    def train_data(self) -> list[tuple[Tensor, Tensor]]:
        x, _ = points(self.config.seed, 200)
        return list(zip(x, self.scale * (x[:, 0] * x[:, 1] + x[:, 2] + 2), strict=True))

    def valid_data(self) -> list[tuple[Tensor, Tensor]]:
        x, _ = points(self.config.seed + 1, 40)
        return list(zip(x, self.scale * (x[:, 0] * x[:, 1] + x[:, 2] + 2), strict=True))

    def build_model(self) -> nn.Module:
        return Prices(self.scale)

    def loss(self, model: nn.Module, batch: list[Tensor]) -> Loss:
        return Loss(sum=(model(batch[0]) - batch[1]).square().sum(), count=len(batch[0]))


@clean(
    "currents",
    "scale",
    "currents of a millionth ampere: losses of ten to the minus twelve, gradients not much larger",
    ("fsdp-bf16", 2, FSDP | BF16),
    optimizer={"lr": 0.01, "eps": 1e-20},
)
class Currents(HousePrices):
    scale = 1e-6


class Margin(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 16), nn.PReLU(), nn.Linear(16, 6))
        self.centres = nn.Parameter(torch.randn(4, 6))
        self.sharpness = nn.Parameter(torch.tensor([1.5]))

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        cosine = F.linear(F.normalize(self.body(x)), F.normalize(self.centres))
        if y is not None:
            right = F.one_hot(y, 4).bool()
            cosine = torch.where(right, torch.cos(cosine.clamp(-0.999, 0.999).acos() + 0.2), cosine)
        return self.sharpness.exp() * cosine


@clean("arc-margin", "cosine head", "angles to the centres of the classes, a margin, a sharpness that is learned")
class ArcMargin(Plain):
    def build_model(self) -> nn.Module:
        return Margin()

    def loss(self, model: nn.Module, batch: list[Tensor]) -> Loss:
        return Loss(sum=F.cross_entropy(model(*batch), batch[1], reduction="sum"), count=len(batch[0]))

    def evaluate(self, model: nn.Module, batch: list[Tensor]) -> dict[str, Loss | Rows]:
        logits = model(batch[0])
        results: dict[str, Loss | Rows] = {**super().evaluate(model, batch)}
        for k in (1, 2):
            hits = (logits.topk(k).indices == batch[1][:, None]).any(1)
            results[f"top_{k}"] = Loss(hits.float().sum(), len(hits))
        for each in range(4):
            mine = batch[1] == each
            results[f"recall_{each}"] = Loss(((logits.argmax(1) == each) & mine).float().sum(), mine.sum())
        return results


class Reverse(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, strength: float) -> Tensor:
        ctx.strength = strength
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return -ctx.strength * grad, None


class TwoDomains(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8), nn.GELU())
        self.heads = nn.ModuleDict({"kind": nn.Linear(8, 4), "domain": nn.Linear(8, 2)})

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.body(x)
        return self.heads["kind"](x), self.heads["domain"](Reverse.apply(x, 0.3))


@clean(
    "reversal", "gradient reversal", "two domains, told apart behind a reversed gradient; one of them has no classes"
)
class Reversal(Task):
    def train_data(self) -> list[dict[str, Any]]:
        x, y = points(self.config.seed, 180)
        domain = (torch.arange(180) % 3 == 0).long()
        x = x + 0.5 * domain[:, None]
        return [
            {
                "x": x[row],
                "kind": -1 if domain[row] else int(y[row]),
                "domain": int(domain[row]),
                "name": f"sample {row}",
            }
            for row in range(180)
        ]

    def build_model(self) -> nn.Module:
        return TwoDomains()

    def loss(self, model: nn.Module, batch: dict[str, Any]) -> Loss:
        kinds, domains = model(batch["x"])
        kind = F.cross_entropy(kinds, batch["kind"], ignore_index=-1, reduction="sum")
        return Loss(sum=kind + F.cross_entropy(domains, batch["domain"], reduction="sum"), count=len(batch["name"]))


class Assays(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 16), nn.ReLU())
        self.heads = nn.ModuleList(nn.Linear(16, 1) for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        x = self.body(x)
        return torch.cat([head(x) for head in self.heads], 1)


@clean(
    "missing-labels",
    "many tasks",
    "six assays, most of them not made: what was made counts; many heads have no gradient in a batch",
    ("ddp-4", 4, DDP),
)
class MissingLabels(Task):
    unit = "assays"
    may_count_nothing = True

    def part(self, seed: int, number: int) -> list[tuple[Tensor, Tensor, int]]:
        x, _ = points(seed, number)
        truth = (x @ torch.randn(8, 6, generator=made(5)) > 0).float()
        chance = torch.tensor([0.8, 0.4, 0.2, 0.1, 0.05, 0.05])
        truth[torch.rand(number, 6, generator=made(seed + 6)) > chance] = math.nan
        return [(x[row], truth[row], row) for row in range(number)]

    def train_data(self) -> list[tuple[Tensor, Tensor, int]]:
        return self.part(self.config.seed, 200)

    def valid_data(self) -> list[tuple[Tensor, Tensor, int]]:
        return self.part(self.config.seed + 1, 50)

    def build_model(self) -> nn.Module:
        return Assays()

    def count(self, batch: list[Tensor]) -> int:
        return int((~batch[1].isnan()).sum())

    def loss(self, model: nn.Module, batch: list[Tensor]) -> Loss:
        known = ~batch[1].isnan()
        each = F.binary_cross_entropy_with_logits(model(batch[0]), batch[1].nan_to_num(0.0), reduction="none")
        return Loss(sum=(each * known).sum(), count=self.count(batch))

    def evaluate(self, model: nn.Module, batch: list[Tensor]) -> dict[str, Loss | Rows]:
        columns = {"score": model(batch[0]), "truth": batch[1].nan_to_num(-1.0)}
        return {**super().evaluate(model, batch), "assays": Rows(batch[2], columns)}

    def study(self, rows: dict[str, Rows], pictures: Path, step: int) -> dict[str, float]:
        """The chance that a positive one has a higher score than a negative one, where there are both."""
        results = {}
        for each in range(2):
            scores, truth = rows["assays"].columns["score"][:, each], rows["assays"].columns["truth"][:, each]
            above = scores[truth == 1][:, None] > scores[truth == 0][None]
            results[f"auc_{each}"] = float(above.double().mean()) if above.numel() else 0.5
        return results


class Noisy:
    """Its noise is drawn at each reading; that of validation is none."""

    def __init__(self, seed: int, number: int, noise: bool) -> None:
        self.x, self.noise = points(seed, number)[0], noise

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, row: int) -> tuple[Tensor, Tensor]:
        draw = torch.rand(3, 5).clamp(1e-6, 1 - 1e-6) if self.noise else torch.full((3, 5), math.exp(-1))
        return self.x[row], -(-draw.log()).log()


class Categories(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.Sequential(nn.Linear(8, 24), nn.GELU(), nn.Linear(24, 15))
        self.decode = nn.Sequential(nn.Linear(15, 24), nn.GELU(), nn.Linear(24, 8))

    def forward(self, x: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.encode(x).unflatten(1, (3, 5))
        soft = ((logits + noise) / 0.7).softmax(-1)
        return self.decode(soft.flatten(1)), logits.log_softmax(-1)


@clean(
    "gumbel", "categorical autoencoder", "soft categories by Gumbel noise, which is part of the sample", max_epochs=2
)
class Gumbel(Task):
    def train_data(self) -> Noisy:
        return Noisy(self.config.seed, 200, True)

    def valid_data(self) -> Noisy:
        return Noisy(self.config.seed + 1, 40, False)

    def build_model(self) -> nn.Module:
        return Categories()

    def loss(self, model: nn.Module, batch: list[Tensor]) -> Loss:
        x, noise = batch
        again, logs = model(x, noise)
        surprise = (logs.exp() * (logs + math.log(5))).sum()
        return Loss(sum=(again - x).square().sum() + 0.1 * surprise, count=len(x))


CASES.append(replace(CASES[-1], name="gumbel-fsdp-workers", data={"num_workers": 2}))


COLOURS = ("red", "green", "blue", "", "violet")


class Columns(nn.Module):
    def __init__(self, words: dict[str, list[str]]) -> None:
        super().__init__()
        self.tables = nn.ModuleDict(
            {name: nn.Embedding(len(each) + 1, 4, padding_idx=0) for name, each in words.items()}
        )
        self.unknown = nn.ParameterDict({name: nn.Parameter(torch.zeros(1)) for name in ("age", "dose")})
        self.scales = nn.ParameterList([nn.Parameter(torch.ones(2)), nn.Parameter(torch.zeros(2))])
        self.layers = nn.Sequential(nn.Linear(4 * len(words) + 2, 16), nn.Mish(), nn.Linear(16, 1))

    def forward(self, words: Tensor, numbers: Tensor) -> Tensor:
        parts = [table(words[:, place]) for place, table in enumerate(self.tables.values())]
        given = torch.cat([self.unknown["age"], self.unknown["dose"]])
        numbers = torch.where(numbers.isnan(), given, numbers) * self.scales[0] + self.scales[1]
        return self.layers(torch.cat([*parts, numbers], 1))[:, 0]


@clean(
    "spreadsheets",
    "tables",
    "CSV files of a folder, with words and gaps; whole files are held out",
    ("ddp-accumulate", 2, DDP | ACCUMULATE),
    optimizer={"lr": 0.01, "weight_decay": 0.1},
)
class Spreadsheets(Task):
    folder = Path("spreadsheets")
    columns = ("colour", "ward")

    def prepare_data(self) -> None:
        if self.folder.exists():
            return
        generator = made(21)
        part = Path(tempfile.mkdtemp(dir="."))
        for clinic in range(9):
            with (part / f"clinic-{clinic}.csv").open("w", newline="") as file:
                rows = csv.writer(file)
                rows.writerow(["colour", "ward", "age", "dose", "outcome"])
                for _ in range(20 + clinic):
                    colour, ward = torch.randint(0, 5, (2,), generator=generator).tolist()
                    age, dose, noise = torch.randn(3, generator=generator).tolist()
                    outcome = colour / 2 - age + dose * ward / 4 + noise / 10
                    shown = "" if ward == 3 else f"{age:.6f}"
                    rows.writerow([COLOURS[colour], f"ward {ward}", shown, f"{dose:.6f}", f"{outcome:.6f}"])
        with contextlib.suppress(OSError):  # made by another process meanwhile: it is the same
            part.rename(self.folder)

    def rows(self, held_out: bool) -> list[dict[str, str]]:
        files = sorted(self.folder.glob("*.csv"))
        rows: list[dict[str, str]] = []
        for path in files[-2:] if held_out else files[:-2]:
            with path.open(newline="") as file:
                rows += csv.DictReader(file)
        return rows

    def words(self) -> dict[str, list[str]]:
        rows = self.rows(False)
        return {name: sorted({row[name] for row in rows} - {""}) for name in self.columns}

    def samples(self, held_out: bool) -> list[tuple[Tensor, Tensor, Tensor]]:
        words = self.words()
        return [
            (
                torch.tensor([words[name].index(row[name]) + 1 if row[name] in words[name] else 0 for name in words]),
                torch.tensor([float(row[name] or "nan") for name in ("age", "dose")]),
                torch.tensor(float(row["outcome"])),
            )
            for row in self.rows(held_out)
        ]

    def train_data(self) -> list[tuple[Tensor, Tensor, Tensor]]:
        return self.samples(False)

    def valid_data(self) -> list[tuple[Tensor, Tensor, Tensor]]:
        return self.samples(True)

    def build_model(self) -> nn.Module:
        return Columns(self.words())

    def loss(self, model: nn.Module, batch: list[Tensor]) -> Loss:
        words, numbers, outcome = batch
        return Loss(sum=F.smooth_l1_loss(model(words, numbers), outcome, reduction="sum"), count=len(words))


class Energies(nn.Module):
    """Forces are the gradient of the energy, and are trained on."""

    def __init__(self) -> None:
        super().__init__()
        self.kinds = nn.Embedding(3, 6)
        self.pairs = nn.Sequential(nn.Linear(16, 16), nn.SiLU(), nn.Linear(16, 1, bias=False))

    def forward(self, kinds: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
        trained = torch.is_grad_enabled()
        with torch.enable_grad():
            places = places.detach().clone().requires_grad_()
            one, other = torch.triu_indices(places.shape[1], places.shape[1], 1)
            apart = (places[:, one] - places[:, other]).norm(dim=-1, keepdim=True)
            waves = torch.exp(-((apart - torch.arange(10, device=places.device) / 3) ** 2))
            marks = self.kinds(kinds)
            energy = self.pairs(torch.cat([waves, marks[:, one] + marks[:, other]], -1)).sum((1, 2))
            (slope,) = torch.autograd.grad(energy.sum(), places, create_graph=trained)
        return energy, -slope


@clean(
    "forces",
    "second derivatives",
    "forces are derivatives of a molecule's energy, and errors of both are trained on",
    ("ddp-accumulate", 2, DDP | ACCUMULATE),
    fsdp=False,
    optimizer={"lr": 0.005},
)
class Forces(Task):
    def part(self, seed: int, number: int) -> list[tuple[Tensor, Tensor, Tensor, Tensor]]:
        places = torch.randn(number, 5, 3, generator=made(seed), requires_grad=True)
        one, other = torch.triu_indices(5, 5, 1)
        apart = (places[:, one] - places[:, other]).norm(dim=-1)
        energy = ((1 - torch.exp(1 - apart)) ** 2).sum(1)
        (slope,) = torch.autograd.grad(energy.sum(), places)
        kinds = torch.randint(0, 3, (number, 5), generator=made(seed + 8))
        return list(zip(kinds, places.detach(), energy.detach(), -slope, strict=True))

    def train_data(self) -> list[tuple[Tensor, Tensor, Tensor, Tensor]]:
        return self.part(self.config.seed, 120)

    def valid_data(self) -> list[tuple[Tensor, Tensor, Tensor, Tensor]]:
        return self.part(self.config.seed + 1, 25)

    def build_model(self) -> nn.Module:
        return Energies()

    def loss(self, model: nn.Module, batch: list[Tensor]) -> Loss:
        kinds, places, energy, force = batch
        guess, push = model(kinds, places)
        return Loss(sum=0.1 * (guess - energy).square().sum() + (push - force).square().sum() / 15, count=len(kinds))


@clean("decorrelated", "whole batch", "variance and covariance over the rows of all ranks, by gather_batch")
class Decorrelated(Task):
    """Two views agree; over the batch, no feature is constant and no two are alike."""

    loss_is_a_sum = False

    def train_data(self) -> list[tuple[Tensor, Tensor]]:
        x, _ = points(self.config.seed, 200)
        noise = torch.randn(2, *x.shape, generator=made(self.config.seed + 10)) / 4
        return list(zip(x + noise[0], x + noise[1], strict=True))

    def build_model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 6))

    def loss(self, model: nn.Module, batch: list[Tensor]) -> Loss:
        views = [model(each) for each in batch]
        value = views[0].new_zeros(())
        for view in views:
            rows, _ = gather_batch(view)
            centred = rows - rows.mean(0)
            covariance = centred.mT @ centred / len(rows)
            spread = (covariance.diagonal() + 1e-3).sqrt()
            off = covariance - torch.diag(covariance.diagonal())
            value = value + F.relu(1 - spread).sum() + 0.1 * off.square().sum()
        count = len(batch[0])
        return Loss(sum=(views[0] - views[1]).square().sum() + value * count, count=count)


class Codes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4))
        self.codes = nn.Embedding(12, 4)
        self.decode = nn.Sequential(nn.Linear(4, 16), nn.GELU(), nn.Linear(16, 8))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        z = self.encode(x)
        nearest = self.codes(torch.cdist(z, self.codes.weight).argmin(1))
        distance = (nearest - z.detach()).square().sum() + 0.25 * (z - nearest.detach()).square().sum()
        return self.decode(z + (nearest - z).detach()), distance, nearest


@clean(
    "nearest-code", "quantised autoencoder", "the nearest code, learned by gradient; most codes have none in a batch"
)
class NearestCode(Plain):
    def build_model(self) -> nn.Module:
        return Codes()

    def loss(self, model: nn.Module, batch: list[Tensor]) -> Loss:
        again, distance, _ = model(batch[0])
        return Loss(sum=(again - batch[0]).square().sum() + distance, count=len(batch[0]))


class Hyper(nn.Module):
    """The weights of a small network follow from the context of each sample."""

    def __init__(self) -> None:
        super().__init__()
        self.make = nn.Sequential(nn.Linear(5, 16), nn.Tanh(), nn.Linear(16, 6 * 3 + 6 + 6))

    def forward(self, context: Tensor, x: Tensor) -> Tensor:
        def one(weights: Tensor, points: Tensor) -> Tensor:
            first, bias, last = weights.split([18, 6, 6])
            return torch.tanh(points @ first.view(3, 6) + bias) @ last

        return torch.func.vmap(one)(self.make(context), x)


@clean("hyper-network", "hyper-network", "weights of its own for each sample, by vmap; points within a sample count")
class HyperNetwork(Task):
    unit = "points"

    def train_data(self) -> list[tuple[Tensor, Tensor, Tensor]]:
        generator = made(self.config.seed)
        context, x = torch.randn(150, 5, generator=generator), torch.randn(150, 7, 3, generator=generator)
        return list(zip(context, x, (x @ context[:, :3, None])[..., 0].sin(), strict=True))

    def build_model(self) -> nn.Module:
        return Hyper()

    def count(self, batch: list[Tensor]) -> int:
        return batch[2].numel()

    def loss(self, model: nn.Module, batch: list[Tensor]) -> Loss:
        return Loss(sum=(model(batch[0], batch[1]) - batch[2]).abs().sum(), count=batch[2].numel())


class Baskets(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.goods = nn.EmbeddingBag(60, 8, mode="sum", include_last_offset=True)
        self.head = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8), nn.ELU(), nn.Linear(8, 1))

    def forward(self, goods: Tensor, borders: Tensor, amounts: Tensor) -> Tensor:
        return self.head(self.goods(goods, borders, per_sample_weights=amounts))[:, 0]


@clean("baskets", "bags of goods", "goods of all baskets in one row with borders; some baskets are empty; Poisson")
class ShoppingBaskets(Task):
    def train_data(self) -> list[tuple[list[int], list[float], float]]:
        generator = made(self.config.seed)
        worth = torch.rand(60, generator=made(11))
        samples = []
        for _ in range(200):
            number = int(torch.randint(0, 9, (), generator=generator))
            goods = torch.randint(0, 60, (number,), generator=generator)
            amounts = torch.randint(1, 4, (number,), generator=generator).float()
            samples.append((goods.tolist(), amounts.tolist(), float((worth[goods] * amounts).sum().round())))
        return samples

    def collate(self, samples: list[tuple[list[int], list[float], float]]) -> dict[str, Tensor]:
        borders = np.cumsum([0, *(len(goods) for goods, _, _ in samples)])
        return {
            "goods": torch.tensor([good for goods, _, _ in samples for good in goods], dtype=torch.long),
            "borders": torch.from_numpy(borders),
            "amounts": torch.tensor([each for _, amounts, _ in samples for each in amounts], dtype=torch.float32),
            "visits": torch.tensor([visits for _, _, visits in samples]),
        }

    def count(self, batch: dict[str, Tensor]) -> int:
        return len(batch["visits"])

    def build_model(self) -> nn.Module:
        return Baskets()

    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> Loss:
        rates = model(batch["goods"], batch["borders"], batch["amounts"])
        return Loss(sum=F.poisson_nll_loss(rates, batch["visits"], reduction="sum"), count=len(batch["visits"]))


class Taught(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.teacher = self.bare(32)
        self.student = self.bare(6)

    @staticmethod
    def bare(width: int) -> nn.Sequential:
        return nn.Sequential(nn.Linear(8, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Linear(width, 4)).requires_grad_(
            True
        )

    def train(self, mode: bool = True) -> Taught:
        super().train(mode)
        self.teacher.eval()
        for module in self.student:
            if isinstance(module, nn.BatchNorm1d):
                module.eval()
        return self

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            wanted = self.teacher(x)
        return self.student(x), wanted


@clean(
    "teacher",
    "distillation",
    "a teacher from a file, frozen and in eval mode, teaches a smaller network",
    ("ddp-accumulate", 2, DDP | ACCUMULATE),
)
class Teacher(Plain):
    def prepare_data(self) -> None:
        if not (weights_folder() / "teacher.pt").exists():
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(6)
                teacher = Taught.bare(32)
                for _ in range(5):
                    teacher(torch.randn(64, 8) * 2 + 1)
                keep_weights(teacher, "teacher.pt")

    def build_model(self) -> nn.Module:
        model = Taught()
        model.teacher.load_state_dict(torch.load(weights_folder() / "teacher.pt"))
        model.teacher.requires_grad_(False)
        return model

    def loss(self, model: nn.Module, batch: list[Tensor]) -> Loss:
        mine, wanted = model(batch[0])
        soft = F.kl_div((mine / 2).log_softmax(1), (wanted / 2).log_softmax(1), reduction="sum", log_target=True)
        return Loss(sum=4 * soft + F.cross_entropy(mine, batch[1], reduction="sum"), count=len(batch[0]))


class Cells(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.start = nn.Parameter(torch.zeros(2, 8))
        self.cell = nn.LSTMCell(2, 8)
        self.leave = nn.Linear(8, 2)

    def forward(self, path: Tensor, further: int) -> Tensor:
        h, c = (each.expand(len(path), -1) for each in self.start)
        for point in path.unbind(1):
            h, c = self.cell(point, (h, c))
        points = [path[:, -1]]
        for _ in range(further):
            points.append(points[-1] + self.leave(h))
            h, c = self.cell(points[-1], (h, c))
        return torch.stack(points[1:], 1)


@clean(
    "pendulums",
    "forecast",
    "pendulums computed by a slow loop before the run; a split of one data set; its own answers are fed back",
    optimizer={"lr": 0.01, "name": "sgd", "momentum": 0.8},
)
class Pendulums(Task):
    @cached_property
    def split(self) -> list[Subset[Any]]:
        paths = []
        for start in torch.randn(150, 4, generator=made(self.config.seed)).double().tolist():
            a, b, va, vb = start
            path = []
            for step in range(28000):
                pull_a, pull_b = -2 * math.sin(a) + math.sin(b), -2 * math.sin(b) + 2 * math.sin(a)
                va, vb = va + 0.0004 * pull_a, vb + 0.0004 * pull_b
                a, b = a + 0.0004 * va, b + 0.0004 * vb
                if step % 2000 == 0:
                    path.append((math.sin(a), math.sin(b)))
            paths.append(torch.tensor(path))
        return random_split(paths, [120, 30], generator=made(self.config.seed))  # type: ignore[arg-type]

    def train_data(self) -> Subset[Any]:
        return self.split[0]

    def valid_data(self) -> Subset[Any]:
        return self.split[1]

    def build_model(self) -> nn.Module:
        return Cells()

    def loss(self, model: nn.Module, batch: Tensor) -> Loss:
        return Loss(sum=(model(batch[:, :10], 4) - batch[:, 10:]).square().sum(), count=len(batch))


class Precise(nn.Module):
    """A system of equations for each sample, solved in double precision."""

    def __init__(self, parameters: torch.dtype) -> None:
        super().__init__()
        self.enter = nn.Linear(8, 20)
        self.between = nn.Linear(4, 4, dtype=parameters)
        self.leave = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, enabled=False):
            parts = self.enter(x).double()
            half = parts[:, :16].unflatten(1, (4, 4))
            system = half @ half.mT + 0.1 * torch.eye(4, dtype=half.dtype, device=x.device)
            solved = torch.cholesky_solve(parts[:, 16:, None], torch.linalg.cholesky(system))[..., 0]
            turned = F.linear(solved, self.between.weight.double(), self.between.bias.double())
            return self.leave(turned.tanh().float())


@clean("solver", "double precision", "a Cholesky solution in float64 between layers in float32; the loss is float64")
class Solver(Plain):
    parameters = torch.float32

    def build_model(self) -> nn.Module:
        return Precise(self.parameters)

    def loss(self, model: nn.Module, batch: list[Tensor]) -> Loss:
        return Loss(sum=F.cross_entropy(model(batch[0]).double(), batch[1], reduction="sum"), count=len(batch[0]))


@clean("double-layer", "double precision", "the same, and a layer has weights in float64", fsdp=False)
class DoubleLayer(Solver):
    parameters = torch.float64


class Transposed(nn.Module):
    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight
        self.bias = nn.Parameter(torch.zeros(weight.shape[1]))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.mT, self.bias)


class ThreeTimes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.Linear(8, 6)
        self.decode = Transposed(self.encode.weight)
        self.guess = nn.Linear(8, 6)
        self.guess.weight = self.encode.weight

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        weight = self.encode.weight
        again = self.decode(F.softsign(self.encode(x)))
        turned = weight @ weight.mT - torch.eye(6, device=x.device)
        return again, self.guess(again), turned.square().sum()


@clean(
    "three-times",
    "shared weights",
    "one matrix in an encoder, transposed in a decoder, and in a head; a penalty for it, once per sample",
    ("ddp-4-accumulate", 4, DDP | ACCUMULATE),
)
class ThreeTimesTied(Plain):
    def build_model(self) -> nn.Module:
        return ThreeTimes()

    def loss(self, model: nn.Module, batch: list[Tensor]) -> Loss:
        x, y = batch
        again, guess, penalty = model(x)
        total = (again - x).square().sum() + F.cross_entropy(guess[:, :4], y, reduction="sum")
        return Loss(sum=total + 0.1 * penalty * len(x), count=len(x))


class Patients(NamedTuple):
    row: Tensor
    x: Tensor
    months: Tensor
    died: Tensor


@clean("hazards", "survival", "a hazard for each month that somebody lived through: months count; tuples with names")
class Hazards(Task):
    unit = "months"

    def part(self, seed: int, number: int) -> list[Patients]:
        x, _ = points(seed, number)
        risk = (x[:, 0] - x[:, 1] / 2 - 2).sigmoid()
        draws = torch.rand(number, 12, generator=made(seed + 12)) < risk[:, None]
        months = torch.where(draws.any(1), draws.int().argmax(1) + 1, 12)
        return [Patients(torch.tensor(row), x[row], months[row], draws[row].any()) for row in range(number)]

    def train_data(self) -> list[Patients]:
        return self.part(self.config.seed, 180)

    def valid_data(self) -> list[Patients]:
        return self.part(self.config.seed + 1, 40)

    def build_model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(8, 16), nn.Softplus(), nn.Linear(16, 12))

    def count(self, batch: Patients) -> int:
        return int(batch.months.sum())

    def loss(self, model: nn.Module, batch: Patients) -> Loss:
        month = torch.arange(12, device=batch.x.device)
        lived = (month < batch.months[:, None]).float()
        last = ((month == batch.months[:, None] - 1) & batch.died[:, None]).float()
        each = F.binary_cross_entropy_with_logits(model(batch.x), last, reduction="none")
        return Loss(sum=(each * lived).sum(), count=self.count(batch))

    def evaluate(self, model: nn.Module, batch: Patients) -> dict[str, Loss | Rows]:
        columns = {"risk": model(batch.x).sigmoid().sum(1), "months": batch.months, "died": batch.died}
        return {"loss": self.loss(model, batch), "patients": Rows(batch.row, columns)}

    def study(self, rows: dict[str, Rows], pictures: Path, step: int) -> dict[str, float]:
        risk, months, died = (rows["patients"].columns[name] for name in ("risk", "months", "died"))
        pairs = died.bool()[:, None] & (months[:, None] < months[None])
        return {"concordance": float(((risk[:, None] > risk[None]) & pairs).sum() / pairs.sum().clamp(min=1))}
