"""Correct tasks, a fifth set: language models, whole batches, likelihoods over time, curved space, learning to learn."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from case import ACCUMULATE, BF16, DDP, FSDP, clean
from plain import PAD, VOCABULARY, WIDTH, Mlp, Sentences, pad, sentences
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset

from shardwise import Loss, Rows, Task, gather_batch


def made(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


# Language models


class Texts(Sentences):
    def valid_data(self) -> list[Tensor]:
        return sentences(self.config.seed + 500, 37, self.shortest, self.longest)

    def loss(self, model: nn.Module, batch: Tensor) -> Loss:
        logits = model(input_ids=batch[:, :-1], attention_mask=(batch[:, :-1] != PAD).long(), use_cache=False).logits
        total = F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten(), ignore_index=PAD, reduction="sum")
        return Loss(sum=total, count=self.count(batch))

    def derived_metrics(self, metrics: dict[str, float]) -> dict[str, float]:
        return {"perplexity": math.exp(metrics["loss"])}


@clean(
    "fifth-qwen",
    "decoder",
    "Qwen3ForCausalLM: four heads share one key, keys and queries are normed, a window of five tokens in the upper layer, tied",
    ("ddp-4-accumulate", 4, DDP | ACCUMULATE),
    ("fsdp-bf16", 2, FSDP | BF16),
    ("pipeline", 2, {"pipeline": {"stages": 2}, "gradient_accumulation": 2}),
    optimizer={"lr": 0.003},
    gradient_clip=1.0,
)
class Qwen(Texts):
    shortest, longest = 6, 22

    def build_model(self) -> nn.Module:
        from transformers import Qwen3Config, Qwen3ForCausalLM

        return Qwen3ForCausalLM(
            Qwen3Config(
                vocab_size=VOCABULARY,
                hidden_size=32,
                intermediate_size=48,
                num_hidden_layers=2,
                num_attention_heads=4,
                num_key_value_heads=1,
                head_dim=8,
                use_sliding_window=True,
                sliding_window=5,
                max_window_layers=1,
                tie_word_embeddings=True,
                pad_token_id=PAD,
            )
        )


class Stretched(nn.Module):
    """A frozen layer, and beside it two random matrices that all layers share; learned is how each of their rows counts."""

    def __init__(self, base: nn.Linear, down: Tensor, up: Tensor) -> None:
        super().__init__()
        self.base = base
        self.register_buffer("down", down)
        self.register_buffer("up", up)
        self.inner = nn.Parameter(torch.full((len(down),), 0.1))
        self.outer = nn.Parameter(torch.zeros(len(up)))

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.outer * F.linear(self.inner * F.linear(x, self.down), self.up)


@clean(
    "fifth-shared-random",
    "adapters",
    "VeRA on a frozen OPTForCausalLM: random matrices in buffers are shared by all layers; half of what is learned "
    "has a gradient of zero at first",
    ("ddp-4", 4, DDP),
    ("fsdp-accumulate", 2, FSDP | ACCUMULATE),
    optimizer={"lr": 0.05, "weight_decay": 0.0},
)
class SharedRandom(Texts):
    shortest, longest = 3, 18

    def build_model(self) -> nn.Module:
        from transformers import OPTConfig, OPTForCausalLM

        model = OPTForCausalLM(
            OPTConfig(
                vocab_size=VOCABULARY,
                hidden_size=32,
                word_embed_proj_dim=16,
                ffn_dim=64,
                num_hidden_layers=3,
                num_attention_heads=4,
                max_position_embeddings=32,
                dropout=0.0,
                init_std=0.15,
                pad_token_id=PAD,
            )
        ).requires_grad_(False)
        down, up = torch.randn(24, 32) / math.sqrt(32), torch.randn(32, 24) / math.sqrt(24)
        for layer in model.model.decoder.layers:
            layer.self_attn.q_proj = Stretched(layer.self_attn.q_proj, down, up)
            layer.self_attn.v_proj = Stretched(layer.self_attn.v_proj, down, up)
        return model


class ExponentialGates(nn.Module):
    """A recurrence with exponential gates, kept in range by the largest exponent so far, which cancels out of the answer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.reads = nn.Linear(WIDTH, 4 * WIDTH)
        self.remembers = nn.Linear(WIDTH, 4 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        read = self.reads(self.norm(x))
        hidden = cell = weight = largest = torch.zeros_like(x[:, 0])
        answers = []
        for now in read.unbind(1):
            value, enter, keep, show = (now + self.remembers(hidden)).chunk(4, dim=-1)
            keep = F.logsigmoid(keep + 3)
            before, largest = largest, torch.maximum(keep + largest, 4 * enter)
            old, new = (keep + before - largest).exp(), (4 * enter - largest).exp()
            cell = old * cell + new * torch.tanh(value)
            weight = old * weight + new
            hidden = torch.sigmoid(show) * cell / weight.clamp(min=1e-6)
            answers.append(hidden)
        return x + self.out(torch.stack(answers, dim=1))


class ExponentialMemory(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(ExponentialGates() for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


@clean(
    "fifth-exponential-gates",
    "xLSTM",
    "exponential gates beside the largest exponent so far; memories of different age differ by many powers of ten",
    ("ddp-4", 4, DDP),
    ("ddp-bf16", 2, DDP | BF16),
    ("pipeline", 2, {"pipeline": {"stages": 2}, "gradient_accumulation": 2}),
    optimizer={"lr": 0.005},
)
class ExponentialTexts(Sentences):
    shortest, longest = 5, 30

    def valid_data(self) -> list[Tensor]:
        return sentences(self.config.seed + 700, 31, self.shortest, self.longest)

    def build_model(self) -> nn.Module:
        return ExponentialMemory()


# Whole batches


class PictureAndText(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        from transformers import SiglipConfig, SiglipModel

        small = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
        text = {**small, "vocab_size": VOCABULARY, "max_position_embeddings": 12, "projection_size": 16}
        text |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
        self.both = SiglipModel(
            SiglipConfig(text_config=text, vision_config={**small, "image_size": 8, "patch_size": 4, "num_channels": 2})
        )
        nn.init.constant_(self.both.logit_scale, math.log(10))
        nn.init.constant_(self.both.logit_bias, -10.0)

    def forward(self, pictures: Tensor, texts: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        out = self.both(input_ids=texts, pixel_values=pictures)
        return out.image_embeds, out.text_embeds, self.both.logit_scale.exp(), 1 * self.both.logit_bias


@clean(
    "fifth-sigmoid-pairs",
    "contrastive",
    "SiglipModel: each picture with each text of all ranks is yes or no, by gather_batch; a bias that begins at minus ten",
    ("ddp-4", 4, DDP),
    optimizer={"lr": 0.002},
)
class SigmoidPairs(Task):
    loss_is_a_sum = False

    def _pairs(self, seed: int, number: int) -> list[tuple[Tensor, Tensor]]:
        things = torch.randn(number, 10, generator=made(seed))
        pictures = torch.einsum("nk,kchw->nchw", things, torch.randn(10, 2, 8, 8, generator=made(3)) / 3)
        words = (3 * things + 3 * torch.arange(10)).round().long() % (VOCABULARY - 3) + 3
        return list(zip(pictures, words, strict=True))

    def train_data(self) -> list[tuple[Tensor, Tensor]]:
        return self._pairs(self.config.seed, 210)

    def valid_data(self) -> list[tuple[Tensor, Tensor]]:
        return self._pairs(self.config.seed + 31, 40)

    def build_model(self) -> nn.Module:
        return PictureAndText()

    def loss(self, model: nn.Module, batch: list[Tensor]) -> Loss:
        pictures, texts, scale, bias = model(*batch)
        every_text, own = gather_batch(texts)
        logits = scale * pictures @ every_text.T + bias
        place = torch.arange(own.start, own.stop, device=texts.device)
        sign = 2 * F.one_hot(place, len(every_text)).to(logits) - 1
        return Loss(sum=-F.logsigmoid(sign * logits).sum(), count=len(pictures))

    def evaluate(self, model: nn.Module, batch: list[Tensor]) -> dict[str, Any]:
        pictures, texts, scale, bias = model(*batch)
        own = -F.logsigmoid(scale * (pictures * texts).sum(-1) + bias)
        return {"loss": Loss(sum=own.sum(), count=len(own))}


@clean(
    "fifth-proportional-hazards",
    "survival",
    "Cox: who died against all who then still lived, of all ranks; many are censored, a batch without deaths has no gradient; "
    "concordance by study",
    ("ddp-4", 4, DDP),
    monitor="concordance",
    monitor_mode="max",
    gradient_clip=1.0,
)
class ProportionalHazards(Task):
    loss_is_a_sum = False

    def _patients(self, seed: int, number: int) -> list[dict[str, Tensor]]:
        generator = made(seed)
        x = torch.randn(number, 8, generator=generator)
        risk = x @ torch.randn(8, generator=made(8)) + x[:, 0] * x[:, 1]
        death = torch.empty(number).exponential_(generator=generator) * (-risk).exp()
        leaves = 1.5 * torch.empty(number).exponential_(generator=generator)
        return [
            {
                "number": torch.tensor(i),
                "x": x[i],
                "time": torch.minimum(death, leaves)[i],
                "dies": death[i] < leaves[i],
            }
            for i in range(number)
        ]

    def train_data(self) -> list[dict[str, Tensor]]:
        return self._patients(self.config.seed, 230)

    def valid_data(self) -> list[dict[str, Tensor]]:
        patients = self._patients(self.config.seed + 17, 60)
        return [patient | {"number": patient["number"] + 100000} for patient in patients]

    def build_model(self) -> nn.Module:
        return Mlp(out=1)

    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> Loss:
        score = model(batch["x"])[:, 0]
        every = gather_batch(torch.stack([score, batch["time"]], dim=1)).rows
        alive = every[:, 1] >= batch["time"][:, None]
        against = every[:, 0].expand_as(alive).masked_fill(~alive, -torch.inf).logsumexp(dim=1)
        return Loss(sum=((against - score) * batch["dies"]).sum(), count=len(score))

    def evaluate(self, model: nn.Module, batch: dict[str, Tensor]) -> dict[str, Any]:
        score = model(batch["x"])[:, 0]
        columns = {"score": score, "time": batch["time"], "dies": batch["dies"].float()}
        return {"score": Loss(sum=score.sum(), count=len(score)), "patients": Rows(batch["number"], columns)}

    def study(self, rows: dict[str, Rows], pictures: Path, step: int) -> dict[str, float]:
        of = {name: torch.as_tensor(column) for name, column in rows["patients"].columns.items()}
        pairs = (of["time"][:, None] < of["time"]) & (of["dies"][:, None] > 0)
        right = (of["score"][:, None] > of["score"]) & pairs
        return {"concordance": float(right.sum() / pairs.sum().clamp(min=1))}


class PixelsAndNumber(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(2, 12, 3, padding=1)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.GroupNorm(3, 12), nn.SiLU(), nn.Conv2d(12, 12, 3, padding=1)) for _ in range(2)
        )
        self.classes = nn.Conv2d(12, 3, 1)
        self.number = nn.Linear(12, 1)

    def forward(self, pictures: Tensor) -> tuple[Tensor, Tensor]:
        x = self.first(pictures)
        for block in self.blocks:
            x = x + block(x)
        return self.classes(x), self.number(x.mean(dim=(2, 3)))[:, 0]


@clean(
    "fifth-two-means",
    "whole batch",
    "a mean over labelled pixels, generalised dice over the batch and a mean over known numbers, each with its own count, "
    "all over the sums of all ranks",
    ("ddp-4", 4, DDP),
    optimizer={"name": "sgd", "lr": 0.1, "momentum": 0.9},
)
class TwoMeans(Task):
    loss_is_a_sum = False

    def _pictures(self, seed: int, number: int) -> list[dict[str, Tensor]]:
        generator, pictures = made(seed), []
        for _ in range(number):
            picture = F.avg_pool2d(torch.randn(2, 10, 10, generator=generator), 3, 1)
            labels = (picture[0] > 0.2).long() + (picture[1] > 0.3).long()
            labelled = torch.rand(8, 8, generator=generator) < torch.rand((), generator=generator) - 0.2
            known = torch.rand((), generator=generator) < 0.4
            pictures.append({
                "picture": picture,
                "labels": torch.where(labelled, labels, -1),
                "number": torch.where(known, 100 * picture.prod(0).mean(), torch.nan),
            })  # fmt: skip
        return pictures

    def train_data(self) -> list[dict[str, Tensor]]:
        return self._pictures(self.config.seed, 200)

    def valid_data(self) -> list[dict[str, Tensor]]:
        return self._pictures(self.config.seed + 5, 44)

    def build_model(self) -> nn.Module:
        return PixelsAndNumber()

    def _parts(self, model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        logits, number = model(batch["picture"])
        labelled, known = batch["labels"] >= 0, ~batch["number"].isnan()
        entropy = F.cross_entropy(logits, batch["labels"], ignore_index=-1, reduction="sum")
        error = (number - batch["number"].nan_to_num()).where(known, 0.0).square().sum()
        guess = logits.softmax(1) * labelled[:, None]
        truth = F.one_hot(batch["labels"].clamp(min=0), 3).movedim(-1, 1) * labelled[:, None]
        dice = torch.cat([(guess * truth).sum((0, 2, 3)), guess.sum((0, 2, 3)), truth.sum((0, 2, 3))])
        return entropy, labelled.sum(), error, known.sum(), dice

    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> Loss:
        entropy, pixels, error, known, dice = self._parts(model, batch)
        mine = torch.cat([torch.stack([entropy, pixels.to(entropy), error, known.to(entropy)]), dice])
        entropy, pixels, error, known, *dice = gather_batch(mine[None]).rows.sum(0).split([1, 1, 1, 1, 3, 3, 3])
        both, guess, truth = dice
        value = entropy / pixels.clamp(min=1) + 0.1 * error / known.clamp(min=1)
        value = value + 1 - (2 * (both / (truth + 1)).sum() + 1e-3) / (((guess + truth) / (truth + 1)).sum() + 1e-3)
        return Loss(sum=value.sum() * len(batch["labels"]), count=len(batch["labels"]))

    def evaluate(self, model: nn.Module, batch: dict[str, Tensor]) -> dict[str, Any]:
        entropy, pixels, error, known, _ = self._parts(model, batch)
        return {"loss": Loss(sum=entropy, count=int(pixels)), "number": Loss(sum=error, count=int(known))}


# Likelihoods over time


class LeftToRight(nn.Module):
    """The logarithm of how likely each row of symbols is, over all ways through the states."""

    def __init__(self, states: int = 10, symbols: int = 20) -> None:
        super().__init__()
        self.start = nn.Parameter(torch.zeros(states))
        self.goes = nn.Parameter(0.1 * torch.randn(states, states))
        self.says = nn.Parameter(0.1 * torch.randn(states, symbols))
        ahead = torch.arange(states) - torch.arange(states)[:, None]
        self.register_buffer("closed", (ahead < 0) | (ahead > 3))

    def forward(self, symbols: Tensor, lengths: Tensor) -> Tensor:
        goes = self.goes.masked_fill(self.closed, -torch.inf).log_softmax(1)
        says = self.says.log_softmax(1).T[symbols]
        alpha = self.start.log_softmax(0) + says[:, 0]
        for t in range(1, symbols.shape[1]):
            on = (alpha[:, :, None] + goes).logsumexp(1) + says[:, t]
            alpha = torch.where((t < lengths)[:, None], on, alpha)
        return alpha.logsumexp(1)


@clean(
    "fifth-hidden-states",
    "hidden Markov model",
    "all ways through ten states, in logarithms, for up to ninety symbols; closed ways are minus infinity; symbols count",
    ("ddp-4-accumulate", 4, DDP | ACCUMULATE),
    ("fsdp-4", 4, FSDP),
    optimizer={"name": "adam", "lr": 0.03},
)
class HiddenStates(Task):
    unit = "symbols"

    def _rows(self, seed: int, number: int) -> list[Tensor]:
        generator, rows = made(seed), []
        for _ in range(number):
            length = int(torch.randint(4, 91, (), generator=generator))
            state = (torch.randint(0, 3, (), generator=generator) + torch.linspace(0, 16, length)).long()
            rows.append((state + torch.randint(0, 4, (length,), generator=generator)) % 20)
        return rows

    def train_data(self) -> list[Tensor]:
        return self._rows(self.config.seed, 150)

    def valid_data(self) -> list[Tensor]:
        return self._rows(self.config.seed + 9, 30)

    def collate(self, samples: list[Tensor]) -> tuple[Tensor, Tensor]:
        return pad(samples), torch.tensor([len(sample) for sample in samples])

    def count(self, batch: tuple[Tensor, Tensor]) -> int:
        return int(batch[1].sum())

    def build_model(self) -> nn.Module:
        return LeftToRight()

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Loss:
        return Loss(sum=-model(*batch).sum(), count=self.count(batch))


class Level(nn.Module):
    """Level and slope, followed by a Kalman filter; what is read is seldom seen and moved by something known."""

    def __init__(self) -> None:
        super().__init__()
        self.noise = nn.Parameter(torch.tensor([-14.0, -16.0, -12.0]))
        self.fades = nn.Parameter(torch.tensor([3.0]))
        self.moves = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1, bias=False))

    def forward(self, read: Tensor, known: Tensor, seen: Tensor) -> Tensor:
        q_level, q_slope, r = self.noise.exp().unbind()
        fades = torch.sigmoid(self.fades)
        moved = 1e-3 * self.moves(known)[..., 0]
        level = slope = p_mixed = torch.zeros_like(read[:, 0])
        p_level, p_slope = torch.full_like(level, 1e-4), torch.full_like(level, 1e-5)
        total = torch.zeros_like(level)
        for t in range(read.shape[1]):
            level, slope = level + slope, fades * slope
            p_level = p_level + 2 * p_mixed + p_slope + q_level
            p_mixed, p_slope = fades * (p_mixed + p_slope), fades.square() * p_slope + q_slope
            off, spread = read[:, t] - moved[:, t] - level, p_level + r
            total = total + seen[:, t] * (spread.log() + off.square() / spread) / 2
            by_level, by_slope = seen[:, t] * p_level / spread, seen[:, t] * p_mixed / spread
            level, slope = level + by_level * off, slope + by_slope * off
            p_slope = p_slope - by_slope * p_mixed
            p_level, p_mixed = (1 - by_level) * p_level, (1 - by_level) * p_mixed
        return total


@clean(
    "fifth-filter",
    "Kalman filter",
    "likelihoods of series of thousandths with gaps: variances of millionths, learned as logarithms; what was seen counts",
    ("ddp-4", 4, DDP),
    ("fsdp-accumulate", 2, FSDP | ACCUMULATE),
    gradient_clip=5.0,
)
class Filter(Task):
    unit = "readings"

    def _series(self, seed: int, number: int) -> list[dict[str, Tensor]]:
        generator, series = made(seed), []
        for _ in range(number):
            length = int(torch.randint(3, 41, (), generator=generator))
            known = torch.randn(length, 3, generator=generator)
            walk = torch.randn(2, length, generator=generator).mul(torch.tensor([[3e-4], [1e-4]])).cumsum(1)
            read = walk[0] + walk[1].cumsum(0) / 3 + 1e-3 * torch.sin(known.sum(1))
            read = read + 5e-4 * torch.randn(length, generator=generator)
            seen = torch.rand(length, generator=generator) < 0.7
            seen[0] = True
            series.append({"read": read.where(seen, 0.0), "known": known, "seen": seen.float()})
        return series

    def train_data(self) -> list[dict[str, Tensor]]:
        return self._series(self.config.seed, 160)

    def valid_data(self) -> list[dict[str, Tensor]]:
        return self._series(self.config.seed + 13, 30)

    def collate(self, samples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        return {name: pad_sequence([sample[name] for sample in samples], batch_first=True) for name in samples[0]}

    def count(self, batch: dict[str, Tensor]) -> int:
        return int(batch["seen"].sum())

    def build_model(self) -> nn.Module:
        return Level()

    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> Loss:
        return Loss(sum=model(**batch).sum(), count=self.count(batch))


# Curved space


class Ball(nn.Module):
    """Every word is a point of the Poincaré ball; all of them begin close to its centre."""

    def __init__(self, words: int = 600, width: int = 5) -> None:
        super().__init__()
        self.table = nn.Embedding(words, width)
        nn.init.uniform_(self.table.weight, -1e-3, 1e-3)
        self.sharp = nn.Parameter(torch.ones(1))

    def forward(self, words: Tensor) -> Tensor:
        flat = self.table(words)
        norm = (flat.square().sum(-1, keepdim=True) + 1e-12).sqrt()
        points = flat * (torch.tanh(norm) / norm)
        one, others = points[:, :1], points[:, 1:]
        inside = (1 - one.square().sum(-1)) * (1 - others.square().sum(-1))
        apart = (one - others).square().sum(-1) + 1e-12
        return -self.sharp * 2 * torch.asinh((apart / inside).sqrt())


class Links(Dataset):
    def __init__(self, links: Tensor, words: int) -> None:
        self.links, self.words = links, words

    def __len__(self) -> int:
        return len(self.links)

    def __getitem__(self, index: int) -> Tensor:
        """A word, what it is a kind of, and eight others, drawn anew each time."""
        others = (self.links[index, 0] + torch.randint(1, self.words, (8,))) % self.words
        return torch.cat([self.links[index], others])


@clean(
    "fifth-ball",
    "hyperbolic embedding",
    "a tree in the Poincaré ball: points begin a thousandth apart, SGD at a rate of 0.5; most words are not in a batch",
    ("ddp-4", 4, DDP),
    ("fsdp-accumulate", 2, FSDP | ACCUMULATE),
    optimizer={"name": "sgd", "lr": 0.5, "weight_decay": 0.0},
)
class Kinds(Task):
    words = 600

    def train_data(self) -> Links:
        child = torch.arange(1, 301)
        return Links(torch.stack([child, (child - 1) // 3], dim=1), self.words)

    def valid_data(self) -> list[Tensor]:
        child = torch.arange(13, 60)
        others = (
            child[:, None] + torch.randint(1, self.words, (47, 8), generator=made(self.config.seed + 2))
        ) % self.words
        return list(torch.cat([torch.stack([child, ((child - 1) // 3 - 1) // 3], dim=1), others], dim=1))

    def build_model(self) -> nn.Module:
        return Ball(self.words)

    def loss(self, model: nn.Module, batch: Tensor) -> Loss:
        nearest = model(batch)
        return Loss(sum=(nearest.logsumexp(1) - nearest[:, 0]).sum(), count=len(batch))


# Learning to learn


class Adapts(nn.Module):
    """Weights from which three steps with learned rates lead to each sample's own; gradients go through those steps."""

    def __init__(self) -> None:
        super().__init__()
        self.w1, self.b1 = nn.Parameter(torch.randn(16, 1)), nn.Parameter(torch.randn(16))
        self.w2, self.b2 = nn.Parameter(torch.randn(16, 16) / 4), nn.Parameter(torch.zeros(16))
        self.w3, self.b3 = nn.Parameter(torch.randn(1, 16) / 4), nn.Parameter(torch.zeros(1))
        self.rates = nn.ParameterList(nn.Parameter(torch.full((3,), -3.0)) for _ in range(6))

    @staticmethod
    def curve(weights: tuple[Tensor, ...], x: Tensor) -> Tensor:
        w1, b1, w2, b2, w3, b3 = weights
        return F.linear(torch.tanh(F.linear(torch.tanh(F.linear(x[:, None], w1, b1)), w2, b2)), w3, b3)[:, 0]

    def forward(self, x: Tensor, y: Tensor, shown: Tensor, asked: Tensor) -> Tensor:
        def fit(weights: tuple[Tensor, ...], x: Tensor, y: Tensor, shown: Tensor) -> Tensor:
            return ((self.curve(weights, x) - y).square() * shown).sum() / shown.sum()

        def one(x: Tensor, y: Tensor, shown: Tensor, asked: Tensor) -> Tensor:
            weights = (self.w1, self.b1, self.w2, self.b2, self.w3, self.b3)
            for step in range(3):
                slopes = torch.func.grad(fit)(weights, x, y, shown)
                weights = tuple(
                    w - rate[step].exp() * s for w, rate, s in zip(weights, self.rates, slopes, strict=True)
                )
            return ((self.curve(weights, x) - y).square() * asked).sum()

        return torch.func.vmap(one)(x, y, shown, asked)


@clean(
    "fifth-few-examples",
    "meta-learning",
    "Meta-SGD: three steps from a few points of a sample's own curve, second derivatives through them; what is asked counts",
    ("ddp-4", 4, DDP),
    ("fsdp-accumulate", 2, FSDP | ACCUMULATE),
    gradient_clip=10.0,
    optimizer={"lr": 0.003},
)
class FewExamples(Task):
    unit = "points"

    def _curves(self, seed: int, number: int) -> list[tuple[Tensor, ...]]:
        generator = made(seed)
        high, turn = (torch.rand(number, 1, generator=generator) for _ in range(2))
        x = 6 * torch.rand(number, 14, generator=generator) - 3
        y = (0.3 + 2 * high) * torch.sin(x + 3 * turn)
        shown = torch.randint(2, 8, (number, 1), generator=generator)
        asked = torch.randint(9, 15, (number, 1), generator=generator)
        place = torch.arange(14)
        return list(zip(x, y, (place < shown).float(), ((place >= shown) & (place < asked)).float(), strict=True))

    def train_data(self) -> list[tuple[Tensor, ...]]:
        return self._curves(self.config.seed, 200)

    def valid_data(self) -> list[tuple[Tensor, ...]]:
        return self._curves(self.config.seed + 77, 34)

    def count(self, batch: list[Tensor]) -> int:
        return int(batch[3].sum())

    def build_model(self) -> nn.Module:
        return Adapts()

    def loss(self, model: nn.Module, batch: list[Tensor]) -> Loss:
        return Loss(sum=model(*batch).sum(), count=self.count(batch))
