"""Correct tasks on pictures and sound: transformers, convolutions of several kinds, segmentation, speech."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from case import ACCUMULATE, BF16, DDP, FSDP, clean
from torch import Tensor, nn

from shardwise import Loss, Task

KINDS = 5


def pictures(seed: int, number: int, size: int = 16) -> list[tuple[Tensor, int]]:
    """Stripes of five directions, in noise."""
    generator = torch.Generator().manual_seed(seed)
    down, right = torch.meshgrid(torch.arange(size), torch.arange(size), indexing="ij")
    made = []
    for i in range(number):
        angle = math.pi * (i % KINDS) / KINDS
        wave = torch.sin((down * math.sin(angle) + right * math.cos(angle)) * 1.2)
        made.append((wave + 0.5 * torch.randn(3, size, size, generator=generator), i % KINDS))
    return made


class Pictures(Task):
    def train_data(self):
        return pictures(self.config.seed, 160)

    def valid_data(self):
        return pictures(self.config.seed + 1000, 30)

    def loss(self, model: nn.Module, batch: list[Tensor]) -> Loss:
        x, y = batch
        return Loss(sum=F.cross_entropy(model(x), y, reduction="sum"), count=len(x))


class Logits(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x).logits


@clean("vit", "vision transformer", "ViTForImageClassification", ("ddp-4", 4, DDP), ("ddp-bf16", 2, DDP | BF16))
class Vit(Pictures):
    def build_model(self) -> nn.Module:
        from transformers import ViTConfig, ViTForImageClassification

        config = ViTConfig(
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=64,
            image_size=16,
            patch_size=4,
            num_labels=KINDS,
        )
        return Logits(ViTForImageClassification(config))


class DenseLayer(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, 6, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x, F.relu(self.conv(x))], dim=1)


@clean(
    "dense-convolutions",
    "dense convolutions",
    "each convolution sees all before it",
    ("ddp-accumulate", 2, DDP | ACCUMULATE),
)
class Dense(Pictures):
    def build_model(self) -> nn.Module:
        layers = [DenseLayer(3 + 6 * i) for i in range(5)]
        return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(33 * 4, KINDS))


class Residual(nn.Module):
    def __init__(self, norm: str) -> None:
        super().__init__()
        self.conv1, self.conv2 = (nn.Conv2d(12, 12, 3, padding=1, bias=False) for _ in range(2))
        self.norm1, self.norm2 = (nn.BatchNorm2d(12) if norm == "batch" else nn.GroupNorm(3, 12) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x)))))


def residual(norm: str) -> nn.Module:
    blocks = [Residual(norm) for _ in range(2)]
    head = [nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(48, KINDS)]
    return nn.Sequential(nn.Conv2d(3, 12, 3, stride=2, padding=1), *blocks, *head)


@clean("residual-batch-norm", "residual convolutions", "batch norm, each rank over its own samples", ("ddp-4", 4, DDP))
class ResidualBatchNorm(Pictures):
    def build_model(self) -> nn.Module:
        return residual("batch")


@clean("residual-frozen-norm", "residual convolutions", "batch norm that stays in eval mode, as in fine-tuning")
class ResidualFrozenNorm(Pictures):
    def build_model(self) -> nn.Module:
        model = residual("batch")
        for module in model.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.train = lambda mode=True, module=module: module  # type: ignore[method-assign]
                module.training = False
        return model


@clean(
    "residual-group-norm",
    "group norm",
    "the same with group norm",
    ("ddp-4-accumulate", 4, DDP | ACCUMULATE),
    ("fsdp-bf16", 2, FSDP | BF16),
)
class ResidualGroupNorm(Pictures):
    def build_model(self) -> nn.Module:
        return residual("group")


@clean(
    "depthwise",
    "separable convolutions",
    "depthwise convolutions, squeeze and excitation",
    ("ddp-accumulate", 2, DDP | ACCUMULATE),
)
class Depthwise(Pictures):
    def build_model(self) -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(3, 16, 1), nn.Hardswish(), nn.Conv2d(16, 16, 3, padding=1, groups=16), Excite(16), nn.Conv2d(16, 24, 1),
            nn.SiLU(), nn.AdaptiveMaxPool2d(2), nn.Flatten(), nn.Linear(96, KINDS),
        )  # fmt: skip


class Excite(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.gate = nn.Sequential(nn.Linear(channels, 4), nn.ReLU(), nn.Linear(4, channels), nn.Sigmoid())

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gate(x.mean(dim=(2, 3)))[:, :, None, None]


class Masks(Task):
    """Where is the disc? Every pixel counts."""

    size = 16
    unit = "pixels"

    def train_data(self):
        generator = torch.Generator().manual_seed(self.config.seed)
        return [self.disc(generator) for _ in range(150)]

    def disc(self, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        places = torch.arange(self.size)
        centre = torch.rand(2, generator=generator) * self.size
        radius = 2 + 4 * torch.rand(1, generator=generator)
        inside = (places[:, None] - centre[0]) ** 2 + (places[None] - centre[1]) ** 2 < radius**2
        return (inside + torch.randn(self.size, self.size, generator=generator))[None], inside[None].float()

    def count(self, batch: list[Tensor]) -> int:
        return batch[1].numel()

    def loss(self, model: nn.Module, batch: list[Tensor]) -> Loss:
        x, y = batch
        return Loss(sum=F.binary_cross_entropy_with_logits(model(x), y, reduction="sum"), count=y.numel())


class OwnUnet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down1, self.down2 = self.step(1, 8), self.step(8, 16)
        self.up = nn.ConvTranspose2d(16, 8, 2, stride=2)
        self.last = self.step(16, 8)
        self.out = nn.Conv2d(8, 1, 1)

    def step(self, before: int, after: int) -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(before, after, 3, padding=1), nn.InstanceNorm2d(after, affine=True), nn.LeakyReLU(0.1)
        )

    def forward(self, x: Tensor) -> Tensor:
        fine = self.down1(x)
        coarse = self.down2(F.max_pool2d(fine, 2))
        return self.out(self.last(torch.cat([fine, self.up(coarse)], dim=1)))


@clean("unet-own", "U-Net", "a U-Net by hand, with instance norm", ("ddp-accumulate", 2, DDP | ACCUMULATE))
class Unet(Masks):
    def build_model(self) -> nn.Module:
        return OwnUnet()


@clean("unet-monai", "U-Net", "MONAI's UNet, dice of each sample and cross entropy", ("ddp-4", 4, DDP))
class UnetMonai(Masks):
    unit = "samples"

    def count(self, batch: list[Tensor]) -> int:
        return len(batch[0])

    def build_model(self) -> nn.Module:
        from monai.networks.nets import UNet

        return UNet(2, 1, 1, channels=(8, 16, 16), strides=(2, 2), num_res_units=1, norm="instance")

    def loss(self, model: nn.Module, batch: list[Tensor]) -> Loss:
        x, y = batch
        logits = model(x)
        p = logits.float().sigmoid().flatten(1)
        truth = y.flatten(1)
        dice = 1 - (2 * (p * truth).sum(1) + 1) / (p.sum(1) + truth.sum(1) + 1)
        entropy = F.binary_cross_entropy_with_logits(logits, y, reduction="none").flatten(1).mean(1)
        return Loss(sum=(dice + entropy).sum(), count=len(x))


class Coder(nn.Module):
    """Takes the noise that comes with the sample; in eval mode none."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Flatten(), nn.Linear(256, 32), nn.Tanh(), nn.Linear(32, 16))
        self.decoder = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 256))

    def forward(self, x: Tensor, noise: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mean, spread = self.encoder(x).chunk(2, dim=1)
        code = mean + noise * torch.exp(0.5 * spread) if self.training else mean
        return self.decoder(code), mean, spread


class WithNoise(torch.utils.data.Dataset):
    def __init__(self, samples: list[tuple[Tensor, Tensor]]) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.samples[index][0], torch.randn(8)


@clean(
    "vae",
    "variational autoencoder",
    "noise is part of the sample; none in eval mode",
    ("ddp-accumulate", 2, DDP | ACCUMULATE),
)
class Vae(Masks):
    unit = "samples"

    def train_data(self):
        return WithNoise(super().train_data())

    def count(self, batch: list[Tensor]) -> int:
        return len(batch[0])

    def build_model(self) -> nn.Module:
        return Coder()

    def loss(self, model: nn.Module, batch: list[Tensor]) -> Loss:
        x, noise = batch
        made, mean, spread = model(x, noise)
        far = (made - x.flatten(1)).square().sum()
        divergence = -0.5 * (1 + spread - mean.square() - spread.exp()).sum()
        return Loss(sum=far + divergence, count=len(x))


@clean("denoiser", "diffusion", "noise and its strength are part of the sample", ("ddp-bf16", 2, DDP | BF16))
class Denoiser(Masks):
    def train_data(self):
        return Noised([picture for picture, _ in super().train_data()])

    def build_model(self) -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(2, 16, 3, padding=1), nn.GroupNorm(4, 16), nn.SiLU(), nn.Conv2d(16, 16, 3, padding=1), nn.SiLU(),
            nn.Conv2d(16, 1, 3, padding=1),
        )  # fmt: skip

    def count(self, batch: list[Tensor]) -> int:
        return batch[1].numel()

    def loss(self, model: nn.Module, batch: list[Tensor]) -> Loss:
        x, noise = batch
        return Loss(sum=(model(x) - noise).square().sum(), count=noise.numel())


