"""The update rules: one file each, under the name that `training.optimizer.name` has. rule.py says what each must tell.

Knows nothing of models, strategies or the loop.
"""

from shardwise.optimizers.rule import UpdateRule, update_rule

__all__ = ["UpdateRule", "update_rule"]
