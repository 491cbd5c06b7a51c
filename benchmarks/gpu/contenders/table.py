"""What was found: a markdown table per work, and everything that was measured as JSON beside it."""

from __future__ import annotations

import importlib.metadata
import json
import platform
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.gpu.contenders.problem import CLIP, DEVICE, Row, Work
from shardwise.watch.rates import device_name, peak_flops

PACKAGES = ("torch", "transformers", "accelerate", "lightning", "pytorch-lightning", "monai")


class Report:
    """Written anew after every contender: a run that is killed leaves what it had."""

    def __init__(self, out: Path | None, command: str) -> None:
        self.out, self.command = out, command
        self.sections: dict[str, list[str]] = {}
        self.records: dict[str, Any] = {"device": device_name(DEVICE), "versions": _versions(), "works": {}}

    def add(self, name: str, lines: list[str], record: Any) -> None:
        """A section, or what is to stand in its place now."""
        self.sections[name], self.records["works"][name] = lines, record
        if self.out is not None:
            self.out.parent.mkdir(parents=True, exist_ok=True)
            _replace(self.out, self.text())
            _replace(self.out.with_suffix(".json"), json.dumps(self.records, indent=1) + "\n")

    def text(self) -> str:
        versions = ", ".join(f"{name} {version}" for name, version in _versions().items())
        peak = peak_flops(device_name(DEVICE))
        formula = "tokens/s × (6 × weights that a token meets + 12 × layers × hidden × sequence)"
        head = [
            f"# shardwise beside other tools: {device_name(DEVICE)}, {time.strftime('%Y-%m-%d')}",
            "",
            f"{versions}, Python {platform.python_version()}. Made by `{self.command}`.",
            "",
            f"The same weights, samples, order and loss for all; AdamW{', fused' if DEVICE.type == 'cuda' else ''}; gradients "
            f"clipped at {CLIP}. Medians of windows of several "
            "steps, the device synchronised at their ends only; ± is half the way from the fastest window to the slowest.",
            f"MFU = {formula} / {peak / 1e12:.0f} TFLOP/s, in bf16."
            if peak
            else f"MFU, {formula} / peak, is not known here.",
            "Peak GiB: allocated, over all steps.",
        ]
        return "\n".join([*head, *(line for lines in self.sections.values() for line in ["", *lines])]) + "\n"


def table(name: str, work: Work, rows: list[Row]) -> list[str]:
    return [
        f"## {name}",
        "",
        f"{work.title}.",
        "",
        f"| | batch | ms per step | {work.unit}/s | MFU | peak GiB | first step, s | warm-up, s | loss, first → last |",
        "|---|---|---|---|---|---|---|---|---|",
        *(line(row) for row in rows),
        *(text for row in rows if row.figures and row.figures.kernels for text in _kernels(row)),
    ]


def _kernels(row: Row) -> list[str]:
    assert row.figures is not None
    step = row.figures.seconds_per_step
    return [
        "",
        f"{row.contender.name}, batch {row.contender.batch}: kernels of a step",
        "",
        "| kernel | ms | of the step |",
        "|---|---|---|",
        *(f"| `{name[:90]}` | {1e3 * seconds:.2f} | {seconds / step:.1%} |" for name, seconds in row.figures.kernels),
    ]


def line(row: Row) -> str:
    contender, figures = row.contender, row.figures
    if figures is None:
        said = row.failed if row.failed.startswith("not installed") else f"failed: {row.failed}"
        return f"| {contender.name} | {contender.batch} | {said.replace('|', '/')} | | | | | | |"
    rate = figures.units_per_second
    share = mfu(row)
    cells = [
        contender.name,
        str(contender.batch),
        f"{figures.seconds_per_step * 1e3:,.1f} ± {figures.spread / 2:.1%}",
        f"{rate:,.0f}" if rate >= 1000 else f"{rate:.1f}",
        "" if share is None else f"{share:.1%}",
        "" if figures.peak_gib is None else f"{figures.peak_gib:.1f}",
        f"{figures.first_step_seconds:.1f}",
        f"{figures.warmup_seconds:.1f}",
        f"{figures.losses[0]:.4f} → {figures.losses[-1]:.4f}",
    ]
    return f"| {' | '.join(cells)} |"


def record(work: Work, rows: list[Row]) -> dict[str, Any]:
    return {
        "title": work.title,
        "unit": work.unit,
        "contenders": [
            {
                "name": row.contender.name,
                "batch": row.contender.batch,
                "failed": row.failed or None,
                "mfu": mfu(row),
                **(asdict(row.figures) if row.figures else {}),
            }
            for row in rows
        ],
    }


def mfu(row: Row) -> float | None:
    peak, flops = peak_flops(device_name(DEVICE)), row.contender.flops_per_unit
    return row.figures.units_per_second * flops / peak if row.figures and peak and flops else None


def _versions() -> dict[str, str]:
    found = {}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _replace(file: Path, text: str) -> None:
    aside = file.with_name(f"{file.name}.tmp")
    aside.write_text(text)
    aside.replace(file)
