"""The blocks of `task: chess`. Read without torch."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from shardwise.config.schema import Block, PathText, hub_name
from shardwise.tasks.hub_data import HubData


class ChessData(HubData):
    source: Literal["synthetic", "local", "hub"] = Field(
        "synthetic",
        description="synthetic: legal games made from the seed; local: files; hub: a Hugging Face data set.",
    )
    paths: list[PathText] = Field(
        [],
        description="local: JSONL files, one object with a game per line, or PGN; also compressed (gz, zst, bz2, xz).",
    )
    valid_paths: list[PathText] = Field([], description="local: files to validate on; default: a share of `paths`.")
    text_column: str = Field("text", min_length=1, description="local and hub: the key or column that holds the game.")
    fen_column: str | None = Field(
        None,
        min_length=1,
        description="local and hub: the key or column with the position that a game starts from, in FEN.",
    )
    illegal_games: Literal["error", "skip"] = Field(
        "error",
        description="local and hub: what follows from a text that is no game of legal moves. skip: left out, and counted.",
    )
    joined_games: Literal["error", "split"] = Field(
        "error",
        description="local and hub: what follows from several games in one text. split makes each a game of its own.",
    )
    valid_fraction: float = Field(0.05, gt=0, lt=1, description="Share of games held out, chosen by the seed.")
    num_games: int = Field(2000, ge=2, description="synthetic: how many games, validation included.")
    max_plies: int = Field(40, ge=1, le=600, description="synthetic: half-moves per game at most.")

    @model_validator(mode="after")
    def _source_is_complete(self) -> ChessData:
        if self.source == "local" and not self.paths:
            raise ValueError("source: local needs paths, a list of JSONL or PGN files")
        if self.source != "local" and (self.paths or self.valid_paths):
            raise ValueError(f"paths and valid_paths are read with source: local, but source is {self.source}")
        return self


class ChessTokenizer(Block):
    strategy: Literal["moves", "pretrained"] | None = Field(
        None,
        description="moves: one token per move; pretrained: the tokenizer that comes with the model. "
        "Default: pretrained where the model has a name, else moves.",
    )
    name: PathText | None = Field(
        None, description="pretrained: hub name or folder, if not the model's.", json_schema_extra=hub_name("model")
    )
    max_seq_len: int = Field(256, ge=2, description="Tokens per game at most; longer games are cut here.")
    packing: bool | Literal["auto"] = Field(
        "auto",
        description="Lay the games of a micro-batch end to end instead of padding them to the longest; no game sees another. "
        "auto: on CUDA, where the model and the strategy can.",
    )


class ChessModel(Block):
    name: PathText | None = Field(
        None,
        description="A Hugging Face causal LM: hub name or folder. Default: from scratch.",
        json_schema_extra=hub_name("model"),
    )
    architecture: str = Field("llama", description="From scratch: a Hugging Face model type (llama, gpt2, qwen2, …).")
    hidden_dim: int = Field(128, ge=1, description="From scratch: width.")
    num_layers: int = Field(4, ge=1, description="From scratch: blocks.")
    num_heads: int = Field(4, ge=1, description="From scratch: attention heads; must divide hidden_dim.")
    intermediate_dim: int | None = Field(
        None, ge=1, description="From scratch: width of the MLP; default 4 × hidden_dim."
    )
    dropout: float = Field(0.0, ge=0, lt=1, description="From scratch, where the architecture has it.")
    tie_embeddings: bool = Field(True, description="From scratch: input and output embedding share their weights.")
    extra: dict[str, Any] = Field(
        {}, description="From scratch: further fields of the Hugging Face config, as they are."
    )

    @model_validator(mode="after")
    def _heads_divide(self) -> ChessModel:
        if self.name is None and self.hidden_dim % self.num_heads:
            raise ValueError(f"num_heads: {self.num_heads} must divide hidden_dim: {self.hidden_dim}")
        return self


BLOCKS: dict[str, type[Block]] = {"data": ChessData, "tokenizer": ChessTokenizer, "model": ChessModel}
