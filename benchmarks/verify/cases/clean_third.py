"""Correct tasks as their users write them: with jumps, long chains, rare rows, frozen parts, and data that is drawn anew."""

from __future__ import annotations

import copy
import itertools
import math
import os
import random
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import torch
import torch.nn.functional as F
from case import ACCUMULATE, BF16, CASES, DDP, FSDP, UNUSED, clean
from plain import PAD, VOCABULARY, Plain, Sentences, pad, sentences
from torch import Tensor, nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
from torch.nn.utils.rnn import pad_sequence

from shardwise import Loss, Rows, Task, gather_batch


def made(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


class Made:
    """Samples that a function makes when they are read; what it draws, it draws from the generators of the day."""

    def __init__(self, number: int, make: Callable[[int], Any]) -> None:
        self.number, self.make = number, make

    def __len__(self) -> int:
        return self.number

    def __getitem__(self, index: int) -> Any:
        if not 0 <= index < self.number:
            raise IndexError(index)
        return self.make(index)


def area_under_curve(scores: Tensor, labels: Tensor) -> float:
    """How often something clicked on is above something that is not; half of ties."""
    yes, no = scores[labels > 0.5].double(), scores[labels <= 0.5].double()
    if not len(yes) or not len(no):
        return 0.5
    above = (yes[:, None] > no[None]).double() + 0.5 * (yes[:, None] == no[None]).double()
    return float(above.mean())


# Language


@clean(
    "third-electra",
    "encoder",
    "ElectraForPreTraining: which tokens were replaced; replacements are drawn from torch in __getitem__; usual dropout",
    ("ddp-accumulate", 2, DDP | ACCUMULATE),
    ("fsdp-bf16", 2, FSDP | BF16),
    optimizer={"lr": 0.002, "weight_decay": 0.1},
    scheduler={"name": "linear_warmup", "warmup_ratio": 0.1},
    gradient_clip=1.0,
)
class Electra(Task):
    unit = "tokens"

    @staticmethod
    def _spoilt(tokens: Tensor) -> tuple[Tensor, Tensor]:
        other = torch.randint(1, VOCABULARY, tokens.shape)
        seen = torch.where(torch.rand(len(tokens)) < 0.2, other, tokens)
        return seen, (seen != tokens).float()

    def train_data(self) -> Made:
        texts = sentences(self.config.seed, 300, 4, 20)
        return Made(300, lambda index: self._spoilt(texts[index]))

    def valid_data(self) -> list[tuple[Tensor, Tensor]]:
        texts = sentences(self.config.seed + 51, 37, 4, 20)
        with torch.random.fork_rng():
            torch.manual_seed(9)
            return [self._spoilt(text) for text in texts]

    def collate(self, samples: list[tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
        tokens = pad([seen for seen, _ in samples])
        labels = pad_sequence([spoilt for _, spoilt in samples], batch_first=True, padding_value=0.0)
        return {"input_ids": tokens, "attention_mask": (tokens != PAD).long(), "labels": labels}

    def count(self, batch: dict[str, Tensor]) -> int:
        return int(batch["attention_mask"].sum())

    def build_model(self) -> nn.Module:
        from transformers import ElectraConfig, ElectraForPreTraining

        return ElectraForPreTraining(
            ElectraConfig(
                vocab_size=VOCABULARY, embedding_size=16, hidden_size=24, num_hidden_layers=3, num_attention_heads=2,
                intermediate_size=48, max_position_embeddings=40, pad_token_id=PAD,
            )
        )  # fmt: skip

    def _logits(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits.float()

    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> Loss:
        there = batch["attention_mask"].bool()
        logits = self._logits(model, batch)
        total = F.binary_cross_entropy_with_logits(logits[there], batch["labels"][there], reduction="sum")
        return Loss(sum=total, count=self.count(batch))

    def evaluate(self, model: nn.Module, batch: dict[str, Tensor]) -> dict[str, Loss]:
        there, spoilt = batch["attention_mask"].bool(), batch["labels"] > 0.5
        logits = self._logits(model, batch)
        found = (torch.sigmoid(logits) > 0.3) & spoilt
        total = F.binary_cross_entropy_with_logits(logits[there], batch["labels"][there], reduction="sum")
        return {
            "loss": Loss(sum=total, count=int(there.sum())),
            "recall": Loss(sum=found.sum().float(), count=int(spoilt.sum())),
        }


END = VOCABULARY - 1


@clean(
    "third-answers",
    "decoder",
    "GPT2LMHeadModel, tied: only the tokens of answers have a loss and count; short answers, long questions",
    ("pipeline", 2, {"pipeline": {"stages": 2}, "gradient_accumulation": 4}),
    ("fsdp-4-accumulate", 4, FSDP | ACCUMULATE),
    optimizer={"lr": 0.003, "betas": [0.9, 0.95]},
    gradient_clip=0.5,
)
class Answers(Task):
    unit = "tokens"

    def _texts(self, seed: int, number: int) -> list[dict[str, Tensor]]:
        generator, texts = made(seed), []
        for _ in range(number):
            length = int(torch.randint(3, 14, (), generator=generator))
            question = torch.randint(1, END, (length,), generator=generator)
            answer = torch.cat([question[question > 16].flip(0)[:5], torch.tensor([END])])
            labels = torch.cat([torch.full_like(question, -100), answer])
            texts.append({"tokens": torch.cat([question, answer]), "labels": labels})
        return texts

    def train_data(self) -> list[dict[str, Tensor]]:
        return self._texts(self.config.seed, 260)

    def valid_data(self) -> list[dict[str, Tensor]]:
        return self._texts(self.config.seed + 31, 19)

    def collate(self, samples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        labels = [sample["labels"] for sample in samples]
        return {
            "tokens": pad([sample["tokens"] for sample in samples]),
            "labels": pad_sequence(labels, batch_first=True, padding_value=-100),
        }

    def count(self, batch: dict[str, Tensor]) -> int:
        return int((batch["labels"][:, 1:] != -100).sum())

    def build_model(self) -> nn.Module:
        from transformers import GPT2Config, GPT2LMHeadModel

        return GPT2LMHeadModel(
            GPT2Config(
                vocab_size=VOCABULARY, n_positions=32, n_embd=24, n_layer=4, n_head=3, use_cache=False,
                bos_token_id=None, eos_token_id=END,
            )
        )  # fmt: skip

    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> Loss:
        logits, labels = model(input_ids=batch["tokens"]).logits[:, :-1], batch["labels"][:, 1:]
        total = F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), ignore_index=-100, reduction="sum")
        return Loss(sum=total, count=self.count(batch))

    def derived_metrics(self, metrics: dict[str, float]) -> dict[str, float]:
        return {"perplexity": math.exp(min(metrics["loss"], 50.0))}


class Preference(nn.Module):
    """How much likelier a text has become than it was; the model as it was is frozen in here."""

    def __init__(self, policy: nn.Module) -> None:
        super().__init__()
        self.policy = policy
        self.reference = copy.deepcopy(policy).requires_grad_(False)

    def forward(self, tokens: Tensor, answered: Tensor) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            before = of_answer(self.reference(input_ids=tokens).logits, tokens, answered)
        return of_answer(self.policy(input_ids=tokens).logits, tokens, answered), before


def of_answer(logits: Tensor, tokens: Tensor, answered: Tensor) -> Tensor:
    each = F.log_softmax(logits[:, :-1].float(), dim=-1).gather(-1, tokens[:, 1:, None])[..., 0]
    return (each * answered[:, 1:]).sum(1)


@clean(
    "third-preferences",
    "preferences",
    "DPO on a LlamaForCausalLM: a frozen copy lies beside it, and at first both are the same",
    ("ddp-4", 4, DDP),
    ("ddp-accumulate", 2, DDP | ACCUMULATE),
    optimizer={"lr": 0.0005, "weight_decay": 0.0},
    gradient_clip=1.0,
)
class Dpo(Task):
    def _pairs(self, seed: int, number: int) -> list[dict[str, Tensor]]:
        generator, pairs = made(seed), []
        for question in sentences(seed, number, 2, 8):
            lengths = torch.randint(1, 7, (2,), generator=generator).tolist()
            steps = torch.arange(1, lengths[0] + 1) * 2
            good = (question[-1] + steps) % (VOCABULARY - 1) + 1
            bad = torch.randint(1, VOCABULARY, (lengths[1],), generator=generator)
            pairs.append({"question": question, "good": good, "bad": bad})
        return pairs

    def train_data(self) -> list[dict[str, Tensor]]:
        return self._pairs(self.config.seed, 220)

    def valid_data(self) -> list[dict[str, Tensor]]:
        return self._pairs(self.config.seed + 8, 27)

    def collate(self, samples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        """All the better answers, then all the worse ones."""
        texts, answered = [], []
        for which in ("good", "bad"):
            for sample in samples:
                texts.append(torch.cat([sample["question"], sample[which]]))
                answered.append(torch.cat([torch.zeros(len(sample["question"])), torch.ones(len(sample[which]))]))
        return {"tokens": pad(texts), "answered": pad_sequence(answered, batch_first=True)}

    def count(self, batch: dict[str, Tensor]) -> int:
        return len(batch["tokens"]) // 2

    def build_model(self) -> nn.Module:
        from transformers import LlamaConfig, LlamaForCausalLM

        return Preference(
            LlamaForCausalLM(
                LlamaConfig(
                    vocab_size=VOCABULARY, hidden_size=24, intermediate_size=48, num_hidden_layers=2,
                    num_attention_heads=4, num_key_value_heads=1, max_position_embeddings=32, pad_token_id=PAD,
                    bos_token_id=None, eos_token_id=None, use_cache=False, initializer_range=0.2,
                )
            )
        )  # fmt: skip

    def _margins(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        now, before = model(batch["tokens"], batch["answered"])
        good, bad = (now - before).chunk(2)
        return 0.3 * (good - bad)

    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> Loss:
        return Loss(sum=-F.logsigmoid(self._margins(model, batch)).sum(), count=self.count(batch))

    def evaluate(self, model: nn.Module, batch: dict[str, Tensor]) -> dict[str, Loss]:
        margins, count = self._margins(model, batch), self.count(batch)
        return {
            "loss": Loss(sum=-F.logsigmoid(margins).sum(), count=count),
            "margin": Loss(sum=margins.sum(), count=count),
            "preferred": Loss(sum=(margins > 0).float().sum(), count=count),
        }


class Prompted(nn.Module):
    """A frozen model; what is trained are six vectors before the text, a gain for each feature, and a head."""

    def __init__(self, language: nn.Module, width: int, classes: int) -> None:
        super().__init__()
        self.language = language.requires_grad_(False)
        self.prompt = nn.Parameter(0.1 * torch.randn(6, width))
        self.gain = nn.Parameter(torch.ones(width))
        self.head = nn.Linear(width, classes)

    def forward(self, tokens: Tensor) -> Tensor:
        prompt = self.prompt.expand(len(tokens), -1, -1)
        words = self.language.get_input_embeddings()(tokens)
        seen = self.language(inputs_embeds=torch.cat([prompt, words * self.gain], dim=1)).last_hidden_state
        last = len(self.prompt) + (tokens != PAD).sum(1) - 1
        return self.head(seen[torch.arange(len(tokens)), last])


@clean(
    "third-prompt-tuning",
    "prompt tuning",
    "a frozen GPT2Model: trained are vectors before the text, a gain and a head; nearly all parameters are not",
    ("fsdp-accumulate", 2, FSDP | ACCUMULATE),
    ("ddp-4", 4, DDP),
    optimizer={"lr": 0.03, "weight_decay": 0.0},
    scheduler={"name": "constant", "warmup_steps": 2},
)
class PromptTuning(Task):
    def _texts(self, seed: int, number: int) -> list[tuple[Tensor, int]]:
        texts = sentences(seed, number, 3, 16)
        return [(text, int((text > 20).sum()) % 3) for text in texts]

    def train_data(self) -> list[tuple[Tensor, int]]:
        return self._texts(self.config.seed, 240)

    def valid_data(self) -> list[tuple[Tensor, int]]:
        return self._texts(self.config.seed + 5, 33)

    def collate(self, samples: list[tuple[Tensor, int]]) -> tuple[Tensor, Tensor]:
        return pad([text for text, _ in samples]), torch.tensor([label for _, label in samples])

    def build_model(self) -> nn.Module:
        from transformers import GPT2Config, GPT2Model

        config = GPT2Config(
            vocab_size=VOCABULARY, n_positions=32, n_embd=24, n_layer=2, n_head=2, use_cache=False,
            initializer_range=0.25, bos_token_id=None, eos_token_id=None,
        )  # fmt: skip
        return Prompted(GPT2Model(config), 24, 3)

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Loss:
        tokens, labels = batch
        total = F.cross_entropy(model(tokens), labels, reduction="sum", label_smoothing=0.05)
        return Loss(sum=total, count=len(tokens))


class SkipGram(nn.Module):
    def __init__(self, words: int, width: int) -> None:
        super().__init__()
        self.inner, self.outer = nn.Embedding(words, width), nn.Embedding(words, width)
        nn.init.uniform_(self.inner.weight, -0.5, 0.5)
        nn.init.zeros_(self.outer.weight)

    def forward(self, centre: Tensor, others: Tensor) -> Tensor:
        return (self.outer(others) * self.inner(centre)[:, None]).sum(-1)


@clean(
    "third-skip-gram",
    "negative sampling",
    "word vectors: the outer table begins at zero, others' words are drawn in __getitem__, ends of a text have fewer neighbours",
    ("ddp-4-accumulate", 4, DDP | ACCUMULATE),
    optimizer={"name": "sgd", "lr": 0.5, "weight_decay": 0.0},
    scheduler={"name": "linear_warmup", "warmup_steps": 0},
    batch_size=16,
)
class WordVectors(Task):
    unit = "pairs"
    words = 1500

    def _text(self, seed: int, number: int) -> Tensor:
        """Frequent words are frequent; what follows a word lies near it."""
        starts = (torch.rand(number, generator=made(seed)) ** 3 * self.words).long()
        return (starts + torch.arange(number) // 8 * 37) % self.words

    def _sample(self, text: Tensor, place: int) -> dict[str, Tensor]:
        near = [at for at in (place - 2, place - 1, place + 1, place + 2) if 0 <= at < len(text)]
        others = torch.full((4,), -1)
        others[: len(near)] = text[near]
        return {"centre": text[place], "near": others, "far": torch.randint(0, self.words, (12,))}

    def train_data(self) -> Made:
        text = self._text(self.config.seed, 400)
        return Made(len(text), lambda place: self._sample(text, place))

    def valid_data(self) -> list[dict[str, Tensor]]:
        text = self._text(self.config.seed + 3, 22)
        with torch.random.fork_rng():
            torch.manual_seed(4)
            return [self._sample(text, place) for place in range(len(text))]

    def count(self, batch: dict[str, Tensor]) -> int:
        return int((batch["near"] >= 0).sum())

    def build_model(self) -> nn.Module:
        return SkipGram(self.words, 12)

    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> Loss:
        there = batch["near"] >= 0
        scores = model(batch["centre"], torch.cat([batch["near"].clamp(min=0), batch["far"]], dim=1))
        near, far = scores.split([4, 12], dim=1)
        return Loss(sum=-F.logsigmoid(near[there]).sum() - F.logsigmoid(-far).sum(), count=self.count(batch))


# Sounds


@clean(
    "third-wav2vec2-ctc",
    "speech",
    "Wav2Vec2ForCTC and its own summed loss: waves of any length with a mask, weight norm in its places; labels count",
    ("ddp-accumulate", 2, DDP | ACCUMULATE),
    optimizer={"lr": 0.002},
    scheduler={"name": "cosine_warmup", "warmup_steps": 3, "min_lr_ratio": 0.1},
    gradient_clip=5.0,
    batch_size=4,
)
class SpokenLetters(Task):
    unit = "letters"
    letters = 8

    def _waves(self, seed: int, number: int) -> list[tuple[Tensor, Tensor]]:
        generator, waves = made(seed), []
        for _ in range(number):
            said = torch.randint(
                1, self.letters, (int(torch.randint(1, 6, (), generator=generator)),), generator=generator
            )
            tones = []
            for letter in said.tolist():
                time_ = torch.arange(int(torch.randint(90, 160, (), generator=generator)))
                tones.append(torch.sin(time_ * (0.1 + 0.11 * letter)))
            wave = torch.cat(tones)
            waves.append((wave + 0.1 * torch.randn(len(wave), generator=generator), said))
        return waves

    def train_data(self) -> list[tuple[Tensor, Tensor]]:
        return self._waves(self.config.seed, 120)

    def valid_data(self) -> list[tuple[Tensor, Tensor]]:
        return self._waves(self.config.seed + 70, 11)

    def collate(self, samples: list[tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
        waves, said = zip(*samples, strict=True)
        there = [torch.ones(len(wave), dtype=torch.long) for wave in waves]
        return {
            "input_values": pad_sequence(list(waves), batch_first=True),
            "attention_mask": pad_sequence(there, batch_first=True),
            "labels": pad_sequence(list(said), batch_first=True, padding_value=-100),
        }

    def count(self, batch: dict[str, Tensor]) -> int:
        return int((batch["labels"] >= 0).sum())

    def build_model(self) -> nn.Module:
        from transformers import Wav2Vec2Config, Wav2Vec2ForCTC

        return Wav2Vec2ForCTC(
            Wav2Vec2Config(
                vocab_size=self.letters, pad_token_id=0, bos_token_id=None, eos_token_id=None, hidden_size=24,
                num_hidden_layers=2, num_attention_heads=2, intermediate_size=48, conv_dim=(16, 16),
                conv_kernel=(10, 4), conv_stride=(5, 2), num_feat_extract_layers=2, feat_extract_norm="layer",
                do_stable_layer_norm=True, num_conv_pos_embeddings=8, num_conv_pos_embedding_groups=2,
                mask_time_prob=0.0, mask_feature_prob=0.0, apply_spec_augment=False, layerdrop=0.0,
                ctc_loss_reduction="sum", ctc_zero_infinity=True,
            )
        )  # fmt: skip

    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> Loss:
        return Loss(sum=model(**batch).loss, count=self.count(batch))


class LineReader(nn.Module):
    def __init__(self, letters: int) -> None:
        super().__init__()
        self.convolutions = nn.Sequential(
            nn.Conv2d(1, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8, momentum=None), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(8, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16, momentum=0.3), nn.ReLU(),
            nn.MaxPool2d((2, 1)),
        )  # fmt: skip
        self.rnn = nn.LSTM(48, 20, bidirectional=True, batch_first=True)
        self.head = nn.Linear(40, letters)

    def forward(self, pictures: Tensor) -> Tensor:
        seen = self.convolutions(pictures).flatten(1, 2).transpose(1, 2)
        return self.head(self.rnn(seen)[0]).log_softmax(-1)


@clean(
    "third-line-reader",
    "batch norm",
    "letters in a picture by CTC: batch norm with a cumulative average, then an LSTM; some pictures show no letter",
    ("ddp-4", 4, DDP),
    optimizer={"name": "adam", "lr": 0.005, "weight_decay": 0.0},
)
class Lines(Task):
    letters = 7

    def _lines(self, seed: int, number: int) -> list[tuple[Tensor, Tensor]]:
        shapes = torch.rand(self.letters, 12, 6, generator=made(3)).round()
        generator, lines = made(seed), []
        for _ in range(number):
            written = torch.randint(
                1, self.letters, (int(torch.randint(0, 5, (), generator=generator)),), generator=generator
            )
            picture = 0.3 * torch.randn(1, 12, 36, generator=generator)
            for place, letter in enumerate(written.tolist()):
                left = 8 * place + int(torch.randint(0, 5, (), generator=generator))
                picture[0, :, left : left + 6] += shapes[letter]
            lines.append((picture, written))
        return lines

    def train_data(self) -> list[tuple[Tensor, Tensor]]:
        return self._lines(self.config.seed, 200)

    def valid_data(self) -> list[tuple[Tensor, Tensor]]:
        return self._lines(self.config.seed + 90, 26)

    def collate(self, samples: list[tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
        return {
            "pictures": torch.stack([picture for picture, _ in samples]),
            "written": torch.cat([written for _, written in samples]),
            "lengths": torch.tensor([len(written) for _, written in samples]),
        }

    def build_model(self) -> nn.Module:
        return LineReader(self.letters)

    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> Loss:
        likely = model(batch["pictures"]).transpose(0, 1)
        widths = torch.full((likely.shape[1],), likely.shape[0])
        total = F.ctc_loss(likely, batch["written"], widths, batch["lengths"], reduction="sum", zero_infinity=True)
        return Loss(sum=total, count=likely.shape[1])


class Listener(nn.Module):
    """The targets of hidden frames are the nearest of random codes after a random projection; neither is trained."""

    def __init__(self, bands: int, codes: int) -> None:
        super().__init__()
        self.register_buffer("projection", torch.randn(bands, 6))
        self.register_buffer("codes", F.normalize(torch.randn(codes, 6), dim=-1))
        self.hidden = nn.Parameter(0.1 * torch.randn(bands))
        self.into = nn.Linear(bands, 24)
        layer = nn.TransformerEncoderLayer(24, 4, 48, dropout=0.1, batch_first=True, norm_first=True, activation="gelu")
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(24, codes)

    def forward(self, frames: Tensor, hidden: Tensor, padding: Tensor) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            targets = (F.normalize(frames @ self.projection, dim=-1) @ self.codes.T).argmax(-1)
        seen = torch.where(hidden[..., None], self.hidden.to(frames.dtype), frames)
        return self.head(self.encoder(self.into(seen), src_key_padding_mask=padding)), targets


@clean(
    "third-random-codes",
    "quantised targets",
    "frames of sounds, spans of them hidden anew in each epoch; targets are the nearest of random codes kept in buffers",
    ("ddp-4", 4, DDP),
    ("fsdp-accumulate", 2, FSDP | ACCUMULATE),
    optimizer={"lr": 0.002, "betas": [0.9, 0.98], "eps": 1e-6},
    gradient_clip=1.0,
)
class RandomCodes(Task):
    unit = "frames"
    bands = 10

    def _sounds(self, seed: int, number: int) -> list[Tensor]:
        generator = made(seed)
        lengths = torch.randint(6, 25, (number,), generator=generator).tolist()
        return [torch.randn(length, self.bands, generator=generator).cumsum(0) * 0.5 for length in lengths]

    @staticmethod
    def _hide(frames: Tensor) -> tuple[Tensor, Tensor]:
        hidden = torch.zeros(len(frames), dtype=torch.bool)
        for _ in range(1 + len(frames) // 10):
            start = random.randrange(len(frames) - 2)
            hidden[start : start + 3] = True
        return frames, hidden

    def train_data(self) -> Made:
        sounds = self._sounds(self.config.seed, 180)
        return Made(len(sounds), lambda index: self._hide(sounds[index]))

    def valid_data(self) -> list[tuple[Tensor, Tensor]]:
        return [(frames, torch.arange(len(frames)) % 4 == 1) for frames in self._sounds(self.config.seed + 6, 18)]

    def collate(self, samples: list[tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
        frames, hidden = zip(*samples, strict=True)
        padding = [torch.zeros(len(each), dtype=torch.bool) for each in frames]
        return {
            "frames": pad_sequence(list(frames), batch_first=True),
            "hidden": pad_sequence(list(hidden), batch_first=True),
            "padding": pad_sequence(padding, batch_first=True, padding_value=True),
        }

    def count(self, batch: dict[str, Tensor]) -> int:
        return int(batch["hidden"].sum())

    def build_model(self) -> nn.Module:
        return Listener(self.bands, 24)

    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> Loss:
        logits, targets = model(batch["frames"], batch["hidden"], batch["padding"])
        hidden = batch["hidden"]
        return Loss(sum=F.cross_entropy(logits[hidden], targets[hidden], reduction="sum"), count=self.count(batch))


# Pictures


@clean(
    "third-masked-pictures",
    "masked autoencoder",
    "ViTMAEForPreTraining: what is hidden follows from noise that is drawn with the sample; its positions are frozen",
    ("ddp-4", 4, DDP),
    ("ddp-accumulate", 2, DDP | ACCUMULATE),
    optimizer={"lr": 0.003, "betas": [0.9, 0.95], "weight_decay": 0.05},
)
class MaskedPictures(Task):
    unit = "patches"

    def _pictures(self, seed: int, number: int) -> Tensor:
        generator = made(seed)
        waves = torch.rand(number, 3, 2, 1, 1, generator=generator) * 0.8
        down, across = torch.meshgrid(torch.arange(16.0), torch.arange(16.0), indexing="ij")
        return torch.sin(waves[:, :, 0] * down + waves[:, :, 1] * across)

    def train_data(self) -> Made:
        pictures = self._pictures(self.config.seed, 160)
        return Made(160, lambda index: (pictures[index], torch.rand(16)))

    def valid_data(self) -> list[tuple[Tensor, Tensor]]:
        pictures = self._pictures(self.config.seed + 9, 13)
        return [(picture, torch.rand(16, generator=made(index))) for index, picture in enumerate(pictures)]

    def build_model(self) -> nn.Module:
        from transformers import ViTMAEConfig, ViTMAEForPreTraining

        return ViTMAEForPreTraining(
            ViTMAEConfig(
                image_size=16, patch_size=4, hidden_size=24, num_hidden_layers=2, num_attention_heads=3,
                intermediate_size=48, decoder_hidden_size=16, decoder_num_hidden_layers=1,
                decoder_num_attention_heads=2, decoder_intermediate_size=32, mask_ratio=0.75,
            )
        )  # fmt: skip

    def count(self, batch: list[Tensor]) -> int:
        return 12 * len(batch[0])

    def loss(self, model: nn.Module, batch: list[Tensor]) -> Loss:
        pictures, noise = batch
        out = model(pictures, noise=noise)
        patches = pictures.unflatten(2, (4, 4)).unflatten(4, (4, 4)).permute(0, 2, 4, 3, 5, 1).flatten(3).flatten(1, 2)
        patches = (patches - patches.mean(-1, keepdim=True)) / (patches.var(-1, keepdim=True) + 1e-6).sqrt()
        errors = (out.logits.float() - patches).square().mean(-1)
        return Loss(sum=(errors * out.mask).sum(), count=self.count(batch))


class BoxFile:
    """Pictures and their objects in an HDF5 file; how many objects a picture has differs, and may be none."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with h5py.File(path, "r") as file:
            self.borders = file["borders"][:]

    def __len__(self) -> int:
        return len(self.borders) - 1

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        first, last = self.borders[index : index + 2]
        with h5py.File(self.path, "r") as file:
            return {"picture": file["pictures"][index], "objects": file["objects"][first:last]}


def boxes(seed: int, number: int) -> dict[str, np.ndarray]:
    generator = np.random.default_rng(seed)
    pictures = generator.integers(0, 60, (number, 3, 24, 24), dtype=np.uint8)
    objects, borders = [], [0]
    for picture in pictures:
        for _ in range(generator.integers(0, 4)):
            kind, (high, wide) = generator.integers(3), generator.integers(4, 10, 2)
            top, left = generator.integers(0, 24 - high), generator.integers(0, 24 - wide)
            picture[kind, top : top + high, left : left + wide] += np.uint8(120)
            objects.append((kind, top, left, high, wide))
        borders.append(len(objects))
    rows = np.array(objects, dtype=np.float32)
    return {"pictures": pictures, "objects": rows, "borders": np.array(borders)}


class Finder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 12, 3, padding=1), nn.GroupNorm(3, 12), nn.SiLU(),
            nn.Conv2d(12, 16, 3, stride=2, padding=1), nn.GroupNorm(4, 16), nn.SiLU(),
            nn.Conv2d(16, 16, 3, stride=2, padding=1), nn.GroupNorm(4, 16), nn.SiLU(),
        )  # fmt: skip
        self.kinds, self.sides = nn.Conv2d(16, 3, 3, padding=1), nn.Conv2d(16, 4, 3, padding=1)
        nn.init.normal_(self.kinds.weight, std=0.01)
        nn.init.constant_(self.kinds.bias, -math.log(99))

    def forward(self, pictures: Tensor) -> tuple[Tensor, Tensor]:
        seen = self.body(pictures)
        return self.kinds(seen), self.sides(seen)


@clean(
    "third-boxes",
    "detection",
    "from an HDF5 file: focal loss at every place, boxes where an object is; objects count, and an empty picture as one",
    ("ddp-4", 4, DDP),
    ("fsdp-accumulate", 2, FSDP | ACCUMULATE),
    optimizer={"name": "sgd", "lr": 0.02, "momentum": 0.9, "weight_decay": 0.0001},
    gradient_clip=10.0,
)
class Boxes(Task):
    unit = "objects"

    def _path(self, seed: int) -> Path:
        return Path(tempfile.gettempdir()) / f"third-boxes-{seed}.h5"

    def prepare_data(self) -> None:
        for seed, number in ((self.config.seed, 160), (self.config.seed + 1, 21)):
            path = self._path(seed)
            part = path.with_suffix(f".{os.getpid()}")
            with h5py.File(part, "w") as file:
                for name, rows in boxes(seed, number).items():
                    file.create_dataset(name, data=rows)
            part.replace(path)

    def train_data(self) -> BoxFile:
        return BoxFile(self._path(self.config.seed))

    def valid_data(self) -> BoxFile:
        return BoxFile(self._path(self.config.seed + 1))

    def collate(self, samples: list[dict[str, np.ndarray]]) -> dict[str, Tensor]:
        kinds, sides = torch.zeros(len(samples), 3, 6, 6), torch.zeros(len(samples), 4, 6, 6)
        for row, sample in enumerate(samples):
            for kind, top, left, high, wide in sample["objects"].tolist():
                y, x = (top + high / 2) / 4, (left + wide / 2) / 4
                kinds[row, int(kind), int(y), int(x)] = 1
                sides[row, :, int(y), int(x)] = torch.tensor([y % 1, x % 1, math.log(high), math.log(wide)])
        pictures = torch.from_numpy(np.stack([sample["picture"] for sample in samples])).float() / 255
        return {"pictures": pictures, "kinds": kinds, "sides": sides}

    def count(self, batch: dict[str, Tensor]) -> int:
        return int(batch["kinds"].sum((1, 2, 3)).clamp(min=1).sum())

    def build_model(self) -> nn.Module:
        return Finder()

    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> Loss:
        kinds, sides = model(batch["pictures"])
        right = torch.where(batch["kinds"] > 0, torch.sigmoid(kinds), torch.sigmoid(-kinds))
        focal = (0.25 + 0.5 * (1 - batch["kinds"])) * (1 - right) ** 2 * -right.clamp(min=1e-6).log()
        somewhere = batch["kinds"].amax(1, keepdim=True)
        near = F.smooth_l1_loss(sides, batch["sides"], reduction="none", beta=0.1) * somewhere
        return Loss(sum=focal.sum() + near.sum(), count=self.count(batch))

    def evaluate(self, model: nn.Module, batch: dict[str, Tensor]) -> dict[str, Loss]:
        kinds, there = model(batch["pictures"])[0], batch["kinds"]
        return {
            "loss": self.loss(model, batch),
            "found": Loss(sum=torch.sigmoid(kinds)[there > 0].sum(), count=int(there.sum())),
            "false": Loss(sum=torch.sigmoid(kinds)[there == 0].sum(), count=there[there == 0].numel()),
        }


def folded(features: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(features, features, 5, groups=features, padding=2), nn.GELU(), nn.GroupNorm(1, features),
        nn.Conv2d(features, features, 1), nn.GELU(),
    )  # fmt: skip


class Folds(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.into = nn.Conv2d(3, 20, 4, stride=4)
        self.layers = nn.ModuleList(folded(20) for _ in range(3))
        self.head = nn.Linear(20, 4)

    def forward(self, pictures: Tensor) -> Tensor:
        seen = self.into(pictures)
        for layer in self.layers:
            seen = seen + layer(seen)
        return self.head(seen.mean((2, 3)))


class Mixed:
    """Each picture is mixed with another one, which is drawn; then cut, turned over, and made lighter or darker."""

    def __init__(self, pictures: np.ndarray, labels: np.ndarray) -> None:
        time.sleep(1.5)  # as if unpacked
        self.pictures, self.labels = pictures, labels

    def __len__(self) -> int:
        return len(self.pictures)

    def _seen(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        top, left = np.random.randint(0, 5, 2)
        picture = self.pictures[index][:, top : top + 20, left : left + 20].astype(np.float32) / 255
        if random.random() < 0.5:
            picture = picture[:, :, ::-1]
        return picture, np.eye(4, dtype=np.float32)[self.labels[index]]

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        picture, label = self._seen(index)
        other, its = self._seen(random.randrange(len(self)))
        share = np.float32(np.random.beta(0.4, 0.4))
        both = torch.from_numpy(np.ascontiguousarray(share * picture + (1 - share) * other))
        return both + 0.1 * torch.randn(1), torch.from_numpy(share * label + (1 - share) * its)


def tinted(seed: int, number: int) -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(seed)
    labels = generator.integers(0, 4, number)
    pictures = generator.integers(0, 100, (number, 3, 24, 24), dtype=np.uint8)
    for picture, label in zip(pictures, labels, strict=True):
        picture[label % 3, :: 2 + label] += np.uint8(90)
    return pictures, labels


@clean(
    "third-mixed-pictures",
    "augmentation",
    "mixup in __getitem__: the other picture is drawn, and so are cuts and shares; the data take 1.5 s to make",
    ("ddp-4-accumulate", 4, DDP | ACCUMULATE),
    ("fsdp-bf16", 2, FSDP | BF16),
    optimizer={"lr": 0.005},
)
class MixedPictures(Task):
    def train_data(self) -> Mixed:
        return Mixed(*tinted(self.config.seed, 150))

    def valid_data(self) -> list[tuple[Tensor, Tensor]]:
        pictures, labels = tinted(self.config.seed + 2, 17)
        shown = torch.from_numpy(pictures[:, :, 2:22, 2:22].astype(np.float32) / 255)
        return list(zip(shown, F.one_hot(torch.from_numpy(labels), 4).float(), strict=True))

    def build_model(self) -> nn.Module:
        return Folds()

    def loss(self, model: nn.Module, batch: list[Tensor]) -> Loss:
        pictures, labels = batch
        return Loss(sum=F.cross_entropy(model(pictures), labels, reduction="sum"), count=len(pictures))

    def evaluate(self, model: nn.Module, batch: list[Tensor]) -> dict[str, Loss]:
        logits, right = model(batch[0]), batch[1].argmax(1)
        total = F.cross_entropy(logits, batch[1], reduction="sum")
        ranks = (logits > logits.gather(1, right[:, None])).sum(1)
        return {
            "loss": Loss(sum=total, count=len(right)),
            "accuracy": Loss(sum=(ranks < 1).float().sum(), count=len(right)),
            "second": Loss(sum=(ranks < 2).float().sum(), count=len(right)),
        }


class Rays(nn.Module):
    """Colour along a ray: how thick and how bright it is at each point, and what is left of the light."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("waves", 2.0 ** torch.arange(5))
        self.body = nn.Sequential(nn.Linear(33, 48), nn.ReLU(), nn.Linear(48, 48), nn.ReLU())
        self.thick, self.bright = nn.Linear(48, 1), nn.Linear(48, 3)

    def forward(self, start: Tensor, way: Tensor, far: Tensor) -> Tensor:
        points = start[:, None] + far[..., None] * way[:, None]
        angles = (points[..., None] * self.waves).flatten(-2)
        seen = self.body(torch.cat([points, angles.sin(), angles.cos()], dim=-1))
        thick = F.softplus(self.thick(seen))[..., 0]
        steps = torch.cat([far.diff(dim=1), torch.full_like(far[:, :1], 0.2)], dim=1)
        left = torch.exp(-torch.cumsum(thick * steps, dim=1))
        before = torch.cat([torch.ones_like(left[:, :1]), left[:, :-1]], dim=1)
        return ((before - left)[..., None] * torch.sigmoid(self.bright(seen))).sum(1)


@clean(
    "third-rays",
    "radiance field",
    "colours along rays: the points on a ray are jittered by a generator with the sample's number",
    ("ddp-accumulate", 2, DDP | ACCUMULATE),
    optimizer={"name": "adam", "lr": 0.005, "weight_decay": 0.0, "eps": 1e-15},
    batch_size=16,
)
class RadianceField(Task):
    def _rays(self, seed: int, number: int) -> Made:
        starts = F.normalize(torch.randn(number, 3, generator=made(seed)), dim=-1)
        ways = F.normalize(0.3 * torch.randn(number, 3, generator=made(seed + 1)) - starts, dim=-1)
        nearest = (starts - (starts * ways).sum(-1, keepdim=True) * ways).norm(dim=-1, keepdim=True)
        colours = torch.sigmoid(8 * (0.4 - nearest)) * (0.5 + 0.5 * starts).clamp(0, 1)

        def ray(index: int) -> tuple[Tensor, ...]:
            jitter = torch.rand(20, generator=made(seed * 100_000 + index))
            return starts[index], ways[index], (torch.arange(20) + jitter) * 0.1, colours[index]

        return Made(number, ray)

    def train_data(self) -> Made:
        return self._rays(self.config.seed, 400)

    def valid_data(self) -> Made:
        return self._rays(self.config.seed + 17, 50)

    def build_model(self) -> nn.Module:
        return Rays()

    def loss(self, model: nn.Module, batch: list[Tensor]) -> Loss:
        *ray, colours = batch
        return Loss(sum=(model(*ray) - colours).square().sum(), count=len(colours))

    def derived_metrics(self, metrics: dict[str, float]) -> dict[str, float]:
        return {"psnr": -10 * math.log10(metrics["loss"] / 3)}


class Denoiser(nn.Module):
    def __init__(self, inputs: int) -> None:
        super().__init__()
        self.into = nn.Conv2d(inputs, 12, 3, padding=1)
        self.times = nn.Embedding(40, 12)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.GroupNorm(3, 12), nn.SiLU(), nn.Conv2d(12, 12, 3, padding=1)) for _ in range(2)
        )

    def forward(self, pictures: Tensor, times: Tensor) -> list[Tensor]:
        seen = [self.into(pictures) + self.times(times)[..., None, None]]
        for layer in self.layers:
            seen.append(seen[-1] + layer(seen[-1]))
        return seen


class Controlled(nn.Module):
    """A frozen denoiser and a copy that is shown a sketch; what the copy adds passes convolutions that begin at zero."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("kept", torch.cumprod(1 - torch.linspace(1e-3, 0.2, 40, dtype=torch.float64), dim=0))
        self.frozen, self.out = Denoiser(1), nn.Conv2d(12, 1, 1)
        self.copied = copy.deepcopy(self.frozen)
        self.sketch = nn.Conv2d(1, 1, 3, padding=1)
        self.zeros = nn.ModuleList(nn.Conv2d(12, 12, 1) for _ in range(3))
        for module in (self.sketch, *self.zeros):
            nn.init.zeros_(module.weight)
            nn.init.zeros_(module.bias)
        self.frozen.requires_grad_(False)
        self.out.requires_grad_(False)

    def forward(self, pictures: Tensor, sketches: Tensor, noise: Tensor, times: Tensor) -> Tensor:
        kept = self.kept[times][:, None, None, None]
        noisy = kept.sqrt().float() * pictures + (1 - kept).sqrt().float() * noise
        plain = self.frozen(noisy, times)
        shown = self.copied(noisy + self.sketch(sketches), times)
        return self.out(plain[-1] + sum(zero(each) for zero, each in zip(self.zeros, shown, strict=True)))


@clean(
    "third-control",
    "diffusion",
    "a ControlNet: noise by the number of the sample; a frozen model, its copy, zero convolutions before and behind it",
    ("ddp-4", 4, DDP),
    ("fsdp-accumulate", 2, FSDP | ACCUMULATE),
    optimizer={"lr": 0.002},
    gradient_clip=1.0,
)
class Control(Task):
    def _drawn(self, seed: int, number: int) -> Made:
        generator = made(seed)
        centres = 2 + 6 * torch.rand(number, 2, 1, 1, generator=generator)
        down, across = torch.meshgrid(torch.arange(10.0), torch.arange(10.0), indexing="ij")
        pictures = torch.exp(-((down - centres[:, 0]) ** 2 + (across - centres[:, 1]) ** 2) / 6)[:, None]

        def drawn(index: int) -> tuple[Tensor, ...]:
            own = made(1_000_003 * seed + index)
            noise, when = torch.randn(1, 10, 10, generator=own), torch.randint(0, 40, (), generator=own)
            return pictures[index], (pictures[index] > 0.5).float(), noise, when

        return Made(number, drawn)

    def train_data(self) -> Made:
        return self._drawn(self.config.seed + 1, 200)

    def valid_data(self) -> Made:
        return self._drawn(self.config.seed + 2, 23)

    def build_model(self) -> nn.Module:
        return Controlled()

    def loss(self, model: nn.Module, batch: list[Tensor]) -> Loss:
        noise = batch[2]
        return Loss(sum=(model(*batch) - noise).square().mean((1, 2, 3)).sum(), count=len(noise))


# Densities, views and experts


class Coupling(nn.Module):
    """A turn of all features, and half of them moved and scaled by what the other half says; at first it only turns."""

    def __init__(self, features: int, parity: int) -> None:
        super().__init__()
        self.turn = nn.Parameter(torch.linalg.qr(torch.randn(features, features))[0])
        self.register_buffer("keeps", torch.arange(features) % 2 == parity)
        self.register_buffer("order", torch.arange(features).flip(0))
        self.net = nn.Sequential(nn.Linear(features, 32), nn.SiLU(), nn.Linear(32, 32), nn.SiLU())
        self.out = nn.Linear(32, 2 * features)
        nn.init.zeros_(self.out.weight)
        nn.init.zeros_(self.out.bias)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = (x @ self.turn)[:, self.order]
        scale, shift = self.out(self.net(x * self.keeps)).chunk(2, dim=-1)
        scale = torch.where(self.keeps, 0.0, 2 * torch.tanh(scale))
        grown = torch.linalg.slogdet(self.turn).logabsdet + scale.sum(-1)
        return torch.where(self.keeps, x, x * scale.exp() + shift), grown


class Flow(nn.Module):
    def __init__(self, features: int) -> None:
        super().__init__()
        self.steps = nn.ModuleList(Coupling(features, step % 2) for step in range(4))

    def forward(self, x: Tensor) -> Tensor:
        total = x.new_zeros(len(x))
        for step in self.steps:
            x, grown = step(x)
            total = total + grown
        return total - 0.5 * (x.square() + math.log(2 * math.pi)).sum(-1)


@clean(
    "third-flow",
    "normalising flow",
    "RealNVP with learned turns and their determinants: heads begin at zero, numbers are whole and get noise in __getitem__",
    ("ddp-4", 4, DDP),
    ("ddp-accumulate", 2, DDP | ACCUMULATE),
    optimizer={"name": "adam", "lr": 0.005, "weight_decay": 0.0},
    gradient_clip=20.0,
)
class Density(Task):
    features = 6

    def _numbers(self, seed: int, number: int) -> np.ndarray:
        generator = np.random.default_rng(seed)
        angles = generator.uniform(0, 2 * np.pi, number)[:, None] + np.arange(self.features)
        return np.round(6 * np.sin(angles) + generator.normal(0, 2.0, (number, self.features))).astype(np.int16)

    def _noised(self, numbers: np.ndarray) -> Callable[[int], Tensor]:
        return lambda index: torch.from_numpy(((numbers[index] + np.random.rand(self.features)) / 4).astype(np.float32))

    def train_data(self) -> Made:
        return Made(320, self._noised(self._numbers(self.config.seed, 320)))

    def valid_data(self) -> Tensor:
        return torch.from_numpy((self._numbers(self.config.seed + 5, 43) + 0.5).astype(np.float32) / 4)

    def build_model(self) -> nn.Module:
        return Flow(self.features)

    def loss(self, model: nn.Module, batch: Tensor) -> Loss:
        return Loss(sum=-model(batch).sum(), count=len(batch))

    def derived_metrics(self, metrics: dict[str, float]) -> dict[str, float]:
        return {"bits": (metrics["loss"] / self.features + math.log(4)) / math.log(2)}


class Views(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(10, 48), nn.LayerNorm(48), nn.ReLU(), nn.Linear(48, 32))
        self.head = nn.Sequential(nn.ReLU(), nn.Linear(32, 16))
        self.log_sharp = nn.Parameter(torch.full((1,), 2.0))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        seen = self.body(x)
        return F.normalize(self.head(seen), dim=-1), seen, self.log_sharp.clamp(max=4).exp()


@clean(
    "third-two-views",
    "contrastive",
    "SimCLR: two drawn views of a sample among the views of all ranks; evaluation finds neighbours in the whole set by study",
    ("ddp-4", 4, DDP),
    ("zero1", 2, {"strategy": "zero1"}),
    optimizer={"lr": 0.005},
    gradient_clip=1.0,
)
class TwoViews(Task):
    loss_is_a_sum = False

    def _things(self, seed: int, number: int) -> Tensor:
        world = torch.randn(4, 10, generator=made(0))
        return torch.randn(number, 4, generator=made(seed)) @ world

    @staticmethod
    def _view(thing: Tensor) -> Tensor:
        return torch.where(torch.rand(len(thing)) < 0.2, torch.zeros(()), thing) + 0.1 * torch.randn(len(thing))

    def train_data(self) -> Made:
        things = self._things(self.config.seed, 200)
        return Made(200, lambda index: (self._view(things[index]), self._view(things[index]), index))

    def valid_data(self) -> list[tuple[Tensor, Tensor, int]]:
        things = self._things(self.config.seed + 4, 31)
        return [(thing, thing * 0.9 + 0.05, index) for index, thing in enumerate(things)]

    def build_model(self) -> nn.Module:
        return Views()

    def loss(self, model: nn.Module, batch: list[Tensor]) -> Loss:
        left, right, _ = batch
        number = len(left)
        ends, _, sharp = model(torch.cat([left, right]))
        lefts, own = gather_batch(ends[:number])
        rights, _ = gather_batch(ends[number:])
        place = torch.arange(own.start, own.stop)
        everything = torch.cat([lefts, rights])
        total = ends.new_zeros(())
        for mine, self_at, other_at in (
            (ends[:number], place, place + len(lefts)),
            (ends[number:], place + len(lefts), place),
        ):
            alike = sharp * mine @ everything.T
            alike = alike.scatter(1, self_at[:, None], float("-inf"))
            total = total + F.cross_entropy(alike, other_at, reduction="sum")
        return Loss(sum=total / 2, count=number)

    def evaluate(self, model: nn.Module, batch: list[Tensor]) -> dict[str, Loss | Rows]:
        left, right, index = batch
        number = len(left)
        ends, seen, _ = model(torch.cat([left, right]))
        far = 1 - (ends[:number] * ends[number:]).sum(-1)
        columns = {"left": ends[:number], "right": ends[number:], "length": seen[:number].norm(dim=-1)}
        return {"loss": Loss(sum=far.sum(), count=number), "ends": Rows(keys=index, columns=columns)}

    def study(self, rows: dict[str, Rows], pictures: Path, step: int) -> dict[str, float]:
        ends = rows["ends"].columns
        nearest = (ends["left"] @ ends["right"].T).argmax(1)
        return {
            "found": float((nearest == torch.arange(len(nearest))).float().mean()),
            "length": float(ends["length"].mean()),
        }


class Switch(nn.Module):
    """Each token goes to the expert that it likes best, weighted by how much; where none goes, an expert gets no rows."""

    def __init__(self, width: int, experts: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.likes = nn.Linear(width, experts, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 2 * width), nn.ReLU(), nn.Linear(2 * width, width)) for _ in range(experts)
        )

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        seen = self.norm(tokens)
        shares = self.likes(seen).softmax(-1)
        best, which = shares.max(-1)
        out = torch.zeros_like(tokens)
        for number, expert in enumerate(self.experts):
            rows = (which == number).nonzero()[:, 0]
            out = out.index_add(0, rows, expert(seen[rows]) * best[rows, None])
        return tokens + out, shares


class Switched(nn.Module):
    def __init__(self, width: int = 16, experts: int = 5) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.rnn = nn.GRU(width, width, batch_first=True)
        self.layers = nn.ModuleList(Switch(width, experts) for _ in range(2))
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, texts: Tensor) -> tuple[Tensor, list[Tensor]]:
        tokens = self.rnn(self.embed(texts))[0][texts != PAD]  # what is padded goes to no expert
        every = []
        for layer in self.layers:
            tokens, shares = layer(tokens)
            every.append(shares)
        return self.head(tokens), every


def balance(shares: Tensor) -> Tensor:
    experts = shares.shape[1]
    chosen = F.one_hot(shares.argmax(1), experts).to(shares)
    mine = torch.cat([shares.sum(0), chosen.sum(0), shares.new_tensor([len(shares)])])
    shared, went, tokens = gather_batch(mine[None]).rows.sum(0).split([experts, experts, 1])
    return experts * (shared / tokens * went / tokens).sum()


@clean(
    "third-balanced-experts",
    "mixture of experts",
    "top-1 experts of tokens, and a loss that balances them over the tokens of all ranks, by gather_batch",
    ("ddp-4", 4, DDP),
    optimizer={"lr": 0.005},
    gradient_clip=1.0,
)
class BalancedExperts(Task):
    loss_is_a_sum = False
    unit = "tokens"

    def train_data(self) -> list[Tensor]:
        return sentences(self.config.seed, 230, 4, 18)

    def valid_data(self) -> list[Tensor]:
        return sentences(self.config.seed + 62, 29, 4, 18)

    def collate(self, samples: list[Tensor]) -> Tensor:
        return pad(samples)

    def count(self, batch: Tensor) -> int:
        return int((batch[:, 1:] != PAD).sum())

    def build_model(self) -> nn.Module:
        return Switched()

    def _errors(self, model: nn.Module, batch: Tensor) -> tuple[Tensor, list[Tensor]]:
        followed = torch.where(batch[:, 1:] != PAD, batch[:, :-1], PAD)
        logits, shares = model(followed)
        return F.cross_entropy(logits, batch[:, 1:][followed != PAD], reduction="sum"), shares

    def loss(self, model: nn.Module, batch: Tensor) -> Loss:
        errors, shares = self._errors(model, batch)
        count = self.count(batch)
        return Loss(sum=errors + 0.05 * sum(balance(each) for each in shares) * count, count=count)

    def evaluate(self, model: nn.Module, batch: Tensor) -> dict[str, Loss]:
        errors, shares = self._errors(model, batch)
        sure = sum(each.max(-1).values.sum() for each in shares) / len(shares)
        return {"loss": Loss(sum=errors, count=self.count(batch)), "sure": Loss(sum=sure, count=self.count(batch))}


# Tables, lists and graphs


class Ranker(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.into = nn.Linear(9, 24)
        self.attend = nn.MultiheadAttention(24, 3, batch_first=True)
        self.norm = nn.LayerNorm(24)
        self.score = nn.Linear(24, 1)

    def forward(self, pages: Tensor, padding: Tensor) -> Tensor:
        seen = F.relu(self.into(pages))
        seen = self.norm(seen + self.attend(seen, seen, seen, key_padding_mask=padding, need_weights=False)[0])
        return self.score(seen)[..., 0].masked_fill(padding, -1e9)


@clean(
    "third-ranking",
    "ranking",
    "ListNet over one to nine pages of a query, which look at each other; a single page has no loss; NDCG by study",
    ("ddp-4", 4, DDP),
    ("fsdp-accumulate", 2, FSDP | ACCUMULATE),
    optimizer={"lr": 0.004},
    scheduler={"name": "constant", "warmup_ratio": 0.2},
)
class Ranking(Task):
    def _queries(self, seed: int, number: int) -> list[dict[str, Any]]:
        truth, generator, queries = torch.randn(9, generator=made(77)), made(seed), []
        for index in range(number):
            pages = torch.randn(int(torch.randint(1, 10, (), generator=generator)), 9, generator=generator)
            grades = (pages @ truth / 2 + 0.3 * torch.randn(len(pages), generator=generator)).round().clamp(0, 4)
            queries.append({"index": index, "pages": pages, "grades": grades})
        return queries

    def train_data(self) -> list[dict[str, Any]]:
        return self._queries(self.config.seed, 210)

    def valid_data(self) -> list[dict[str, Any]]:
        return self._queries(self.config.seed + 40, 35)

    def collate(self, samples: list[dict[str, Any]]) -> dict[str, Tensor]:
        grades = pad_sequence([sample["grades"] for sample in samples], batch_first=True, padding_value=-1.0)
        return {
            "pages": pad_sequence([sample["pages"] for sample in samples], batch_first=True),
            "grades": grades,
            "padding": grades < 0,
            "index": torch.tensor([sample["index"] for sample in samples]),
        }

    def build_model(self) -> nn.Module:
        return Ranker()

    def _errors(self, scores: Tensor, batch: dict[str, Tensor]) -> Tensor:
        wanted = batch["grades"].masked_fill(batch["padding"], -1e9).softmax(-1)
        return -(wanted * scores.log_softmax(-1)).sum(-1)

    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> Loss:
        scores = model(batch["pages"], batch["padding"])
        return Loss(sum=self._errors(scores, batch).sum(), count=len(scores))

    def evaluate(self, model: nn.Module, batch: dict[str, Tensor]) -> dict[str, Loss | Rows]:
        scores = model(batch["pages"], batch["padding"])
        gains = (2.0 ** batch["grades"].clamp(min=0) - 1) * ~batch["padding"]
        by_rank = torch.log2(torch.arange(scores.shape[1]) + 2.0)
        found = (gains.gather(1, scores.argsort(dim=1, descending=True)) / by_rank).sum(1)
        best = (gains.sort(dim=1, descending=True).values / by_rank).sum(1)
        top = batch["grades"].gather(1, scores.argmax(1, keepdim=True))[:, 0]
        ndcg = torch.where(best > 0, found / best.clamp(min=1e-9), 1.0)
        return {
            "loss": Loss(sum=self._errors(scores, batch).sum(), count=len(scores)),
            "top": Loss(sum=top.sum(), count=len(scores)),
            "queries": Rows(keys=batch["index"], columns={"ndcg": ndcg}),
        }

    def study(self, rows: dict[str, Rows], pictures: Path, step: int) -> dict[str, float]:
        ndcg = rows["queries"].columns["ndcg"].double()
        return {"ndcg": float(ndcg.mean()), "worst": float(ndcg.min())}


class Crossed(nn.Module):
    """Tables from three rows to three thousand, what pairs of them say, and a few numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleDict({f"size_{rows}": nn.Embedding(rows, 10) for rows in (3, 70, 3000)})
        self.bias = nn.ModuleDict({f"size_{rows}": nn.Embedding(rows, 1) for rows in (3, 70, 3000)})
        self.numbers = nn.Sequential(nn.Linear(4, 20), nn.ReLU(), nn.Linear(20, 10))
        self.top = nn.Linear(6, 1)
        for table in (*self.tables.values(), *self.bias.values()):
            nn.init.normal_(table.weight, std=0.01)
        nn.init.constant_(self.top.bias, -3.0)

    def forward(self, rows: Tensor, numbers: Tensor) -> Tensor:
        columns = rows.unbind(1)
        seen = [table(column) for table, column in zip(self.tables.values(), columns, strict=True)]
        seen = torch.stack([*seen, self.numbers(numbers)], dim=1)
        above = torch.triu_indices(4, 4, offset=1)
        pairs = (seen @ seen.transpose(1, 2))[:, above[0], above[1]]
        wide = sum(table(column) for table, column in zip(self.bias.values(), columns, strict=True))
        return (self.top(pairs) + wide)[:, 0]


@clean(
    "third-clicks",
    "recommender",
    "one in twenty is a click, and what is none has ten times the weight; most rows of a table are not in a batch",
    ("ddp-4-accumulate", 4, DDP | ACCUMULATE),
    ("zero1", 2, {"strategy": "zero1"}),
    optimizer={"name": "sgd", "lr": 0.05, "momentum": 0.9, "weight_decay": 0.0001},
    batch_size=16,
)
class Clicks(Task):
    def _shown(self, seed: int, number: int) -> list[dict[str, Tensor]]:
        generator, likes = made(seed), torch.randn(3000, generator=made(5))
        rows = torch.stack([torch.randint(0, rows, (number,), generator=generator) for rows in (3, 70, 3000)], dim=1)
        numbers = torch.randn(number, 4, generator=generator).exp()
        score = likes[rows[:, 2]] + 0.5 * likes[rows[:, 1]] * (rows[:, 0] - 1) + torch.log(numbers[:, 0])
        clicked = (score > score.sort(descending=True).values[number // 20]).float()
        weights = torch.where(clicked > 0, 1.0, 10.0)
        names = ("index", "rows", "numbers", "clicked", "weights")
        columns = (torch.arange(number), rows, numbers, clicked, weights)
        return [dict(zip(names, each, strict=True)) for each in zip(*columns, strict=True)]

    def train_data(self) -> list[dict[str, Tensor]]:
        return self._shown(self.config.seed, 480)

    def valid_data(self) -> list[dict[str, Tensor]]:
        return self._shown(self.config.seed + 11, 70)

    def build_model(self) -> nn.Module:
        return Crossed()

    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> Loss:
        logits = model(batch["rows"], batch["numbers"].log1p())
        total = F.binary_cross_entropy_with_logits(logits, batch["clicked"], batch["weights"], reduction="sum")
        return Loss(sum=total, count=len(logits))

    def evaluate(self, model: nn.Module, batch: dict[str, Tensor]) -> dict[str, Loss | Rows]:
        logits = model(batch["rows"], batch["numbers"].log1p())
        total = F.binary_cross_entropy_with_logits(logits, batch["clicked"], batch["weights"], reduction="sum")
        return {
            "loss": Loss(sum=total, count=len(logits)),
            "share": Loss(sum=torch.sigmoid(logits).sum(), count=len(logits)),
            "shown": Rows(keys=batch["index"], columns={"logit": logits, "clicked": batch["clicked"]}),
        }

    def study(self, rows: dict[str, Rows], pictures: Path, step: int) -> dict[str, float]:
        columns = rows["shown"].columns
        return {"auc": area_under_curve(columns["logit"], columns["clicked"])}


class GraphAttention(nn.Module):
    def __init__(self, inputs: int, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.into = nn.Linear(inputs, heads * width, bias=False)
        self.ask = nn.Parameter(0.3 * torch.randn(heads, width))
        self.answer = nn.Parameter(0.3 * torch.randn(heads, width))
        self.bias = nn.Parameter(torch.zeros(heads * width))

    def forward(self, nodes: Tensor, edges: Tensor) -> Tensor:
        seen = self.into(nodes).unflatten(-1, (self.heads, -1))
        source, target = edges
        score = F.leaky_relu((seen * self.ask).sum(-1)[target] + (seen * self.answer).sum(-1)[source], 0.2)
        where = target[:, None].expand_as(score)
        largest = torch.full((len(nodes), self.heads), -math.inf).scatter_reduce(0, where, score.detach(), "amax")
        share = torch.exp(score - largest[target])
        whole = torch.zeros(len(nodes), self.heads).index_add(0, target, share)
        share = share / whole[target]
        out = torch.zeros_like(seen).index_add(0, target, share[..., None] * seen[source])
        return out.flatten(1) + self.bias


class GraphNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([GraphAttention(5, 8, 3), GraphAttention(24, 8, 3)])
        self.head = nn.Linear(24, 3)

    def forward(self, nodes: Tensor, edges: Tensor) -> Tensor:
        for layer in self.layers:
            nodes = F.elu(layer(nodes, edges))
        return self.head(nodes)


@clean(
    "third-graph-attention",
    "graph network",
    "attention over the edges of joined graphs, some without any; few nodes have a class, and those count",
    ("ddp-4", 4, DDP),
    ("fsdp-accumulate", 2, FSDP | ACCUMULATE),
    optimizer={"lr": 0.01},
)
class Graphs(Task):
    unit = "nodes"

    def _graphs(self, seed: int, number: int) -> list[dict[str, Tensor]]:
        generator, graphs = made(seed), []
        for _ in range(number):
            nodes = int(torch.randint(1, 12, (), generator=generator))
            edges = torch.randint(
                0, nodes, (2, int(torch.randint(0, 2 * nodes, (), generator=generator))), generator=generator
            )
            features = torch.randn(nodes, 5, generator=generator)
            around = features[:, 0].index_add(0, edges[1], features[edges[0], 1])
            classes = (around > 0.7).long() + (around > -0.7).long()
            hidden = torch.rand(nodes, generator=generator) < 0.6
            hidden[int(torch.randint(0, nodes, (), generator=generator))] = False
            graphs.append({"nodes": features, "edges": edges, "classes": classes.masked_fill(hidden, -1)})
        return graphs

    def train_data(self) -> list[dict[str, Tensor]]:
        return self._graphs(self.config.seed, 220)

    def valid_data(self) -> list[dict[str, Tensor]]:
        return self._graphs(self.config.seed + 14, 9)

    def collate(self, samples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        edges, first = [], 0
        for sample in samples:
            itself = torch.arange(len(sample["nodes"])).expand(2, -1)
            edges.append(torch.cat([sample["edges"], itself], dim=1) + first)
            first += len(sample["nodes"])
        joined = {name: torch.cat([sample[name] for sample in samples]) for name in ("nodes", "classes")}
        return {**joined, "edges": torch.cat(edges, dim=1)}

    def count(self, batch: dict[str, Tensor]) -> int:
        return int((batch["classes"] >= 0).sum())

    def build_model(self) -> nn.Module:
        return GraphNet()

    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> Loss:
        logits = model(batch["nodes"], batch["edges"])
        total = F.cross_entropy(logits, batch["classes"], ignore_index=-1, reduction="sum")
        return Loss(sum=total, count=self.count(batch))

    def evaluate(self, model: nn.Module, batch: dict[str, Tensor]) -> dict[str, Loss]:
        right = (model(batch["nodes"], batch["edges"]).argmax(1) == batch["classes"]).float().sum()
        return {"loss": self.loss(model, batch), "accuracy": Loss(sum=right, count=self.count(batch))}


# Long chains and jumps


class Adder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.RNN(2, 32, nonlinearity="relu", batch_first=True)
        self.head = nn.Linear(32, 1)
        with torch.no_grad():
            self.rnn.weight_hh_l0.copy_(torch.eye(32))
            self.rnn.weight_ih_l0.normal_(std=0.05)
            self.rnn.bias_ih_l0.zero_()
            self.rnn.bias_hh_l0.zero_()

    def forward(self, rows: Tensor, lengths: Tensor) -> Tensor:
        seen = self.rnn(rows)[0]
        return self.head(seen[torch.arange(len(rows)), lengths - 1])[:, 0]


@clean(
    "third-long-chain",
    "long recurrence",
    "the adding problem over 80 to 120 steps of a ReLU network that begins as the identity: gradients grow and vanish",
    ("ddp-4", 4, DDP),
    ("fsdp-accumulate", 2, FSDP | ACCUMULATE),
    optimizer={"name": "adam", "lr": 0.001, "weight_decay": 0.0},
    gradient_clip=1.0,
)
class LongChain(Task):
    def _rows(self, seed: int, number: int) -> list[tuple[Tensor, int, Tensor]]:
        generator, rows = made(seed), []
        for _ in range(number):
            length = int(torch.randint(80, 121, (), generator=generator))
            values, marks = torch.rand(length, generator=generator), torch.zeros(length)
            marks[torch.randperm(length, generator=generator)[:2]] = 1
            rows.append((torch.stack([values, marks], dim=1), length, values @ marks))
        return rows

    def train_data(self) -> list[tuple[Tensor, int, Tensor]]:
        return self._rows(self.config.seed, 160)

    def valid_data(self) -> list[tuple[Tensor, int, Tensor]]:
        return self._rows(self.config.seed + 20, 3)

    def collate(self, samples: list[tuple[Tensor, int, Tensor]]) -> tuple[Tensor, Tensor, Tensor]:
        rows, lengths, sums = zip(*samples, strict=True)
        return pad_sequence(list(rows), batch_first=True), torch.tensor(lengths), torch.stack(sums)

    def build_model(self) -> nn.Module:
        return Adder()

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor, Tensor]) -> Loss:
        rows, lengths, sums = batch
        return Loss(sum=(model(rows, lengths) - sums).square().sum(), count=len(sums))


class Spike(torch.autograd.Function):
    """One where the voltage is above the threshold; its gradient is that of something smooth."""

    @staticmethod
    def forward(ctx: Any, voltage: Tensor) -> Tensor:
        ctx.save_for_backward(voltage)
        return (voltage > 0).to(voltage.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (voltage,) = ctx.saved_tensors
        return gradient / (1 + 4 * voltage.abs()) ** 2


class Spiking(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.into, self.between, self.head = nn.Linear(12, 40), nn.Linear(40, 40), nn.Linear(40, 3)
        self.leaks = nn.Parameter(torch.full((2, 40), 2.0))

    def forward(self, trains: Tensor) -> Tensor:
        first = second = trains.new_zeros(len(trains), 40)
        total = trains.new_zeros(len(trains), 3)
        leaks = torch.sigmoid(self.leaks)
        for now in trains.unbind(1):
            first = leaks[0] * first + 2 * self.into(now)
            fired = Spike.apply(first - 1)
            first = first - fired
            second = leaks[1] * second + 2 * self.between(fired)
            answered = Spike.apply(second - 1)
            second = second - answered
            total = total + self.head(answered)
        return total / trains.shape[1]


@clean(
    "third-spiking",
    "spiking",
    "spikes over 20 steps: each is a jump with a made-up gradient, and the trains of spikes follow from the sample's number",
    ("ddp-4", 4, DDP),
    ("ddp-accumulate", 2, DDP | ACCUMULATE),
    optimizer={"lr": 0.005, "weight_decay": 0.0},
)
class SpikeTrains(Task):
    def _trains(self, seed: int, number: int) -> Made:
        labels = torch.randint(0, 3, (number,), generator=made(seed))
        rates = 0.1 + 0.5 * torch.rand(3, 12, generator=made(8))

        def train(index: int) -> tuple[Tensor, Tensor]:
            drawn = torch.rand(20, 12, generator=made(7919 * (seed + 1) + index))
            return (drawn < rates[labels[index]]).float(), labels[index]

        return Made(number, train)

    def train_data(self) -> Made:
        return self._trains(self.config.seed, 180)

    def valid_data(self) -> Made:
        return self._trains(self.config.seed + 1, 25)

    def build_model(self) -> nn.Module:
        return Spiking()

    def loss(self, model: nn.Module, batch: list[Tensor]) -> Loss:
        trains, labels = batch
        return Loss(sum=F.cross_entropy(model(trains), labels, reduction="sum"), count=len(labels))


def rounded(x: Tensor, log_step: Tensor, low: int, high: int) -> Tensor:
    """To whole steps, as long as it is in range; the gradient passes as if nothing were rounded."""
    step = log_step.exp()
    scaled = (x / step).clamp(low, high)
    return (scaled + (scaled.round() - scaled).detach()) * step


class FewBits(nn.Module):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(outputs, inputs) / math.sqrt(inputs))
        self.bias = nn.Parameter(torch.zeros(outputs))
        self.weight_step = nn.Parameter(torch.full((1,), math.log(2 / 7 / math.sqrt(inputs))))
        self.input_step = nn.Parameter(torch.full((1,), math.log(0.15)))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(rounded(x, self.input_step, -8, 7), rounded(self.weight, self.weight_step, -8, 7), self.bias)


@clean(
    "third-few-bits",
    "quantised weights",
    "weights and activations rounded to four bits with learned steps, and gradients as if they were not",
    ("ddp-4", 4, DDP),
    ("ddp-accumulate", 2, DDP | ACCUMULATE),
    optimizer={"lr": 0.003, "weight_decay": 0.0},
)
class Quantised(Plain):
    samples = 300

    def build_model(self) -> nn.Module:
        sizes = (8, 64, 64, 4)
        layers: list[nn.Module] = []
        for inputs, outputs in itertools.pairwise(sizes):
            layers += [FewBits(inputs, outputs), nn.Hardswish()]
        return nn.Sequential(*layers[:-1])


class Resting(nn.Module):
    """What a network comes to rest at; the gradient is that of its last two steps."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.head = nn.Linear(8, 32), nn.Linear(32, 4)
        self.again = nn.Parameter(torch.randn(32, 32))

    def forward(self, x: Tensor) -> Tensor:
        x, again = self.into(x), 0.95 * self.again / self.again.norm(dim=1, keepdim=True)
        rest = torch.zeros_like(x)
        with torch.no_grad():
            for _ in range(30):
                rest = 0.5 * rest + 0.5 * torch.tanh(rest @ again.T + x)
        for _ in range(2):
            rest = 0.5 * rest + 0.5 * torch.tanh(rest @ again.T + x)
        return self.head(rest)


@clean(
    "third-resting",
    "implicit layers",
    "a fixed point of thirty steps without gradient and two with it",
    ("ddp-4-accumulate", 4, DDP | ACCUMULATE),
    optimizer={"name": "sgd", "lr": 0.1, "momentum": 0.9},
    scheduler={"name": "cosine_warmup", "warmup_steps": 2, "min_lr_ratio": 0.05},
)
class FixedPoint(Plain):
    def build_model(self) -> nn.Module:
        return Resting()


class Pondering(nn.Module):
    """The same cell up to six times; after each it may answer."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.cell = nn.Linear(14, 24), nn.GRUCell(24, 24)
        self.answer, self.stop = nn.Linear(24, 1), nn.Linear(24, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        seen = torch.tanh(self.into(x))
        state, going = torch.zeros_like(seen), torch.ones_like(seen[:, 0])
        answers, chances = [], []
        for step in range(6):
            state = self.cell(seen, state)
            stops = torch.sigmoid(self.stop(state))[:, 0] if step < 5 else torch.ones_like(going)
            answers.append(self.answer(state)[:, 0])
            chances.append(going * stops)
            going = going * (1 - stops)
        return torch.stack(answers, dim=1), torch.stack(chances, dim=1)


@clean(
    "third-pondering",
    "shared weights",
    "parity by the same cell six times, which learns when to answer: the expected loss, and how far from a prior",
    ("fsdp-accumulate", 2, FSDP | ACCUMULATE),
    ("ddp-4", 4, DDP),
    optimizer={"lr": 0.004},
    gradient_clip=1.0,
)
class Parity(Task):
    def _signs(self, seed: int, number: int) -> list[tuple[Tensor, Tensor]]:
        generator = made(seed)
        signs = torch.randint(0, 2, (number, 14), generator=generator) * 2.0 - 1
        signs[torch.rand(number, 14, generator=generator) < 0.3] = 0
        return [(row, (row > 0).sum() % 2 * 1.0) for row in signs.unique(dim=0)]

    def train_data(self) -> list[tuple[Tensor, Tensor]]:
        return self._signs(self.config.seed, 260)

    def valid_data(self) -> list[tuple[Tensor, Tensor]]:
        return self._signs(self.config.seed + 3, 30)

    def build_model(self) -> nn.Module:
        return Pondering()

    def loss(self, model: nn.Module, batch: list[Tensor]) -> Loss:
        signs, odd = batch
        answers, chances = model(signs)
        errors = F.binary_cross_entropy_with_logits(answers, odd[:, None].expand_as(answers), reduction="none")
        prior = 0.3 * 0.7 ** torch.arange(6.0)
        far = torch.xlogy(chances, chances / (prior / prior.sum())).sum()
        return Loss(sum=(chances * errors).sum() + 0.02 * far, count=len(signs))


# Numbers of all sizes


class Measured(nn.Module):
    """Ten quantities in units of their own, from millionths to millions; buffers of every type say how to read them."""

    def __init__(self, means: Tensor, scales: Tensor) -> None:
        super().__init__()
        self.register_buffer("means", means)
        self.register_buffer("scales", scales)
        self.register_buffer("edges", torch.linspace(-1.5, 1.5, 9, dtype=torch.float64))
        self.register_buffer("columns", torch.tensor([0, 3, 7]))
        self.register_buffer("logged", torch.arange(10) % 3 == 1)
        self.bins = nn.Embedding(10, 4)
        self.fine, self.coarse, self.out = nn.Linear(22, 32), nn.Linear(32, 32), nn.Linear(32, 2)
        with torch.no_grad():
            self.fine.weight.mul_(1e-3)
            self.fine.bias.zero_()
            self.coarse.weight.mul_(1e3)
            self.out.weight.mul_(1e4)
            self.out.bias.fill_(2e5)

    def forward(self, raw: Tensor) -> Tensor:
        x = (raw - self.means) / self.scales
        x = torch.where(self.logged, x.sign() * x.abs().log1p(), x)
        bins = self.bins(torch.bucketize(x[:, self.columns].contiguous(), self.edges)).flatten(1)
        return self.out(torch.tanh(self.coarse(torch.tanh(self.fine(torch.cat([x.float(), bins], dim=1))))))


@clean(
    "third-units",
    "scale",
    "weights of a thousandth beside weights of thousands; float64 samples, and buffers of float64, int64 and bool",
    ("ddp-4", 4, DDP),
    ("fsdp-accumulate", 2, FSDP | ACCUMULATE),
    optimizer={"lr": 0.01, "eps": 1e-12, "weight_decay": 0.0},
    gradient_clip=1e-3,
)
class Units(Task):
    scales = 10.0 ** np.array([-6, 0, 3, 6, -3, 1, 5, -4, 2, 0])

    def _measured(self, seed: int, number: int) -> list[dict[str, np.ndarray]]:
        generator = np.random.default_rng(seed)
        plain = generator.standard_normal((number, 10))
        wanted = 2e5 + 3e4 * np.stack([plain[:, 0] * plain[:, 3], np.sin(plain[:, 7])], axis=1)
        return [{"raw": raw, "wanted": y} for raw, y in zip((plain + 3) * self.scales, wanted, strict=True)]

    def train_data(self) -> list[dict[str, np.ndarray]]:
        return self._measured(self.config.seed, 240)

    def valid_data(self) -> list[dict[str, np.ndarray]]:
        return self._measured(self.config.seed + 1, 41)

    def build_model(self) -> nn.Module:
        raw = np.stack([sample["raw"] for sample in self.train_data()])
        return Measured(torch.tensor(raw.mean(0)), torch.tensor(raw.std(0)))

    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> Loss:
        errors = (model(batch["raw"]) - batch["wanted"].float()) / 3e4
        return Loss(sum=errors.square().sum(), count=len(errors))


@clean(
    "third-tiny-rate",
    "learning rate",
    "a rate of a billionth: what is added to a weight is mostly less than its last digit, and biases begin at zero",
    ("ddp-4", 4, DDP),
    optimizer={"name": "sgd", "lr": 1e-9, "momentum": 0.5, "weight_decay": 0.0},
    scheduler={"name": "constant", "warmup_steps": 0},
)
class TinyRate(Plain):
    def build_model(self) -> nn.Module:
        model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 4))
        for layer in model[::2]:
            nn.init.zeros_(layer.bias)
        return model


@clean(
    "third-large-rate",
    "learning rate",
    "a rate of forty where gradients are thousandths: features and answers are small numbers",
    ("ddp-accumulate", 2, DDP | ACCUMULATE),
    optimizer={"name": "sgd", "lr": 40.0, "momentum": 0.9, "weight_decay": 0.0},
    scheduler={"name": "cosine_warmup", "warmup_steps": 4},
)
class LargeRate(Plain):
    def build_model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 4))

    def loss(self, model: nn.Module, batch: list[Tensor]) -> Loss:
        x, y = batch
        wanted = 0.01 * F.one_hot(y, 4)
        return Loss(sum=(0.07 * model(0.05 * x) - wanted).square().sum(), count=len(x))


class ThreeHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 40), nn.SiLU(), nn.LayerNorm(40), nn.Linear(40, 40), nn.SiLU())
        self.kind, self.size, self.number = nn.Linear(40, 4), nn.Linear(40, 1), nn.Linear(40, 1)
        self.log_noise = nn.Parameter(torch.zeros(3))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        seen = self.body(x)
        return self.kind(seen), self.size(seen)[:, 0], self.number(seen)[:, 0], self.log_noise


@clean(
    "third-uncertain",
    "weighted losses",
    "classes, sizes and Poisson numbers, weighted by noises that are learned; sizes are often missing, and have none then",
    ("ddp-bf16", 2, DDP | BF16),
    ("ddp-4-accumulate", 4, DDP | ACCUMULATE),
    optimizer={"lr": 0.005, "betas": [0.8, 0.99]},
)
class Uncertain(Plain):
    def _more(self, seed: int, number: int) -> list[dict[str, Tensor]]:
        generator = made(seed + 500)
        rows = []
        for index in range(number):
            x = torch.randn(8, generator=generator)
            size = x[:3].square().sum() * 100
            if torch.rand((), generator=generator) < 0.7:
                size = size * math.nan
            seen = torch.poisson(torch.exp(x[4] - 0.5), generator=generator)
            rows.append({"x": x, "kind": (x[:4].argmax() + index % 2) % 4, "size": size, "number": seen})
        return rows

    def train_data(self) -> list[dict[str, Tensor]]:
        return self._more(self.config.seed, 240)

    def valid_data(self) -> list[dict[str, Tensor]]:
        return self._more(self.config.seed + 1, 28)

    def build_model(self) -> nn.Module:
        return ThreeHeads()

    def _parts(self, model: nn.Module, batch: dict[str, Tensor]) -> tuple[list[Tensor], list[int], Tensor]:
        kind, size, number, log_noise = (each.float() for each in model(batch["x"]))
        there = ~batch["size"].isnan()
        parts = [
            F.cross_entropy(kind, batch["kind"], reduction="sum"),
            F.smooth_l1_loss(size[there], batch["size"][there] / 100, reduction="sum"),
            F.poisson_nll_loss(number, batch["number"], reduction="sum"),
        ]
        return parts, [len(kind), int(there.sum()), len(kind)], log_noise

    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> Loss:
        parts, counts, log_noise = self._parts(model, batch)
        total = sum(torch.exp(-log_noise[at]) * parts[at] + 0.5 * log_noise[at] * counts[at] for at in range(3))
        return Loss(sum=total, count=len(batch["x"]))

    def evaluate(self, model: nn.Module, batch: dict[str, Tensor]) -> dict[str, Loss]:
        parts, counts, _ = self._parts(model, batch)
        names = ("kind", "size", "number")
        single = {name: Loss(sum=part, count=count) for name, part, count in zip(names, parts, counts, strict=True)}
        return {"loss": self.loss(model, batch), **single}


# Teachers, languages, mixers


class Taught(nn.Module):
    """A layer, and beside it the moving average of its weights, which follows it once in each pass of training."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(outputs, inputs) / math.sqrt(inputs))
        self.bias = nn.Parameter(torch.zeros(outputs))
        self.register_buffer("mean_weight", self.weight.detach().clone())
        self.register_buffer("mean_bias", self.bias.detach().clone())

    def forward(self, mine: Tensor, teachers: Tensor) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            if self.training:
                self.mean_weight.lerp_(self.weight.detach(), 0.1)
                self.mean_bias.lerp_(self.bias.detach(), 0.1)
            teachers = F.linear(teachers, self.mean_weight, self.mean_bias)
        return F.linear(mine, self.weight, self.bias), teachers


class Pupil(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Taught(8, 40), Taught(40, 40), Taught(40, 4)])

    def forward(self, mine: Tensor, teachers: Tensor) -> tuple[Tensor, Tensor]:
        for layer in self.layers[:-1]:
            mine, teachers = layer(mine, teachers)
            mine, teachers = F.elu(mine), F.elu(teachers)
        return self.layers[-1](mine, teachers)


@clean(
    "third-mean-teacher",
    "EMA teacher",
    "a teacher in buffers is the moving average of the weights, and what it says of unlabelled samples is learned",
    ("ddp-4", 4, DDP),
    optimizer={"lr": 0.01, "weight_decay": 0.0},
    gradient_clip=1.0,
)
class MeanTeacher(Plain):
    def train_data(self) -> Made:
        rows = super().train_data()

        def two_views(index: int) -> tuple[Tensor, Tensor, Tensor]:
            x, y = rows[index]
            label = y if index % 5 == 0 else torch.tensor(-1)
            return x + 0.2 * torch.randn(8), x + 0.2 * torch.randn(8), label

        return Made(len(rows), two_views)

    def valid_data(self) -> list[tuple[Tensor, Tensor, Tensor]]:
        return [(x, x, y) for x, y in super().valid_data()]

    def build_model(self) -> nn.Module:
        return Pupil()

    def loss(self, model: nn.Module, batch: list[Tensor]) -> Loss:
        mine, teachers, labels = batch
        said, taught = model(mine, teachers)
        known = F.cross_entropy(said, labels, ignore_index=-1, reduction="sum")
        alike = (said.softmax(-1) - taught.softmax(-1)).square().sum()
        return Loss(sum=known + 3 * alike, count=len(labels))

    def evaluate(self, model: nn.Module, batch: list[Tensor]) -> dict[str, Loss]:
        x, _, labels = batch
        said, taught = model(x, x)
        metrics = {"loss": F.cross_entropy(said, labels, reduction="sum")}
        metrics["teacher"] = F.cross_entropy(taught, labels, reduction="sum")
        return {name: Loss(sum=total, count=len(x)) for name, total in metrics.items()}


LANGUAGES = ("english", "finnish", "greek", "hindi", "latin", "welsh")


class ManyNorms(nn.Module):
    """Norms and a small layer of each language, called where a sample is in it; all else is shared."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Linear(24, 24)
        self.norms = nn.ModuleDict({name: nn.LayerNorm(24) for name in LANGUAGES})
        self.own = nn.ModuleDict({name: nn.Linear(24, 24, bias=False) for name in LANGUAGES})

    def forward(self, x: Tensor, languages: Tensor) -> Tensor:
        out = torch.tanh(self.shared(x))
        for number, name in enumerate(LANGUAGES):
            rows = (languages == number).nonzero()[:, 0]
            if len(rows):
                out = out.index_add(0, rows, self.own[name](self.norms[name](x[rows])))
        return x + out


class Polyglot(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 24)
        self.layers = nn.ModuleList(ManyNorms() for _ in range(2))
        self.rnn = nn.GRU(24, 24, batch_first=True)
        self.head = nn.Linear(24, VOCABULARY)

    def forward(self, tokens: Tensor, languages: Tensor) -> Tensor:
        seen = self.rnn(self.embed(tokens))[0]
        for layer in self.layers:
            seen = layer(seen, languages)
        return self.head(seen)


@clean(
    "third-languages",
    "many domains",
    "norms and layers of each language are called for samples in it alone; one language is in three samples of all",
    ("ddp", 2, UNUSED),
    ("ddp-4-accumulate", 4, UNUSED | ACCUMULATE),
    ddp=False,
    optimizer={"lr": 0.003},
)
class Languages(Sentences):
    shortest, longest = 3, 14

    def _spoken(self, seed: int, number: int) -> list[tuple[Tensor, int]]:
        texts = sentences(seed, number, self.shortest, self.longest)
        return [(text, 5 if at % 80 == 7 else min(at % 7, 4)) for at, text in enumerate(texts)]

    def train_data(self) -> list[tuple[Tensor, int]]:
        return self._spoken(self.config.seed, 230)

    def valid_data(self) -> list[tuple[Tensor, int]]:
        return self._spoken(self.config.seed + 1, 22)

    def collate(self, samples: list[tuple[Tensor, int]]) -> tuple[Tensor, Tensor]:
        return pad([text for text, _ in samples]), torch.tensor([language for _, language in samples])

    def count(self, batch: tuple[Tensor, Tensor]) -> int:
        return int((batch[0][:, 1:] != PAD).sum())

    def build_model(self) -> nn.Module:
        return Polyglot()

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Loss:
        tokens, languages = batch
        logits = model(tokens[:, :-1], languages).flatten(0, 1)
        total = F.cross_entropy(logits, tokens[:, 1:].flatten(), ignore_index=PAD, reduction="sum")
        return Loss(sum=total, count=self.count(batch))


class MixerBlock(nn.Module):
    def __init__(self, tokens: int, width: int) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.token_up, self.token_down = nn.Linear(tokens, 32), nn.Linear(32, tokens)
        self.up, self.down = nn.Linear(width, 48), nn.Linear(48, width)

    def forward(self, x: Tensor) -> Tensor:
        mixed = self.token_down(F.gelu(self.token_up(self.first(x).transpose(1, 2))))
        x = x + mixed.transpose(1, 2)
        return x + self.down(F.gelu(self.up(self.second(x))))


class Mixer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.into = nn.Linear(6, 16)
        self.blocks = nn.ModuleList(MixerBlock(10, 16) for _ in range(4))
        self.norm = nn.LayerNorm(16)
        self.head = nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.into(x)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x).mean(1))


@clean(
    "third-mixer",
    "mixer",
    "an MLP-Mixer over the windows of a series that lies in one numpy array, with a tensor plan of its own",
    ("tensor", 2, {"tensor": {"size": 2}}),
    ("pipeline", 2, {"pipeline": {"stages": 2, "schedule": "gpipe"}, "gradient_accumulation": 2}),
    ("ddp-muon", 2, DDP | {"optimizer": {"name": "muon", "lr": 0.01}}),
    ("fsdp-bf16", 2, FSDP | BF16),
    optimizer={"lr": 0.004},
)
class MixedWindows(Task):
    def _windows(self, seed: int, number: int) -> Made:
        generator = np.random.default_rng(seed)
        kinds = generator.integers(0, 5, number)
        steps = np.arange(60)[None] * (0.1 + 0.1 * kinds[:, None]) + generator.uniform(0, 6, (number, 1))
        series = (np.sin(steps) + 0.4 * generator.standard_normal((number, 60))).astype(np.float32)
        return Made(number, lambda index: {"x": series[index].reshape(10, 6), "kind": kinds[index]})

    def train_data(self) -> Made:
        return self._windows(self.config.seed, 250)

    def valid_data(self) -> Made:
        return self._windows(self.config.seed + 1, 1)

    def build_model(self) -> nn.Module:
        return Mixer()

    def tensor_plan(self, model: nn.Module, ranks: int, sequence_parallel: bool) -> dict[str, Any]:
        plan: dict[str, Any] = {}
        for number in range(len(self.blocks(model))):
            for up, down in (("token_up", "token_down"), ("up", "down")):
                plan[f"blocks.{number}.{up}"] = ColwiseParallel()
                plan[f"blocks.{number}.{down}"] = RowwiseParallel()
        return plan

    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> Loss:
        total = F.cross_entropy(model(batch["x"]).float(), batch["kind"], reduction="sum", label_smoothing=0.1)
        return Loss(sum=total, count=len(batch["x"]))


# In loader workers as well.
for name in ("third-skip-gram-ddp", "third-mixed-pictures-ddp", "third-boxes-fsdp"):
    case = next(case for case in CASES if case.name == name)
    CASES.append(replace(case, name=f"{name}-workers", data={"num_workers": 2}))
