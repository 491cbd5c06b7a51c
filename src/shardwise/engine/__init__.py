"""The loop: session, step, precision, optimizer, schedule, evaluation.

`step.py` is the training step. `session.py` holds the five verbs. `fit.py` is the loop that `shardwise train` runs.
"""
