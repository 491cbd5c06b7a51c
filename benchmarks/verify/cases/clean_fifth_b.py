"""Correct tasks, a fifth set, second part: fields, equations, pictures that are bent, sounds, transport, bounded slopes."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from case import ACCUMULATE, BF16, DDP, FSDP, clean
from plain import Plain
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from shardwise import Loss, Task


def made(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def there(lengths: Tensor, longest: int) -> Tensor:
    """Where a padded row is no padding."""
    return torch.arange(longest, device=lengths.device) < lengths[:, None]


# Fields


class HashGrid(nn.Module):
    """Features at the corners of ever finer grids, in short tables in which corners collide."""

    def __init__(self, levels: int = 5, rows: int = 512) -> None:
        super().__init__()
        self.tables = nn.Parameter(torch.empty(levels, rows, 2).uniform_(-1e-4, 1e-4))
        self.net = nn.Sequential(
            nn.Linear(2 * levels, 16, bias=False), nn.ReLU(), nn.Linear(16, 16, bias=False), nn.ReLU(), nn.Linear(16, 3)
        )

    def forward(self, places: Tensor) -> Tensor:
        features = []
        for level, table in enumerate(self.tables):
            scaled = places * (4 * 1.7**level)
            low = scaled.floor()
            within, low = scaled - low, low.long()
            found = torch.zeros_like(places)
            for corner in ((0, 0), (0, 1), (1, 0), (1, 1)):
                at = low + torch.tensor(corner, device=places.device)
                row = (at[:, 0] ^ (at[:, 1] * 2654435761)) % len(table)
                share = torch.where(torch.tensor(corner, device=places.device) > 0, within, 1 - within).prod(1)
                found = found + share[:, None] * table[row]
            features.append(found)
        return self.net(torch.cat(features, dim=1))


@clean(
    "fifth-hash-grid",
    "implicit field",
    "colours by hashed grids: tables begin at a ten-thousandth, most rows are not in a batch, Adam with an epsilon of 1e-15",
    ("ddp-4", 4, DDP),
    ("fsdp-4-accumulate", 4, FSDP | ACCUMULATE),
    optimizer={"name": "adam", "lr": 0.01, "betas": [0.9, 0.99], "eps": 1e-15, "weight_decay": 0.0},
)
class Colours(Task):
    def _places(self, seed: int, number: int) -> list[dict[str, Tensor]]:
        places = torch.rand(number, 2, generator=made(seed))
        waves = torch.tensor([[5.0, 9.0, 23.0], [7.0, -4.0, 17.0]])
        return [{"place": place, "colour": torch.sigmoid(3 * torch.sin(place @ waves))} for place in places]

    def train_data(self) -> list[dict[str, Tensor]]:
        return self._places(self.config.seed, 360)

    def valid_data(self) -> list[dict[str, Tensor]]:
        return self._places(self.config.seed + 3, 60)

    def build_model(self) -> nn.Module:
        return HashGrid()

    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> Loss:
        error = torch.sigmoid(model(batch["place"])) - batch["colour"]
        return Loss(sum=error.square().sum(), count=len(error))

    def derived_metrics(self, metrics: dict[str, float]) -> dict[str, float]:
        return {"psnr": -10 * math.log10(metrics["loss"] / 3)}


# Equations


class Heat(nn.Module):
    """What a bar is like at a place and a time, and how far from the heat equation that is."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, 20), nn.Tanh(), nn.Linear(20, 20), nn.Tanh(), nn.Linear(20, 1))
        self.conducts = nn.Parameter(torch.tensor([-2.0]))

    def forward(self, at: Tensor, with_equation: bool = True) -> tuple[Tensor, Tensor | None]:
        if not with_equation:
            return self.net(at)[:, 0], None
        with torch.enable_grad():
            x, t = (column.detach().clone().requires_grad_() for column in at.unbind(1))
            u = self.net(torch.stack([x, t], dim=1))[:, 0]
            by_x, by_t = torch.autograd.grad(u.sum(), (x, t), create_graph=True)
            (by_xx,) = torch.autograd.grad(by_x.sum(), x, create_graph=True)
        return u, by_t - self.conducts.exp() * by_xx