class Noised(torch.utils.data.Dataset):
    def __init__(self, samples: list[Tensor]) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        strength = torch.rand(1)
        noise = torch.randn_like(self.samples[index])
        mixed = (1 - strength).sqrt() * self.samples[index] + strength.sqrt() * noise
        return torch.cat([mixed, strength.expand_as(mixed)]), noise


def waves(seed: int, number: int, length: int) -> list[tuple[Tensor, Tensor]]:
    """Three tones after each other, and which they were, 1 to 4."""
    generator = torch.Generator().manual_seed(seed)
    made = []
    for _ in range(number):
        tones = torch.randint(1, 5, (3,), generator=generator)
        pitch = tones.float().repeat_interleave(length // 3 + 1)[:length]
        made.append((torch.sin(pitch.cumsum(0) * 0.3) + 0.1 * torch.randn(length, generator=generator), tones))
    return made


class WaveEncoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ears = nn.Sequential(
            nn.Conv1d(1, 16, 8, stride=4), nn.GroupNorm(1, 16), nn.GELU(), nn.Conv1d(16, 32, 4, stride=2), nn.GELU()
        )
        layer = nn.TransformerEncoderLayer(32, 2, 64, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(32, 5)

    def forward(self, wave: Tensor) -> Tensor:
        return self.head(self.encoder(self.ears(wave.unsqueeze(1)).transpose(1, 2)))


@clean("speech-ctc", "speech", "convolutions over the wave, an encoder, CTC", ("ddp-4", 4, DDP))
class Ctc(Task):
    def train_data(self):
        return waves(self.config.seed, 160, 160)

    def build_model(self) -> nn.Module:
        return WaveEncoder()

    def loss(self, model: nn.Module, batch: list[Tensor]) -> Loss:
        wave, tones = batch
        scores = model(wave).float().log_softmax(dim=-1).transpose(0, 1)
        lengths = torch.full((len(wave),), len(scores)), torch.full((len(wave),), tones.shape[1])
        return Loss(sum=F.ctc_loss(scores, tones, *lengths, reduction="sum", zero_infinity=True), count=len(wave))


class Ears(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, sound: Tensor, before: Tensor) -> Tensor:
        return self.model(input_features=sound, decoder_input_ids=before).logits


@clean(
    "whisper", "speech", "WhisperForConditionalGeneration on made-up spectra", ("ddp-accumulate", 2, DDP | ACCUMULATE)
)
class Whisper(Task):
    def train_data(self):
        return [(wave.view(8, 40), tones) for wave, tones in waves(self.config.seed, 150, 320)]

    def build_model(self) -> nn.Module:
        from transformers import WhisperConfig, WhisperForConditionalGeneration

        config = WhisperConfig(
            vocab_size=8,
            num_mel_bins=8,
            d_model=32,
            encoder_layers=2,
            decoder_layers=2,
            encoder_attention_heads=2,
            decoder_attention_heads=2,
            encoder_ffn_dim=64,
            decoder_ffn_dim=64,
            max_source_positions=20,
            max_target_positions=8,
            pad_token_id=0,
            bos_token_id=5,
            eos_token_id=6,
            decoder_start_token_id=5,
            use_cache=False,
        )
        return Ears(WhisperForConditionalGeneration(config))

    def count(self, batch: list[Tensor]) -> int:
        return batch[1].numel()

    def loss(self, model: nn.Module, batch: list[Tensor]) -> Loss:
        sound, tones = batch
        before = F.pad(tones[:, :-1], (1, 0), value=5)
        total = F.cross_entropy(model(sound, before).flatten(0, 1), tones.flatten(), reduction="sum")
        return Loss(sum=total, count=tones.numel())
