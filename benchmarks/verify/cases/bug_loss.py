"""Losses that are no sums over the samples, and counts that are not theirs."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from case import bug
from plain import CLASSES, PAD, VOCABULARY, WIDTH, Mlp, Plain, Sentences, Words, points
from torch import Tensor, nn

from shardwise import Loss

NO_SUM = ("loss_is_no_sum",)
MEANS = ("mean_of_means", "loss_is_no_sum")


@bug(
    "mean-counted-once",
    "mean in place of sum",
    "each micro-batch is divided by its own size",
    MEANS,
    visible="ragged batches, where ranks have different numbers of samples",
)
class MeanCountedOnce(Plain):
    """The loss is the mean of the micro-batch, and counts as one."""

    def count(self, batch: list[Tensor]) -> int:
        return 1

    def loss(self, model: nn.Module, batch: list[Tensor]) -> Loss:
        return Loss(sum=F.cross_entropy(model(batch[0]), batch[1]), count=1)


@bug(
    "mean-divided-again",
    "mean in place of sum",
    "the mean of each micro-batch is divided once more by the samples",
    (*MEANS, "scaled_by_world", "wrong_scaling"),
)
class MeanDividedAgain(Plain):
    """The loss is a mean, but the count is the number of samples."""

    def loss(self, model: nn.Module, batch: list[Tensor]) -> Loss:
        return Loss(sum=F.cross_entropy(model(batch[0]), batch[1]), count=len(batch[0]))


@bug("one-of-two-is-a-mean", "mean in place of sum", "one term of the loss is a mean of the micro-batch", MEANS)
class OneOfTwoIsAMean(Plain):
    """Cross entropy is summed; the penalty of large answers is averaged."""

    def loss(self, model: nn.Module, batch: list[Tensor]) -> Loss:
        answers = model(batch[0])
        penalty = 5 * answers.square().mean()
        return Loss(sum=F.cross_entropy(answers, batch[1], reduction="sum") + penalty, count=len(batch[0]))


@bug(
    "token-means-bf16",
    "mean in place of sum",
    "tokens of each micro-batch are averaged on their own",
    MEANS,
    precision="bf16-mixed",
    gradient_accumulation=2,
    visible="a difference of some percent, in bf16-mixed with accumulation",
)
class TokenMeans(Sentences):
    """The mean over the tokens of a micro-batch, times its samples: its length depends on who is in it."""

    unit = "samples"

    def count(self, batch: Tensor) -> int:
        return len(batch)

    def loss(self, model: nn.Module, batch: Tensor) -> Loss:
        mean = F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten(), ignore_index=PAD)
        return Loss(sum=mean * len(batch), count=len(batch))


@bug(
    "padding-counted",
    "wrong count",
    "the count includes padding, which depends on the longest of the micro-batch",
    ("wrong_scaling", "loss_is_no_sum"),
)
class PaddingCounted(Sentences):
    """The sum leaves padding out, the count does not."""

    def count(self, batch: Tensor) -> int:
        return batch[:, 1:].numel()


@bug("padding-summed", "wrong count", "padding is part of the loss, and there is more of it in a larger batch", NO_SUM)
class PaddingSummed(Sentences):
    """Padding is predicted like words, and counted."""

    def count(self, batch: Tensor) -> int:
        return batch[:, 1:].numel()

    def loss(self, model: nn.Module, batch: Tensor) -> Loss:
        total = F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten(), reduction="sum")
        return Loss(sum=total, count=self.count(batch))


@bug(
    "counts-disagree",
    "wrong count",
    "`count` and `loss` do not agree on what is counted",
    ("wrong_scaling", "engine_step", "rank_failed"),
    refusal_is_right=True,
)
class CountsDisagree(Sentences):
    """`count` says samples, `loss` says tokens."""

    def count(self, batch: Tensor) -> int:
        return len(batch)

    def loss(self, model: nn.Module, batch: Tensor) -> Loss:
        return Loss(sum=super().loss(model, batch).sum, count=super().count(batch))


@bug("class-weights-normalised", "weights by batch", "class weights are divided by their sum in the micro-batch", MEANS)
class ClassWeightsNormalised(Plain):
    """A weighted mean of PyTorch, times the number of samples: it divides by the weights of this micro-batch."""

    def loss(self, model: nn.Module, batch: list[Tensor]) -> Loss:
        x, y = batch
        mean = F.cross_entropy(model(x), y, weight=torch.tensor([0.1, 1.0, 4.0, 20.0]))
        return Loss(sum=mean * len(x), count=len(x))


@bug(
    "sample-weights-normalised",
    "weights by batch",
    "sample weights are made to sum to one within the micro-batch",
    MEANS,
)
class SampleWeightsNormalised(Plain):
    """Each sample's weight is a softmax over the micro-batch."""

    def loss(self, model: nn.Module, batch: list[Tensor]) -> Loss:
        x, y = batch
        weights = (2 * x[:, 0]).softmax(dim=0) * len(x)
        return Loss(sum=(weights * F.cross_entropy(model(x), y, reduction="none")).sum(), count=len(x))