@clean(
    "fifth-heat",
    "physics-informed",
    "a heat equation with a conductivity to be found: gradients of second derivatives; places inside, at the ends and "
    "at the start in one data set, with weights of their own",
    ("ddp-4", 4, DDP),
    ("ddp-accumulate", 2, DDP | ACCUMULATE),
    optimizer={"name": "adam", "lr": 0.003},
    gradient_clip=20.0,
)
class HeatEquation(Task):
    unit = "places"

    @staticmethod
    def true(at: Tensor) -> Tensor:
        x, t = at.unbind(-1)
        waves = ((1, 1.0), (3, 0.5))
        return sum(high * torch.sin(k * math.pi * x) * torch.exp(-0.1 * (k * math.pi) ** 2 * t) for k, high in waves)

    def _places(self, seed: int, number: int) -> Tensor:
        return torch.rand(number, 2, generator=made(seed))

    def train_data(self) -> list[tuple[Tensor, Tensor, int]]:
        at = self._places(self.config.seed, 240)
        kinds = [(0, 0, 0, 1, 0, 2, 0, 0, 3)[i % 9] for i in range(len(at))]
        for place, kind in zip(at, kinds, strict=True):
            if kind == 1:
                place[0] = place[0].round()
            if kind == 2:
                place[1] = 0.0
        return [(place, self.true(place), kind) for place, kind in zip(at, kinds, strict=True)]

    def valid_data(self) -> list[tuple[Tensor, Tensor, int]]:
        return [(place, self.true(place), 3) for place in self._places(self.config.seed + 21, 50)]

    def build_model(self) -> nn.Module:
        return Heat()

    def loss(self, model: nn.Module, batch: list[Tensor]) -> Loss:
        at, true, kind = batch
        u, off = model(at)
        weight = torch.tensor([0.0, 20.0, 20.0, 5.0], device=at.device)[kind]
        return Loss(sum=(off.square() * (kind == 0) + weight * (u - true).square()).sum(), count=len(at))

    def evaluate(self, model: nn.Module, batch: list[Tensor]) -> dict[str, Any]:
        at, true, _ = batch
        error = model(at, with_equation=False)[0] - true
        return {"loss": Loss(error.square().sum(), len(at)), "far": Loss((error.abs() > 0.1).sum(), len(at))}


# Pictures that are bent


