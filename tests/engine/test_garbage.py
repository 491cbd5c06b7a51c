"""Collections do not look at what was there before training began."""

from __future__ import annotations

import gc

from shardwise.engine.garbage import gc_frozen


def test_what_was_there_before_is_not_looked_at_and_comes_back() -> None:
    mark = {"here": ["before"]}
    assert any(each is mark for each in gc.get_objects())
    with gc_frozen():
        assert not any(each is mark for each in gc.get_objects())
        assert gc.isenabled() and gc.get_freeze_count() > 1000
    assert any(each is mark for each in gc.get_objects())
