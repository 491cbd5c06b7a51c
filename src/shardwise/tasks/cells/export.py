"""A trained encoder in a folder, and back: weights as safetensors, everything else as JSON and text."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_model, save_model

from shardwise.errors import DataError
from shardwise.tasks.cells.check import scales_of
from shardwise.tasks.cells.config import CellsData, CellsModel, CellsTokenizer
from shardwise.tasks.cells.h5ad import H5adFiles, inspect
from shardwise.tasks.cells.model import CellEncoder
from shardwise.tasks.cells.tokens import CellTokenizer, revealed
from shardwise.tasks.cells.vocabulary import choose_vocabulary


def save_encoder(
    model: CellEncoder, tokenizer: CellTokenizer, genes: list[str], network: CellsModel, folder: Path, *, counts: bool
) -> None:
    save_model(model, str(folder / "model.safetensors"))
    (folder / "genes.txt").write_text("".join(f"{gene}\n" for gene in genes))
    settings = {
        "model": network.model_dump(),
        "tokenizer": tokenizer.options.model_dump(),
        "max_genes": tokenizer.max_genes,
        "target_sum": tokenizer.target_sum,
        "counts": counts,
        "seed": tokenizer.seed,
    }
    (folder / "config.json").write_text(json.dumps(settings, indent=1) + "\n")


def embed(
    folder: str | Path,
    h5ad: str | Path,
    *,
    layer: str | None = None,
    gene_key: str | None = None,
    batch_size: int = 256,
    device: str = "cpu",
) -> NDArray[np.float32]:
    """A row for each cell of an h5ad file or zarr store, by an exported encoder. Genes that it does not know are left out."""
    model, tokenizer, _ = load_encoder(folder)
    model.to(device)
    file = inspect(Path(h5ad), CellsData(layer=layer, gene_key=gene_key))
    source = H5adFiles([file], choose_vocabulary(str(Path(folder) / "genes.txt"), [file], quiet=False))
    _check_scale(Path(folder), source)
    rows = []
    with torch.no_grad():
        for first in range(0, len(source), batch_size):
            cells = source.read(first, min(first + batch_size, len(source)))
            batch = revealed(tokenizer.encode(cells, np.arange(first, first + len(cells)), 0))
            on_device = {name: tensor.to(device) for name, tensor in batch.items()}
            rows.append(model(on_device, want="embedding").cpu().numpy())
    return np.concatenate(rows)


def _check_scale(folder: Path, source: H5adFiles) -> None:
    """An encoder of counts takes other values for counts, and has nothing to say of them."""
    scale = scales_of(source)[0]
    counts = json.loads((folder / "config.json").read_text()).get("counts")
    if counts is not None and scale.kind != "nothing" and counts != scale.whole:
        raise DataError(
            f"{source.files[0].path} holds {scale.text}, but the encoder {folder} was trained on "
            f"{'counts' if counts else 'values that are no counts'}. Name the layer that has those: embed(…, layer=…)"
        )


def load_encoder(folder: str | Path) -> tuple[CellEncoder, CellTokenizer, list[str]]:
    """The model in evaluation mode, the tokenizer that goes with it, and the genes by number."""
    place = Path(folder)
    try:
        settings = json.loads((place / "config.json").read_text())
        genes = (place / "genes.txt").read_text().splitlines()
    except OSError as error:
        raise DataError(f"{place} is not an exported encoder: {error}") from None
    options = CellsTokenizer.model_validate(settings["tokenizer"])
    tokenizer = CellTokenizer(options, len(genes), settings["max_genes"], settings["target_sum"], settings["seed"])
    model = CellEncoder(CellsModel.model_validate(settings["model"]), options, len(genes), tokenizer.max_tokens)
    load_model(model, str(place / "model.safetensors"))
    return model.eval(), tokenizer, genes