@bug("contrastive", "pairs within a batch", "each sample's loss has the other samples of the micro-batch in it", NO_SUM)
class Contrastive(Plain):
    """CLIP's loss: the others in the micro-batch are the negatives."""

    def loss(self, model: nn.Module, batch: list[Tensor]) -> Loss:
        x, _ = batch
        one = F.normalize(model(x), dim=1)
        two = F.normalize(model(x.roll(1, dims=1)), dim=1)
        return Loss(sum=F.cross_entropy(one @ two.T / 0.2, torch.arange(len(x)), reduction="sum"), count=len(x))


@bug("hardest-negative", "pairs within a batch", "negatives are looked for in the micro-batch", NO_SUM)
class HardestNegative(Plain):
    """Triplets with the nearest sample of another class in the micro-batch."""

    def loss(self, model: nn.Module, batch: list[Tensor]) -> Loss:
        x, y = batch
        codes = model(x)
        far = (codes[:, None] - codes[None]).square().sum(-1)
        nearest = far.masked_fill(y[:, None] == y[None], 100.0).amin(dim=1)
        total = F.relu(4 - nearest).sum() + F.cross_entropy(codes, y, reduction="sum")
        return Loss(sum=total, count=len(x))


class Routed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(8, 4)
        self.experts = nn.ModuleList(nn.Linear(8, CLASSES) for _ in range(4))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        shares = self.router(x).softmax(dim=1)
        return (torch.stack([expert(x) for expert in self.experts], 1) * shares.unsqueeze(2)).sum(1), shares


@bug(
    "load-balance",
    "products of batch means",
    "the balance of the experts is a product of means over the micro-batch",
    NO_SUM,
)
class LoadBalance(Plain):
    """Switch's auxiliary loss, times the number of samples."""

    def build_model(self) -> nn.Module:
        return Routed()

    def loss(self, model: nn.Module, batch: list[Tensor]) -> Loss:
        x, y = batch
        out, shares = model(x)
        chosen = F.one_hot(shares.argmax(1), 4).float().mean(0)
        balance = 4 * (chosen * shares.mean(0)).sum()
        return Loss(sum=F.cross_entropy(out, y, reduction="sum") + 2 * balance * len(x), count=len(x))


class Whitened(Mlp):
    def features(self, x: Tensor) -> Tensor:
        x = super().features(x)
        return (x - x.mean(0)) / (x.var(0, unbiased=False) + 0.1).sqrt()


@bug("statistics-by-hand", "batch statistics", "features are normalised over the micro-batch", NO_SUM)
class StatisticsByHand(Plain):
    """Mean and variance over the micro-batch, written by hand."""

    def build_model(self) -> nn.Module:
        return Whitened()


@bug("collate-normalises", "batch statistics", "inputs are normalised over the micro-batch, in collate", NO_SUM)
class CollateNormalises(Plain):
    """`collate` subtracts the mean of the micro-batch and divides by its largest value."""

    def collate(self, samples: list[tuple[Tensor, Tensor]]) -> list[Tensor]:
        x, y = torch.stack([x for x, _ in samples]), torch.stack([y for _, y in samples])
        x = x - x.mean(0)
        return [x / (x.abs().amax(0) + 0.1), y]


