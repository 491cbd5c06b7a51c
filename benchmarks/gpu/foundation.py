"""The engine against a plain PyTorch loop on one GPU: same model code, tokens, precision, optimizer and clipping.

    python benchmarks/gpu/foundation.py                      a 1.26B Llama, batch 16, sequence 2048
    python benchmarks/gpu/foundation.py --tiny               a few seconds, to try the script on a CPU

Prints a markdown table: the median of the steps after the warm-up, with the device synchronised.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from shardwise import Block, DataBlock, Loss, Session, Task
from shardwise.config import parse_config
from shardwise.watch.rates import device_name, peak_flops

LLAMA = {
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "vocab_size": 32000,
}
TINY = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 1000,
}
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@dataclass
class Work:
    sizes: dict[str, int]
    batch: int
    sequence: int
    warmup: int
    steps: int


class RandomTokens(Task):
    """Rows of random tokens, all of one length."""

    class Data(DataBlock):
        rows: int
        sequence: int

    class Model(Block):
        sizes: dict[str, int]

    unit = "tokens"

    def train_data(self) -> Tensor:
        generator = torch.Generator().manual_seed(0)
        data, vocabulary = self.config.data, self.config.model.sizes["vocab_size"]
        return torch.randint(0, vocabulary, (data.rows, data.sequence + 1), generator=generator)

    def count(self, batch: Tensor) -> int:
        return batch[:, 1:].numel()

    def build_model(self) -> nn.Module:
        from transformers import LlamaConfig, LlamaForCausalLM

        sizes = self.config.model.sizes
        config = LlamaConfig(**sizes, num_key_value_heads=sizes["num_attention_heads"], use_cache=False)
        return LlamaForCausalLM(config)

    def loss(self, model: nn.Module, batch: Tensor) -> Loss:
        return Loss(summed_loss(model, batch), batch[:, 1:].numel())


def summed_loss(model: nn.Module, batch: Tensor) -> Tensor:
    logits = model(input_ids=batch[:, :-1]).logits
    return nn.functional.cross_entropy(logits.float().flatten(0, 1), batch[:, 1:].flatten(), reduction="sum")


def plain_loop(work: Work, precision: str) -> tuple[list[float], nn.Module]:
    """What somebody writes by hand."""
    task = RandomTokens(config_for(work, "single", precision))
    torch.manual_seed(0)
    model = task.build_model().to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.01, fused=DEVICE.type == "cuda")
    rows = task.train_data()
    times = []
    dtype = {"bf16-mixed": torch.bfloat16}.get(precision)
    for step in range(work.warmup + work.steps):
        began = now()
        batch = rows[step * work.batch : (step + 1) * work.batch].to(DEVICE)
        with torch.autocast(DEVICE.type, dtype=dtype, enabled=dtype is not None):
            loss = summed_loss(model, batch) / batch[:, 1:].numel()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        times.append(now() - began)
    return times, model


def shardwise_loop(work: Work, strategy: str, precision: str) -> tuple[list[float], nn.Module]:
    times = []
    with Session(config_for(work, strategy, precision)) as session:
        session.prepare()
        began = now()
        for batch in session.batches():
            session.step(batch)
            times.append(now() - began)
            began = now()
        return times, session.parts.spread.module


def config_for(work: Work, strategy: str, precision: str) -> Any:
    steps = work.warmup + work.steps
    return parse_config(
        f"""
task: {__name__}:RandomTokens
data: {{rows: {steps * work.batch}, sequence: {work.sequence}}}
model: {{sizes: {work.sizes}}}
training:
  strategy: {strategy}
  precision: {precision}
  batch_size: {work.batch}
  gradient_clip: 1.0
  optimizer: {{name: adamw, lr: 1.0e-4, weight_decay: 0.01}}
  scheduler: {{name: constant}}
"""
    )


def now() -> float:
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def measure(name: str, run: Callable[[], tuple[list[float], nn.Module]], work: Work) -> str:
    gc.collect()
    if DEVICE.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    times, model = run()
    seconds = statistics.median(times[work.warmup :])
    rate = work.batch * work.sequence / seconds
    embedding = work.sizes["vocab_size"] * work.sizes["hidden_size"]
    parameters = sum(parameter.numel() for parameter in model.parameters()) - embedding
    attention = 12 * work.sizes["num_hidden_layers"] * work.sizes["hidden_size"] * work.sequence
    peak = peak_flops(device_name(DEVICE))
    mfu = f"{rate * (6 * parameters + attention) / peak:.1%}" if peak else "unknown"
    memory = f"{torch.cuda.max_memory_allocated() / 2**30:.1f}" if DEVICE.type == "cuda" else "-"
    row = f"| {name} | {seconds * 1e3:.1f} | {rate:,.0f} | {mfu} | {memory} |"
    print(row, flush=True)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true")
    tiny = parser.parse_args().tiny
    work = Work(TINY, 4, 64, 2, 5) if tiny else Work(LLAMA, 16, 2048, 4, 12)
    print(f"{device_name(DEVICE)}, torch {torch.__version__}, {time.strftime('%Y-%m-%d')}")
    print(f"Llama {work.sizes}, batch {work.batch}, sequence {work.sequence}, AdamW, clip 1.0\n")
    print("| | ms per step | tokens/s | MFU | peak GiB allocated |\n|---|---|---|---|---|")
    for precision in ("bf16-mixed",) if not tiny else ("32-true", "bf16-mixed"):
        measure(f"plain PyTorch loop, {precision}", lambda p=precision: plain_loop(work, p), work)  # type: ignore[misc]
        for strategy in ("single", "ddp", "fsdp"):
            measure(
                f"shardwise {strategy}, {precision}",
                lambda s=strategy, p=precision: shardwise_loop(work, s, p),  # type: ignore[misc]
                work,
            )
    measure("shardwise fsdp, bf16-true", lambda: shardwise_loop(work, "fsdp", "bf16-true"), work)


if __name__ == "__main__":
    sys.modules.setdefault("foundation", sys.modules["__main__"])
    main()
