"""Measurement: what a run spends its time on, found by running parts of it. Everything goes through the engine."""
