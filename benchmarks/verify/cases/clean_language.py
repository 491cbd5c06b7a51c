"""Correct tasks on sequences of tokens: decoders, encoders, both, recurrent networks, experts, adapters, rare words."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from case import ACCUMULATE, BF16, DDP, FSDP, UNUSED, clean
from plain import PAD, VOCABULARY, WIDTH, Sentences, pad, sentences
from torch import Tensor, nn

from shardwise import Loss, Task


class Logits(nn.Module):
    """A Hugging Face model whose answer is its logits."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *args: Tensor, **named: Tensor) -> Tensor:
        return self.model(*args, **named).logits


@clean(
    "llama", "decoder", "LlamaForCausalLM, padded to the longest of the micro-batch, tokens count",
    ("ddp-4-accumulate", 4, DDP | ACCUMULATE), ("fsdp-bf16", 2, FSDP | BF16), ("ddp-bf16", 2, DDP | BF16),
    ("pipeline", 2, {"pipeline": {"stages": 2}} | ACCUMULATE), ("zero1", 2, {"strategy": "zero1"}),
)  # fmt: skip
class Llama(Sentences):
    def build_model(self) -> nn.Module:
        from transformers import LlamaConfig, LlamaForCausalLM

        config = LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=64,
            use_cache=False,
            tie_word_embeddings=False,
        )
        return Logits(LlamaForCausalLM(config))


@clean(
    "gpt2-tied",
    "decoder",
    "GPT2LMHeadModel with tied embeddings",
    ("fsdp-4", 4, FSDP),
    ("ddp-accumulate", 2, DDP | ACCUMULATE),
)
class Gpt2(Sentences):
    def build_model(self) -> nn.Module:
        from transformers import GPT2Config, GPT2LMHeadModel

        config = GPT2Config(
            vocab_size=VOCABULARY,
            n_positions=64,
            n_embd=32,
            n_layer=2,
            n_head=2,
            use_cache=False,
            bos_token_id=1,
            eos_token_id=1,
        )
        return Logits(GPT2LMHeadModel(config))


class Hidden(torch.utils.data.Dataset):
    """Sentences of which some tokens are hidden anew at every reading, at least one."""

    def __init__(self, texts: list[Tensor], mask: int) -> None:
        self.texts, self.mask = texts, mask

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        text = self.texts[index]
        hidden = torch.rand(len(text)) < 0.15
        hidden[torch.randint(len(text), (1,))] = True
        return torch.where(hidden, self.mask, text), torch.where(hidden, text, -100)


