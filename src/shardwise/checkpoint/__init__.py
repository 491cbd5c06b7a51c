"""What survives: checkpoints that are whole or not there, checks, retention, resume on other ranks, export.

Knows the world of ranks and the data cursor; nothing of the loop.
"""

from shardwise.checkpoint.saver import Saver, Written
from shardwise.checkpoint.state import begin_anew, go_on_from, load_into, load_model, load_rank_local
from shardwise.checkpoint.store import CheckpointStore, Found

__all__ = [
    "CheckpointStore",
    "Found",
    "Saver",
    "Written",
    "begin_anew",
    "go_on_from",
    "load_into",
    "load_model",
    "load_rank_local",
]
