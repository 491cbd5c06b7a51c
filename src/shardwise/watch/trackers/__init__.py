"""Where the numbers of a run go besides metrics.jsonl: one file per tracker, and its line in config/registry.py.

base.py says what a tracker is, finds those that a config names, and opens them.
"""

from shardwise.watch.trackers.base import Tracker, open_trackers, require_trackers

__all__ = ["Tracker", "open_trackers", "require_trackers"]
