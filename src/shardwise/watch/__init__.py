"""What is going on: the run folder, one log line per step, telemetry of every rank, trackers.

Takes plain numbers; knows nothing of models or of the loop.
"""