class Bends(nn.Module):
    """How far each pixel moves: nearly nothing at first."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(2, 8, 3, padding=1)
        self.down = nn.Sequential(nn.GroupNorm(2, 8), nn.LeakyReLU(0.2), nn.Conv2d(8, 16, 3, stride=2, padding=1))
        self.deep = nn.Sequential(nn.GroupNorm(4, 16), nn.LeakyReLU(0.2), nn.Conv2d(16, 8, 3, padding=1))
        self.up = nn.Sequential(nn.GroupNorm(4, 16), nn.LeakyReLU(0.2), nn.Conv2d(16, 8, 3, padding=1), nn.Tanh())
        self.flow = nn.Conv2d(8, 2, 3, padding=1)
        nn.init.normal_(self.flow.weight, 0, 1e-5)
        nn.init.zeros_(self.flow.bias)

    def forward(self, moving: Tensor, fixed: Tensor) -> tuple[Tensor, Tensor]:
        x = self.first(torch.stack([moving, fixed], dim=1))
        low = F.interpolate(self.deep(self.down(x)), scale_factor=2, mode="bilinear", align_corners=True)
        flow = self.flow(self.up(torch.cat([x, low], dim=1)))
        number, size = len(moving), moving.shape[-1]
        rest = torch.eye(2, 3, device=x.device).expand(number, 2, 3)
        grid = F.affine_grid(rest, [number, 1, size, size], align_corners=True)
        grid = grid + flow.permute(0, 2, 3, 1) * 2 / (size - 1)
        return F.grid_sample(moving[:, None], grid, align_corners=True, padding_mode="border")[:, 0], flow


@clean(
    "fifth-registration",
    "registration",
    "VoxelMorph: a picture is bent until it fits, by local correlation; the last convolution begins at a hundred-thousandth, and "
    "pixels begin where the slope of sampling jumps",
    ("ddp-4", 4, DDP),
    ("fsdp-accumulate", 2, FSDP | ACCUMULATE),
    optimizer={"name": "adam", "lr": 0.001},
)
class Registration(Task):
    def _pairs(self, seed: int, number: int) -> list[tuple[Tensor, Tensor]]:
        generator, size = made(seed), 16
        line = torch.arange(size, dtype=torch.float32)
        pairs = []
        for _ in range(number):
            centre = 4 + 8 * torch.rand(3, 2, generator=generator)
            moved = centre + 1.5 * torch.randn(3, 2, generator=generator)
            pair = []
            for at in (centre, moved):
                near = (line[None, :, None] - at[:, :1, None]) ** 2 + (line[None, None] - at[:, 1:, None]) ** 2
                pair.append((-near / 6).exp().sum(0) + 0.02 * torch.randn(size, size, generator=generator))
            pairs.append((pair[0], pair[1]))
        return pairs

    def train_data(self) -> list[tuple[Tensor, Tensor]]:
        return self._pairs(self.config.seed, 160)

    def valid_data(self) -> list[tuple[Tensor, Tensor]]:
        return self._pairs(self.config.seed + 4, 34)

    def build_model(self) -> nn.Module:
        return Bends()

    @staticmethod
    def alike(one: Tensor, other: Tensor) -> Tensor:
        """The squared correlation in windows of five pixels, averaged over each picture."""

        def around(x: Tensor) -> Tensor:
            return F.avg_pool2d(x[:, None], 5, stride=1, padding=2)[:, 0]

        mean, others = around(one), around(other)
        cross = around(one * other) - mean * others
        spread, spreads = around(one.square()) - mean.square(), around(other.square()) - others.square()
        return (cross.square() / (spread * spreads + 1e-5)).mean((1, 2))

    def loss(self, model: nn.Module, batch: list[Tensor]) -> Loss:
        bent, flow = model(*batch)
        rough = flow.diff(dim=2).square().mean((1, 2, 3)) + flow.diff(dim=3).square().mean((1, 2, 3))
        return Loss(sum=(1 - self.alike(bent, batch[1]) + rough).sum(), count=len(bent))

    def evaluate(self, model: nn.Module, batch: list[Tensor]) -> dict[str, Any]:
        bent, flow = model(*batch)
        folded = (flow.diff(dim=2)[:, 1] < -1).sum()
        return {
            "loss": Loss(sum=-self.alike(bent, batch[1]).sum(), count=len(bent)),
            "folded": Loss(sum=folded, count=flow[:, 1].numel()),
        }


# Sounds


class Separates(nn.Module):
    """Two masks over what learned short filters find in a wave."""

    def __init__(self) -> None:
        super().__init__()
        self.listens = nn.Conv1d(1, 24, 8, stride=4, bias=False)
        self.blocks = nn.ModuleList(nn.Conv1d(24, 24, 3, dilation=2**i, padding=2**i) for i in range(3))
        self.norms = nn.ModuleList(nn.LayerNorm(24) for _ in range(3))
        self.masks = nn.Conv1d(24, 48, 1)
        self.speaks = nn.ConvTranspose1d(24, 1, 8, stride=4, bias=False)

    def forward(self, waves: Tensor, lengths: Tensor) -> Tensor:
        heard = self.listens(waves[:, None]).relu()
        here = there(torch.div(lengths - 8, 4, rounding_mode="floor") + 1, heard.shape[2])[:, None]
        x = heard * here
        for block, norm in zip(self.blocks, self.norms, strict=True):
            x = x + F.silu(block(norm(x.transpose(1, 2)).transpose(1, 2) * here)) * here
        masks = torch.sigmoid(self.masks(x)).unflatten(1, (2, 24)) * here[:, None]
        return self.speaks((masks * heard[:, None]).flatten(0, 1)).unflatten(0, (-1, 2))[:, :, 0]


@clean(
    "fifth-two-voices",
    "source separation",
    "two voices in a wave, in whichever order fits: decibels, so losses change their sign; quiet waves of any length",
    ("ddp-4", 4, DDP),
    ("fsdp-accumulate", 2, FSDP | ACCUMULATE),
    gradient_clip=5.0,
    optimizer={"lr": 0.003},
)
class TwoVoices(Task):
    def _waves(self, seed: int, number: int) -> list[Tensor]:
        generator, waves = made(seed), []
        for _ in range(number):
            length = 8 + 4 * int(torch.randint(6, 31, (), generator=generator))
            pitch = torch.tensor([[0.2], [0.9]]) * (1 + 0.5 * torch.rand(2, 1, generator=generator))
            loud = 10 ** (-3 * torch.rand(2, 1, generator=generator))
            start = 6 * torch.rand(2, 1, generator=generator)
            wave = torch.sin(pitch * torch.arange(length) + start) + 0.05 * torch.randn(2, length, generator=generator)
            waves.append(loud.mean() * wave)
        return waves

    def train_data(self) -> list[Tensor]:
        return self._waves(self.config.seed, 180)

    def valid_data(self) -> list[Tensor]:
        return self._waves(self.config.seed + 6, 36)

    def collate(self, samples: list[Tensor]) -> tuple[Tensor, Tensor]:
        voices = pad_sequence([sample.T for sample in samples], batch_first=True).transpose(1, 2)
        return voices, torch.tensor([sample.shape[1] for sample in samples])

    def count(self, batch: tuple[Tensor, Tensor]) -> int:
        return len(batch[1])

    def build_model(self) -> nn.Module:
        return Separates()

    def _decibels(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        """How much of each answer is each voice, the better of the two ways to pair them."""
        voices, lengths = batch
        answers = model(voices.sum(1), lengths)
        here = there(lengths, voices.shape[2])[:, None]
        answers, voices = (
            (wave - (wave * here).sum(-1, keepdim=True) / lengths[:, None, None]) * here for wave in (answers, voices)
        )
        product = torch.einsum("nat,nvt->nav", answers, voices)
        energy = voices.square().sum(-1)[:, None] + 1e-8
        meant = product.square() / energy
        rest = answers.square().sum(-1)[:, :, None] - meant
        decibels = 10 * ((meant + 1e-8) / (rest.clamp(min=0) + 1e-8)).log10()
        straight = decibels[:, 0, 0] + decibels[:, 1, 1]
        crossed = decibels[:, 0, 1] + decibels[:, 1, 0]
        return torch.maximum(straight, crossed) / 2

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Loss:
        return Loss(sum=-self._decibels(model, batch).sum(), count=self.count(batch))

    def evaluate(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> dict[str, Any]:
        decibels = self._decibels(model, batch)
        return {
            "loss": Loss(sum=-decibels.sum(), count=len(decibels)),
            "heard": Loss(sum=(decibels > 0).sum(), count=len(decibels)),
        }


# Transport


@dataclass
class Cloud:
    noise: Tensor
    points: Tensor
    kind: int


class Moves(nn.Module):
    """Where each point of noise goes, by what kind of cloud it is to become."""

    def __init__(self) -> None:
        super().__init__()
        self.kinds = nn.Embedding(40, 8)
        self.net = nn.Sequential(nn.Linear(10, 32), nn.GELU(), nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 2))

    def forward(self, noise: Tensor, kind: Tensor) -> Tensor:
        return noise + self.net(torch.cat([noise, self.kinds(kind)[:, None].expand(-1, noise.shape[1], -1)], dim=2))


@clean(
    "fifth-transport",
    "optimal transport",
    "clouds of any size, moved onto others: forty rounds of Sinkhorn in logarithms, gradients through all of them; dataclasses",
    ("ddp-4", 4, DDP),
    ("fsdp-4-accumulate", 4, FSDP | ACCUMULATE),
    optimizer={"lr": 0.003},
)
class Transport(Task):
    def _clouds(self, seed: int, number: int) -> list[Cloud]:
        generator, clouds = made(seed), []
        for _ in range(number):
            sources, targets = torch.randint(2, 13, (2,), generator=generator).tolist()
            kind = int(torch.randint(0, 40, (), generator=generator))
            centre = torch.tensor([math.cos(kind), math.sin(kind)])
            points = centre * 2 + 0.3 * torch.randn(targets, 2, generator=generator)
            clouds.append(Cloud(torch.randn(sources, 2, generator=generator), points, kind))
        return clouds

    def train_data(self) -> list[Cloud]:
        return self._clouds(self.config.seed, 180)

    def valid_data(self) -> list[Cloud]:
        return self._clouds(self.config.seed + 8, 33)

    def collate(self, samples: list[Cloud]) -> dict[str, Tensor]:
        return {
            "noise": pad_sequence([sample.noise for sample in samples], batch_first=True),
            "points": pad_sequence([sample.points for sample in samples], batch_first=True),
            "sizes": torch.tensor([[len(sample.noise), len(sample.points)] for sample in samples]),
            "kind": torch.tensor([sample.kind for sample in samples]),
        }

    def count(self, batch: dict[str, Tensor]) -> int:
        return len(batch["kind"])

    def build_model(self) -> nn.Module:
        return Moves()

    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> Loss:
        moved, points = model(batch["noise"], batch["kind"]), batch["points"]
        many, others = batch["sizes"].unbind(1)
        here, there_ = there(many, moved.shape[1]), there(others, points.shape[1])
        costs = (moved[:, :, None] - points[:, None]).square().sum(-1)
        soft = 0.1
        weight = (-many.to(costs).log())[:, None].where(here, -torch.inf)
        weights = (-others.to(costs).log())[:, None].where(there_, -torch.inf)
        f, g = torch.zeros_like(costs[:, :, 0]), torch.zeros_like(costs[:, 0])
        for _ in range(40):
            f = -soft * ((g[:, None] - costs) / soft + weights[:, None]).logsumexp(2)
            g = -soft * ((f[:, :, None] - costs) / soft + weight[:, :, None]).logsumexp(1)
        dual = (f * here).sum(1) / many + (g * there_).sum(1) / others
        return Loss(sum=dual.sum(), count=len(dual))


# Bounded slopes


class Bounded(nn.Module):
    """A layer that no direction is stretched by: its matrix over its largest singular value."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(outputs, inputs) / math.sqrt(inputs))
        self.bias = nn.Parameter(torch.zeros(outputs))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight / torch.linalg.matrix_norm(self.weight, 2), self.bias)


