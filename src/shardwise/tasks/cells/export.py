"""A trained encoder in a folder, and back: weights as safetensors, everything else as JSON and text."""

from __future__ import annotations

import json
from pathlib import Path

from safetensors.torch import load_model, save_model

from shardwise.config.cells import CellsModel, CellsTokenizer
from shardwise.errors import DataError
from shardwise.tasks.cells.model import CellEncoder
from shardwise.tasks.cells.tokens import CellTokenizer


def save_encoder(
    model: CellEncoder, tokenizer: CellTokenizer, genes: list[str], network: CellsModel, folder: Path
) -> None:
    save_model(model, str(folder / "model.safetensors"))
    (folder / "genes.txt").write_text("".join(f"{gene}\n" for gene in genes))
    settings = {
        "model": network.model_dump(),
        "tokenizer": tokenizer.options.model_dump(),
        "max_genes": tokenizer.max_genes,
        "target_sum": tokenizer.target_sum,
    }
    (folder / "config.json").write_text(json.dumps(settings, indent=1) + "\n")


def load_encoder(folder: str | Path) -> tuple[CellEncoder, CellTokenizer, list[str]]:
    """The model in evaluation mode, the tokenizer that goes with it, and the genes by number.

    tokenizer.encode(rows, cells, epoch=0) makes a batch of SparseRows; model(revealed(batch), want="embedding") embeds it.
    """
    place = Path(folder)
    try:
        settings = json.loads((place / "config.json").read_text())
        genes = (place / "genes.txt").read_text().splitlines()
    except OSError as error:
        raise DataError(f"{place} is not an exported encoder: {error}") from None
    options = CellsTokenizer.model_validate(settings["tokenizer"])
    tokenizer = CellTokenizer(options, len(genes), settings["max_genes"], settings["target_sum"], seed=0)
    model = CellEncoder(CellsModel.model_validate(settings["model"]), options, len(genes), tokenizer.max_tokens)
    load_model(model, str(place / "model.safetensors"))
    return model.eval(), tokenizer, genes
