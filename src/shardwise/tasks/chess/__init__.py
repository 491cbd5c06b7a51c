"""`task: chess`: next-move prediction with any Hugging Face causal language model."""

from shardwise.tasks.chess.task import ChessTask

__all__ = ["ChessTask"]