class Critic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = Bounded(8, 24)
        self.layers = nn.ModuleList(Bounded(24, 24) for _ in range(3))
        self.last = Bounded(24, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x.unflatten(1, (12, 2)).sort(dim=2).values.flatten(1))
        return self.last(x)[:, 0]


@clean(
    "fifth-bounded-slopes",
    "spectral norm",
    "a critic of slope one: matrices over their exact largest singular value, pairs that are sorted in place of a nonlinearity; "
    "a hinge and a distance",
    ("ddp-4", 4, DDP),
    ("fsdp-4", 4, FSDP),
    optimizer={"name": "sgd", "lr": 0.1, "momentum": 0.9},
)
class BoundedSlopes(Plain):
    def build_model(self) -> nn.Module:
        return Critic()

    def loss(self, model: nn.Module, batch: list[Tensor]) -> Loss:
        x, y = batch
        agrees = model(x) * (2.0 * (y > 1) - 1)
        return Loss(sum=(5 * (0.5 - agrees).relu() - agrees).sum(), count=len(x))

    def evaluate(self, model: nn.Module, batch: list[Tensor]) -> dict[str, Any]:
        x, y = batch
        agrees = model(x) * (2.0 * (y > 1) - 1)
        return {"loss": Loss(sum=-agrees.sum(), count=len(x)), "right": Loss(sum=(agrees > 0).sum(), count=len(x))}