@clean(
    "bert-masked", "encoder", "BertForMaskedLM; hidden tokens are drawn from torch in __getitem__ and count",
    ("ddp-accumulate", 2, DDP | ACCUMULATE), ("ddp-bf16", 2, DDP | BF16), ("ddp-workers", 2, DDP),
)  # fmt: skip
class Bert(Task):
    def train_data(self):
        return Hidden(sentences(self.config.seed, 200, 6, 20), mask=VOCABULARY)

    def collate(self, samples: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        labels = nn.utils.rnn.pad_sequence([hidden for _, hidden in samples], batch_first=True, padding_value=-100)
        return pad([shown for shown, _ in samples]), labels

    def count(self, batch: tuple[Tensor, Tensor]) -> int:
        return int((batch[1] != -100).sum())

    def build_model(self) -> nn.Module:
        from transformers import BertConfig, BertForMaskedLM

        config = BertConfig(
            vocab_size=VOCABULARY + 1,
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=64,
            max_position_embeddings=32,
        )
        return Logits(BertForMaskedLM(config))

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Loss:
        shown, hidden = batch
        logits = model(shown, attention_mask=(shown != PAD).long())
        total = F.cross_entropy(logits.flatten(0, 1), hidden.flatten(), ignore_index=-100, reduction="sum")
        return Loss(sum=total, count=self.count(batch))


@clean("t5", "encoder-decoder", "T5ForConditionalGeneration that reverses a text", ("ddp-4", 4, DDP))
class T5(Task):
    dropout = 0.0

    def train_data(self):
        return sentences(self.config.seed, 160, 5, 12)

    def collate(self, samples: list[Tensor]) -> tuple[Tensor, Tensor]:
        reversed_ = [text.flip(0) for text in samples]
        return pad(samples), nn.utils.rnn.pad_sequence(reversed_, batch_first=True, padding_value=-100)

    def count(self, batch: tuple[Tensor, Tensor]) -> int:
        return int((batch[1] != -100).sum())

    def build_model(self) -> nn.Module:
        from transformers import T5Config, T5ForConditionalGeneration

        config = T5Config(
            vocab_size=VOCABULARY,
            d_model=32,
            d_kv=8,
            d_ff=64,
            num_layers=2,
            num_heads=4,
            dropout_rate=self.dropout,
            use_cache=False,
            decoder_start_token_id=PAD,
            pad_token_id=PAD,
            eos_token_id=1,
        )
        return Logits(T5ForConditionalGeneration(config))

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Loss:
        source, target = batch
        logits = model(source, attention_mask=(source != PAD).long(), labels=target)
        total = F.cross_entropy(logits.flatten(0, 1), target.flatten(), ignore_index=-100, reduction="sum")
        return Loss(sum=total, count=self.count(batch))


@clean(
    "t5-dropout",
    "encoder-decoder",
    "the same with its usual dropout, which its attention calls as a function",
    fsdp=False,
)
class T5Dropout(T5):
    dropout = 0.1


class OwnBlock(nn.Module):
    """Attention and an MLP, in a way that can be split by columns and rows."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.head_width = width // heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.q, self.k, self.v, self.out = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm1(x)
        q, k, v = (part(h).unflatten(-1, (-1, self.head_width)).transpose(1, 2) for part in (self.q, self.k, self.v))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class OwnDecoder(nn.Module):
    def __init__(self, width: int = 32, heads: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.places = nn.Embedding(64, width)
        self.blocks = nn.ModuleList(OwnBlock(width, heads) for _ in range(4))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) + self.places(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


@clean(
    "own-decoder", "decoder", "a decoder written by hand, with a tensor plan of its own",
    ("tensor", 2, {"tensor": {"size": 2}}), ("pipeline", 2, {"pipeline": {"stages": 2}} | ACCUMULATE),
    ("pipeline-fsdp-4", 4, {"pipeline": {"stages": 2}, "fsdp": {"min_num_params": 0}} | ACCUMULATE),
    ("fsdp-recomputed", 2, {"fsdp": {"activation_checkpointing": True}}),
    ("fsdp-hybrid-4", 4, {"fsdp": {"sharding_strategy": "HYBRID_SHARD", "shard_size": 2}}),
)  # fmt: skip
class Own(Sentences):
    def build_model(self) -> nn.Module:
        return OwnDecoder()

    def tensor_plan(self, model: nn.Module, ranks: int, sequence_parallel: bool):
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

        if sequence_parallel:
            return None
        columns = {name: ColwiseParallel() for name in ("q", "k", "v", "up")}
        rows = {name: RowwiseParallel() for name in ("out", "down")}
        return {
            f"blocks.{i}.{name}": style for i in range(len(model.blocks)) for name, style in (columns | rows).items()
        }


@clean("gru", "recurrent", "a GRU that predicts the next token", ("ddp-4-accumulate", 4, DDP | ACCUMULATE))
class Gru(Sentences):
    pass


class LastState(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.rnn = nn.LSTM(WIDTH, WIDTH, num_layers=2, batch_first=True, bidirectional=True)
        self.head = nn.Linear(2 * WIDTH, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        lengths = (tokens != PAD).sum(dim=1).cpu()
        packed = nn.utils.rnn.pack_padded_sequence(self.embed(tokens), lengths, batch_first=True, enforce_sorted=False)
        return self.head(self.rnn(packed)[1][0][-2:].transpose(0, 1).flatten(1))


@clean(
    "lstm", "recurrent", "a bidirectional LSTM over packed sequences that classifies them", ("ddp-bf16", 2, DDP | BF16)
)
class Lstm(Task):
    def train_data(self):
        return [(text, int(text[0]) % 3) for text in sentences(self.config.seed, 200, 3, 15)]

    def collate(self, samples: list[tuple[Tensor, int]]) -> tuple[Tensor, Tensor]:
        return pad([text for text, _ in samples]), torch.tensor([kind for _, kind in samples])

    def count(self, batch: tuple[Tensor, Tensor]) -> int:
        return len(batch[1])

    def build_model(self) -> nn.Module:
        return LastState()

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Loss:
        return Loss(sum=F.cross_entropy(model(batch[0]), batch[1], reduction="sum"), count=len(batch[1]))


class Experts(nn.Module):
    """Each token goes to its best `top` of six experts."""

    def __init__(self, top: int, skip_idle: bool) -> None:
        super().__init__()
        self.top, self.skip_idle = top, skip_idle
        self.router = nn.Linear(WIDTH, 6)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 32), nn.GELU(), nn.Linear(32, WIDTH)) for _ in range(6)
        )

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, -2)
        weights, chosen = self.router(tokens).softmax(dim=-1).topk(self.top, dim=-1)
        out = torch.zeros_like(tokens)
        for number, expert in enumerate(self.experts):
            row, place = (chosen == number).nonzero(as_tuple=True)
            if self.skip_idle and not len(row):
                continue
            part = expert(tokens[row]) * weights[row, place].unsqueeze(-1)
            out = out.index_add(0, row, part.to(out.dtype))
        return x + out.view_as(x)


class ExpertWords(nn.Module):
    def __init__(self, top: int, skip_idle: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Experts(top, skip_idle) for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)

    # An expert that gets no token is applied to none, so that it has a gradient of zeros.


@clean("experts-top1", "mixture of experts", "top-1; an idle expert is called with no token", ("ddp-4", 4, DDP))
class ExpertsTop1(Sentences):
    shortest, longest = 2, 5

    def build_model(self) -> nn.Module:
        return ExpertWords(top=1, skip_idle=False)


@clean(
    "experts-top2",
    "mixture of experts",
    "top-2; an idle expert is called with no token",
    ("ddp-accumulate", 2, DDP | ACCUMULATE),
)
class ExpertsTop2(Sentences):
    shortest, longest = 2, 5

    def build_model(self) -> nn.Module:
        return ExpertWords(top=2, skip_idle=False)


@clean(
    "experts-idle", "mixture of experts", "top-1; an idle expert is not called, so it has no gradient in that batch",
    ("ddp", 2, UNUSED), ("ddp-accumulate", 2, UNUSED | ACCUMULATE), ddp=False,
)  # fmt: skip
class ExpertsIdle(Sentences):
    shortest, longest = 2, 3

    def build_model(self) -> nn.Module:
        return ExpertWords(top=1, skip_idle=True)


class Adapted(nn.Module):
    """A frozen matrix and a product of two narrow ones, the second zero at first."""

    def __init__(self, inner: nn.Linear, narrow: int = 4) -> None:
        super().__init__()
        self.inner = inner.requires_grad_(False)
        self.a = nn.Linear(inner.in_features, narrow, bias=False)
        self.b = nn.Linear(narrow, inner.out_features, bias=False)
        nn.init.zeros_(self.b.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) + self.b(self.a(x))


@clean(
    "adapters",
    "adapters",
    "a frozen decoder whose MLPs have adapters of rank 4",
    ("ddp-4", 4, DDP),
    ("fsdp-bf16", 2, FSDP | BF16),
)
class Adapters(Sentences):
    def build_model(self) -> nn.Module:
        model = OwnDecoder().requires_grad_(False)
        for block in model.blocks:
            block.up, block.down = Adapted(block.up), Adapted(block.down)
        return model


@clean(
    "rare-words",
    "sparse embedding",
    "an embedding of 4000 words, of which forty are used",
    ("ddp-accumulate", 2, DDP | ACCUMULATE),
)
class RareWords(Sentences):
    def train_data(self):
        return [text * 97 for text in super().train_data()]

    def build_model(self) -> nn.Module:
        model = nn.Sequential(nn.Embedding(4000, 16), nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, VOCABULARY))
        nn.init.normal_(model[0].weight, std=0.1)
        return model

    def loss(self, model: nn.Module, batch: Tensor) -> Loss:
        target = (batch[:, 1:] // 97).flatten()
        total = F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), target, ignore_index=PAD, reduction="sum")
        return Loss(sum=total, count=self.count(batch))
