"""The blocks of `task: cells`. Read without torch."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, SerializerFunctionWrapHandler, model_serializer, model_validator

from shardwise.config.schema import Block, DataBlock, PathText

FIXED_IN_A_COPY = ("gene_vocab", "gene_key", "layer", "label_key", "valid_fraction", "max_valid_cells")
"""What is decided when a sharded copy is written; source: shards cannot change it."""


class CellsData(DataBlock):
    source: Literal["synthetic", "local", "shards"] = Field(
        "synthetic",
        description="synthetic: an h5ad file made from the seed; local: h5ad files and zarr stores; shards: what "
        "`shardwise data shard` wrote.",
    )
    paths: list[PathText] = Field(
        [], description="local: h5ad files and zarr stores; shards: the folder of the sharded copy."
    )
    gene_vocab: PathText | None = Field(
        None,
        description="A text file with one gene per line, or a JSON list. Default, and for human_protein_coding, which is "
        "not shipped: every gene of the data.",
    )
    gene_key: str | None = Field(None, description="The column of `var` with the gene names; default: its index.")
    layer: str | None = Field(None, description="The layer to read; raw: adata.raw with its genes; default: X.")
    label_key: str | None = Field(
        None, description="The column of `obs` to compare embeddings with; default: cell_type, if there is one."
    )
    normalize: Literal["auto", "log1p", "none"] = Field(
        "auto",
        description="log1p: each cell is scaled to target_sum, then log(1 + x); auto: log1p if the values are whole "
        "numbers, else none.",
    )
    target_sum: float = Field(10_000.0, gt=0, description="What the values of a cell add up to before log1p.")
    max_genes: int | None = Field(None, ge=1, description="Genes per cell at most, the most expressed; default 2048.")
    valid_fraction: float = Field(
        0.05, gt=0, lt=1, description="Share of cells held out, spread evenly over the files."
    )
    max_valid_cells: int = Field(10_000, ge=1, description="Cells held out at most: they are kept in memory.")
    streaming: bool = Field(False, description="Read while training, for files larger than memory.")
    streaming_chunk_size: int = Field(
        1024,
        ge=1,
        description="streaming: cells side by side in the file that stay together when the file is shuffled.",
    )
    streaming_shuffle_buffer: int = Field(
        32_768,
        ge=1,
        description="streaming: cells of many chunks that are in memory at once, and drawn from at random.",
    )
    changed_sources: Literal["refuse", "warn"] = Field(
        "refuse", description="shards: what to do where the files that the copy was made from have changed since."
    )
    num_cells: int = Field(4000, ge=20, description="synthetic: how many cells, validation included.")
    num_genes: int = Field(400, ge=10, description="synthetic: how many genes.")
    num_types: int = Field(8, ge=1, description="synthetic: how many cell types.")

    @model_validator(mode="after")
    def _source_is_complete(self) -> CellsData:
        if self.source == "local" and not self.paths:
            raise ValueError("source: local needs paths, a list of h5ad files")
        if self.source == "shards" and len(self.paths) != 1:
            raise ValueError("source: shards needs paths with one folder, which `shardwise data shard` wrote")
        if self.source == "synthetic" and self.paths:
            raise ValueError("paths are read with source: local or shards, but source is synthetic")
        return self

    @model_serializer(mode="wrap")
    def _without_what_the_copy_decides(self, write: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """A default written into a run's config would read as a wish that the copy may not fulfil."""
        values: dict[str, Any] = write(self)
        unsaid = set(FIXED_IN_A_COPY) - self.model_fields_set if self.source == "shards" else set()
        return {key: value for key, value in values.items() if key not in unsaid}


class Masking(Block):
    mask_ratio: float = Field(0.15, gt=0, lt=1, description="Share of a cell's genes to predict.")
    random_replace_ratio: float = Field(0.1, ge=0, le=1, description="Share of those that show a random one instead.")
    keep_ratio: float = Field(0.1, ge=0, le=1, description="Share of those that stay as they are.")

    @model_validator(mode="after")
    def _shares_fit(self) -> Masking:
        if self.random_replace_ratio + self.keep_ratio > 1:
            raise ValueError("random_replace_ratio and keep_ratio together must not be above 1")
        return self


class CellsTokenizer(Block):
    strategy: Literal["rank_value", "binned_expression", "continuous_projection"] = Field(
        "rank_value",
        description="rank_value: genes in order of expression, to predict which gene; binned_expression: a bin per gene, to "
        "predict the bin; continuous_projection: a number per gene, to predict the number.",
    )
    max_genes: int | None = Field(None, ge=1, description="Like data.max_genes; the smaller of the two counts.")
    prepend_cls: bool = Field(True, description="Begin with a token for the whole cell.")
    num_bins: int = Field(50, ge=2, le=1000, description="binned_expression: bins of equal size among a cell's genes.")
    packing: bool | Literal["auto"] = Field(
        "auto",
        description="Lay the cells of a training micro-batch end to end instead of padding them to the longest; no cell sees "
        "another. auto: on CUDA, where the strategy can.",
    )
    masking: Masking = Field(default_factory=Masking, description="Which genes are hidden.")


class CellsModel(Block):
    architecture: Literal["transformer_encoder"] = Field("transformer_encoder", description="Which network.")
    hidden_dim: int = Field(128, ge=1, description="Width.")
    num_layers: int = Field(4, ge=1, description="Blocks.")
    num_heads: int = Field(4, ge=1, description="Attention heads; must divide hidden_dim.")
    ffn_dim: int | None = Field(None, ge=1, description="Width of the MLP; default 4 × hidden_dim.")
    dropout: float = Field(0.0, ge=0, lt=1, description="After attention and MLP.")
    max_seq_len: int | None = Field(
        None, ge=2, description="Tokens per cell at most, CLS included; default: max_genes and CLS."
    )
    pooling: Literal["cls", "mean"] | None = Field(
        None, description="What the embedding of a cell is; default: cls where there is one."
    )

    @model_validator(mode="after")
    def _heads_divide(self) -> CellsModel:
        if self.hidden_dim % self.num_heads:
            raise ValueError(f"num_heads: {self.num_heads} must divide hidden_dim: {self.hidden_dim}")
        return self


BLOCKS: dict[str, type[Block]] = {"data": CellsData, "tokenizer": CellsTokenizer, "model": CellsModel}