# Flows between pictures


class Modulated(nn.Module):
    """A layer of a transformer that time shifts, scales and gates; the gates begin at zero."""

    def __init__(self, width: int = 24) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(width, 3, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
        self.norm = nn.LayerNorm(width, elementwise_affine=False)
        self.by_time = nn.Linear(width, 6 * width)
        nn.init.zeros_(self.by_time.weight)
        nn.init.zeros_(self.by_time.bias)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        shift, scale, gate, shift_2, scale_2, gate_2 = self.by_time(F.silu(time))[:, None].chunk(6, dim=2)
        inner = self.norm(x) * (1 + scale) + shift
        x = x + gate * self.attention(inner, inner, inner, need_weights=False)[0]
        return x + gate_2 * self.mlp(self.norm(x) * (1 + scale_2) + shift_2)


class FlowTransformer(nn.Module):
    def __init__(self, width: int = 24) -> None:
        super().__init__()
        self.patches = nn.Linear(4, width)
        self.places = nn.Parameter(0.02 * torch.randn(16, width))
        self.time = nn.Sequential(nn.Linear(8, width), nn.SiLU(), nn.Linear(width, width))
        self.layers = nn.ModuleList(Modulated(width) for _ in range(2))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 4)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def forward(self, pictures: Tensor, time: Tensor) -> Tensor:
        waves = time[:, None] * 2.0 ** torch.arange(4, device=time.device)
        time = self.time(torch.cat([waves.sin(), waves.cos()], dim=1))
        x = self.patches(pictures.unfold(1, 2, 2).unfold(2, 2, 2).flatten(3).flatten(1, 2)) + self.places
        for layer in self.layers:
            x = layer(x, time)
        x = self.head(self.norm(x)).view(-1, 4, 4, 2, 2)
        return x.transpose(2, 3).reshape(-1, 8, 8)