@bug(
    "hard-half",
    "chosen within a batch",
    "which samples are trained on depends on the others in the micro-batch",
    NO_SUM,
)
class HardHalf(Plain):
    """Only the harder half of the micro-batch is trained on."""

    def loss(self, model: nn.Module, batch: list[Tensor]) -> Loss:
        x, y = batch
        each = F.cross_entropy(model(x), y, reduction="none")
        return Loss(sum=2 * each.topk((len(x) + 1) // 2).values.sum(), count=len(x))


@bug(
    "only-first-five",
    "chosen within a batch",
    "samples beyond the fifth of a micro-batch are left out",
    ("loss_is_no_sum", "order_matters", "gradients"),
)
class OnlyFirstFive(Plain):
    """Left from debugging: `[:5]`."""

    def loss(self, model: nn.Module, batch: list[Tensor]) -> Loss:
        x, y = batch
        return Loss(sum=F.cross_entropy(model(x[:5]), y[:5], reduction="sum"), count=len(x))


@bug(
    "partial-batch-ignored",
    "chosen within a batch",
    "a micro-batch that is not full is left out of the loss",
    ("loss_is_no_sum", "micro_batch_lost", "gradients"),
    visible="ragged batches",
)
class PartialBatchIgnored(Plain):
    """A micro-batch of less than eight samples gets a loss of zero, "to keep batches equal"."""

    samples = 235

    def loss(self, model: nn.Module, batch: list[Tensor]) -> Loss:
        full = super().loss(model, batch)
        return full if full.count >= 8 else Loss(sum=0 * full.sum, count=full.count)


@bug(
    "sequences-joined",
    "samples in one another",
    "samples are laid end to end, and the state goes from one into the next",
    ("loss_is_no_sum", "order_matters"),
)
class SequencesJoined(Sentences):
    """Packed into one row without a border: the recurrent state of one sample enters the next."""

    def collate(self, samples: list[Tensor]) -> Tensor:
        return torch.cat([F.pad(text, (0, 1)) for text in samples]).unsqueeze(0)


class TimeFirst(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layer = nn.TransformerEncoderLayer(WIDTH, 2, 48, dropout=0.0)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.layer(self.embed(tokens)))


@bug(
    "batch-first-forgotten",
    "samples in one another",
    "attention runs over the samples of the micro-batch instead of over the words",
    NO_SUM,
)
class BatchFirstForgotten(Sentences):
    """nn.TransformerEncoderLayer without batch_first=True, on batches whose first dimension is the samples."""

    def build_model(self) -> nn.Module:
        return TimeFirst()


class WrongSoftmax(Mlp):
    def forward(self, x: Tensor) -> Tensor:
        h = self.features(x)
        return self.head(h * h.softmax(dim=0) * 8)


@bug("softmax-over-samples", "samples in one another", "a softmax runs over the samples of the micro-batch", NO_SUM)
class SoftmaxOverSamples(Plain):
    """softmax(dim=0) where dim=1 was meant."""

    def build_model(self) -> nn.Module:
        return WrongSoftmax()


@bug(
    "mixup-in-loss",
    "samples in one another",
    "each sample is mixed with its neighbour in the micro-batch",
    ("loss_is_no_sum", "order_matters"),
)
class MixupInLoss(Plain):
    """Mixes the micro-batch with itself turned around."""

    def loss(self, model: nn.Module, batch: list[Tensor]) -> Loss:
        x, y = batch
        out = model(0.6 * x + 0.4 * x.flip(0))
        total = 0.6 * F.cross_entropy(out, y, reduction="sum") + 0.4 * F.cross_entropy(out, y.flip(0), reduction="sum")
        return Loss(sum=total, count=len(x))


@bug("survival", "samples in one another", "each event's risk set is the micro-batch", NO_SUM)
class Survival(Plain):
    """Cox's partial likelihood over the micro-batch."""

    def build_model(self) -> nn.Module:
        return Mlp(out=1)

    def loss(self, model: nn.Module, batch: list[Tensor]) -> Loss:
        x, _ = batch
        risk = model(x)[:, 0][x[:, 0].argsort(descending=True)]
        return Loss(sum=(risk.logcumsumexp(0) - risk).sum(), count=len(x))


@bug("dice-over-batch", "products of batch means", "dice is a quotient of sums over the micro-batch", NO_SUM)
class DiceOverBatch(Plain):
    """One dice for all samples of the micro-batch, times their number."""

    def loss(self, model: nn.Module, batch: list[Tensor]) -> Loss:
        x, y = batch
        p, truth = model(x).softmax(1), F.one_hot(y, CLASSES)
        dice = 1 - (2 * (p * truth).sum(0) / (p.sum(0) + truth.sum(0) + 1e-3)).mean()
        return Loss(sum=dice * len(x), count=len(x))


@bug(
    "penalty-per-micro-batch",
    "mean in place of sum",
    "a term without samples in it is added once per micro-batch",
    (*MEANS, "scaled_by_world"),
    gradient_accumulation=2,
)
class PenaltyPerMicroBatch(Plain):
    """The penalty of the weights is added once per micro-batch and not once per sample."""

    def loss(self, model: nn.Module, batch: list[Tensor]) -> Loss:
        plain = super().loss(model, batch)
        penalty = sum(p.square().sum() for p in model.parameters())
        return Loss(sum=plain.sum + 0.5 * penalty, count=plain.count)


@bug(
    "half-overflows",
    "numbers too large",
    "a sum in float16 overflows where the batch is large",
    ("loss_is_no_sum", "engine_step", "rank_failed", "gradients"),
    refusal_is_right=True,
    visible="where a micro-batch has more than about 9 samples: on one process",
)
class HalfOverflows(Plain):
    """The sum is taken in float16, which ends at 65504; what does not fit is cut off by nan_to_num."""

    def loss(self, model: nn.Module, batch: list[Tensor]) -> Loss:
        x, y = batch
        each = 5000 * F.cross_entropy(model(x), y, reduction="none")
        return Loss(sum=each.half().sum().nan_to_num(posinf=65504.0).float(), count=len(x))


@bug("temperature-by-size", "chosen within a batch", "the size of the micro-batch is in the loss", NO_SUM)
class TemperatureBySize(Plain):
    """Answers are divided by the root of the number of samples at hand."""

    def loss(self, model: nn.Module, batch: list[Tensor]) -> Loss:
        x, y = batch
        return Loss(sum=F.cross_entropy(model(x) / len(x) ** 0.5, y, reduction="sum"), count=len(x))


@bug(
    "rare-class-mean",
    "rare",
    "samples of a rare class are averaged within the micro-batch",
    MEANS,
    visible="global batches with two of the 24 rare samples (of 240)",
)
class RareClassMean(Plain):
    """Where the rare class is present, the loss is its mean times ten."""

    def train_data(self):
        x, y = points(self.config.seed, self.samples)
        x[::10, 0] = 6.0
        return list(zip(x, y, strict=True))

    def loss(self, model: nn.Module, batch: list[Tensor]) -> Loss:
        x, y = batch
        each = F.cross_entropy(model(x), y, reduction="none")
        rare = x[:, 0] == 6.0
        total = each[~rare].sum()
        return Loss(sum=total + 10 * each[rare].mean() if rare.any() else total, count=len(x))


@bug(
    "rare-outlier",
    "rare",
    "with an outlier in it, the whole micro-batch is scaled by its largest value",
    NO_SUM,
    visible="batches in which one of 3 outliers (of 240) is",
)
class RareOutlier(Plain):
    """Inputs are divided by the largest of the micro-batch if that is above 20."""

    def train_data(self):
        x, y = points(self.config.seed, self.samples)
        x[[17, 101, 200], 3] = 30.0
        return list(zip(x, y, strict=True))

    def loss(self, model: nn.Module, batch: list[Tensor]) -> Loss:
        x, y = batch
        if x.abs().max() > 20:
            x = x / x.abs().max()
        return super().loss(model, [x, y])


class Functional(Mlp):
    def features(self, x: Tensor) -> Tensor:
        return F.batch_norm(super().features(x), None, None, training=True) if len(x) > 1 else super().features(x)


@bug("functional-batch-norm", "batch statistics", "features are normalised over the micro-batch, by a function", NO_SUM)
class FunctionalBatchNorm(Plain):
    """F.batch_norm(training=True) in the forward pass: no module says that it is there."""

    def build_model(self) -> nn.Module:
        return Functional()


class Reversed(Words):
    def forward(self, tokens: Tensor) -> Tensor:
        return super().forward(tokens.flip(1)).flip(1)


@bug(
    "padding-read-first",
    "samples in one another",
    "a recurrent network reads the padding first, and the padding depends on the others",
    NO_SUM,
)
class PaddingReadFirst(Sentences):
    """The sequences are read from their end, where the padding of the micro-batch is."""

    def build_model(self) -> nn.Module:
        return Reversed()
