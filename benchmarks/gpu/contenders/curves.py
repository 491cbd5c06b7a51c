"""Whether faster is still the same: the loss over 200 steps on tokens that can be learned, beside that of the plain loop.

Plain loops that round differently say how far apart curves are that compute the same, and one with other weights how far apart
runs are that differ in nothing but their seed.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from torch.nn.attention import SDPBackend

from benchmarks.gpu.contenders import by_hand, with_shardwise
from benchmarks.gpu.contenders.llama import Shape, llama_problem, shardwise_blocks
from benchmarks.gpu.contenders.meter import Meter, Plan
from benchmarks.gpu.contenders.problem import DEVICE, SEED, WEIGHT_DECAY, Contender, Options, Row, Work
from benchmarks.gpu.contenders.tokens import learnable_tokens

SMOOTHED = 10
"""Steps that a loss is averaged over before it is compared."""
PLAIN, NARROW = "plain loop", "plain loop, bf16-true"


def curves(options: Options) -> Work:
    shape = Shape(64, 128, 2, 4, 4, 64, 32) if options.tiny else Shape(1024, 2816, 12, 16, 16, 512, 1024)
    batch, steps, rate = (4, 30, 1e-3) if options.tiny else (16, 200, 3e-4)
    plan = Plan(warmup=1, windows=1, steps=steps - 1)
    another_kernel = SDPBackend.EFFICIENT_ATTENTION if DEVICE.type == "cuda" else SDPBackend.MATH

    def plain(meter: Meter, narrow_sums: bool = False, seed: int = SEED, **given: Any) -> None:
        rows = learnable_tokens(steps * batch, shape.sequence, shape.vocabulary)
        problem = llama_problem(shape, batch, rows, learning_rate=rate, seed=seed)
        build = problem.build
        if narrow_sums:
            problem = replace(problem, build=lambda: _with_narrow_sums(build()))
        by_hand.train(problem, meter, **given)

    def shardwise(meter: Meter, precision: str) -> None:
        with_shardwise.train(
            shardwise_blocks(shape, steps * batch, learnable=True),
            {
                "batch_size": batch,
                "precision": precision,
                "optimizer": {"name": "adamw", "lr": rate, "weight_decay": WEIGHT_DECAY},
            },
            lambda result: result.samples * shape.sequence,
            meter,
            options.overrides,
        )

    contenders = [
        Contender(name, run, batch, plan, shape.flops_per_token)
        for name, run in {
            PLAIN: plain,
            "plain loop, every batch in two halves": partial(plain, pieces=2),
            "plain loop, another kernel of attention": partial(plain, attention=another_kernel),
            "plain loop, sums between blocks in bf16": partial(plain, narrow_sums=True),
            "plain loop, weights of another seed": partial(plain, seed=SEED + 1),
            "shardwise": partial(shardwise, precision="bf16-mixed"),
            "shardwise, fp8-mixed": partial(shardwise, precision="fp8-mixed"),
            NARROW: partial(plain, precision="bf16-true"),
            "shardwise, bf16-true": partial(shardwise, precision="bf16-true"),
        }.items()
    ]
    title = (
        f"{shape}; {steps} steps on tokens of which each is followed by one of eight; fp32 weights, computed in bf16"
    )
    return Work(title, "tokens", contenders, study)


def _with_narrow_sums(model: Any) -> Any:
    """As shardwise has them: autocast leaves them in fp32, because the embedding's numbers are."""
    model.model.embed_tokens.register_forward_hook(lambda module, given, result: result.bfloat16())
    return model


def study(rows: list[Row], out: Path | None) -> list[str]:
    """How far each curve is from the plain loop's of the same weights, and a picture of both."""
    found = {row.contender.name: smoothed(row.figures.losses) for row in rows if row.figures}
    plain = found.get(PLAIN)
    if plain is None or len(found) < 2:
        return []
    beside = {name: found[NARROW] if "bf16-true" in name and NARROW in found else plain for name in found}
    apart = {
        name: np.abs(curve - beside[name]) / beside[name]
        for name, curve in found.items()
        if name not in (PLAIN, NARROW)
    }
    ends = f"it ends at {plain[-1]:.4f}" + (f", in bf16-true at {found[NARROW][-1]:.4f}" if NARROW in found else "")
    lines = [
        "",
        f"Beside the plain loop of the same kind of weights, losses averaged over {SMOOTHED} steps; {ends}:",
        "",
        "| | largest difference | mean difference | last loss | its difference |",
        "|---|---|---|---|---|",
    ]
    for name, share in apart.items():
        last, end = found[name][-1], beside[name][-1]
        lines.append(f"| {name} | {share.max():.3%} | {share.mean():.3%} | {last:.4f} | {last / end - 1:+.3%} |")
    if out is not None:
        picture = out.with_name(f"{out.stem}-curves.png")
        draw(found, apart, picture)
        lines += ["", f"![The losses, and their difference from the plain loop's]({picture.name})"]
    return lines


def smoothed(losses: list[float]) -> np.ndarray:
    return np.convolve(losses, np.ones(SMOOTHED) / SMOOTHED, mode="valid")


def draw(found: dict[str, np.ndarray], apart: dict[str, np.ndarray], file: Path) -> None:
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return
    figure = Figure(figsize=(11, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    steps = np.arange(len(found[PLAIN])) + SMOOTHED
    for number, (name, curve) in enumerate(found.items()):
        left.plot(steps, curve, label=name, color=f"C{number}", linewidth=1)
        if name in apart:
            right.plot(steps, 100 * apart[name], label=name, color=f"C{number}", linewidth=1)
    left.set(xlabel="step", ylabel=f"loss, mean of {SMOOTHED} steps")
    right.set(xlabel="step", ylabel="% away from the plain loop")
    left.legend()
    right.legend()
    figure.savefig(file, dpi=120)
