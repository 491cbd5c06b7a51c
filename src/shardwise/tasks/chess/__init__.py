"""`task: chess`: next-move prediction with any Hugging Face causal language model."""

from shardwise.errors import MissingExtra

try:
    import chess as _chess  # noqa: F401
except ImportError:
    raise MissingExtra.of("chess", "lm", "task: chess") from None

from shardwise.tasks.chess.task import ChessTask

__all__ = ["ChessTask"]
