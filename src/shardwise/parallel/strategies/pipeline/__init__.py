"""Strategy pipeline: strategy.py is the strategy, split.py cuts a model into pieces, runtime.py sends micro-batches through."""

from shardwise.parallel.strategies.pipeline.strategy import PipelineParallel

__all__ = ["PipelineParallel"]
