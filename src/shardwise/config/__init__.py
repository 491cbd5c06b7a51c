"""What the user wrote: pydantic models, YAML, overrides, and errors that name the key and the nearest right one.

Every other room may import from here. Nothing in here imports another room, or torch.
"""

from shardwise.config.batching import Batching, resolve_batching, resolve_learning_rate, with_batch_size
from shardwise.config.load import load_config, parse_config
from shardwise.config.schema import Block, Config, DataBlock, Ddp, Fsdp, PathText, Training

__all__ = [
    "Batching",
    "Block",
    "Config",
    "DataBlock",
    "Ddp",
    "Fsdp",
    "PathText",
    "Training",
    "load_config",
    "parse_config",
    "resolve_batching",
    "resolve_learning_rate",
    "with_batch_size",
]