@clean(
    "fifth-flow-matching",
    "flow matching",
    "a transformer whose gates and head begin at zero, so only the head has a gradient at first; noise and time are in a sample",
    ("ddp-4", 4, DDP),
    ("fsdp-bf16", 2, FSDP | BF16),
    ("fsdp-4", 4, FSDP),
    optimizer={"lr": 0.002},
)
class FlowMatching(Task):
    def _pictures(self, seed: int, number: int) -> list[dict[str, Tensor]]:
        generator = made(seed)
        turn = torch.rand(number, 2, 1, 1, generator=generator) * 6
        line = torch.arange(8.0)
        pictures = torch.sin(line[:, None] / 2 + turn[:, 0]) * torch.cos(line / 3 + turn[:, 1])
        noise, time = torch.randn(number, 8, 8, generator=generator), torch.rand(number, generator=generator)
        return [{"picture": pictures[i], "noise": noise[i], "time": time[i]} for i in range(number)]

    def train_data(self) -> list[dict[str, Tensor]]:
        return self._pictures(self.config.seed, 190)

    def valid_data(self) -> list[dict[str, Tensor]]:
        return self._pictures(self.config.seed + 41, 35)

    def build_model(self) -> nn.Module:
        return FlowTransformer()

    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> Loss:
        picture, noise, time = batch["picture"], batch["noise"], batch["time"]
        share = time[:, None, None]
        error = model((1 - share) * noise + share * picture, time) - (picture - noise)
        return Loss(sum=error.square().sum(), count=error.numel())

    def count(self, batch: dict[str, Tensor]) -> int:
        return batch["picture"].numel()
