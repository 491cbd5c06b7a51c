"""Garbage is collected between steps, when all ranks do, and not in them."""

from __future__ import annotations

import gc
import weakref

from shardwise.engine.garbage import EVERY, garbage_held_off


class Circle:
    def __init__(self) -> None:
        self.itself = self


def test_circles_are_collected_every_so_many_steps_and_not_before() -> None:
    assert gc.isenabled()
    with garbage_held_off() as stepped:
        assert not gc.isenabled()
        gone = weakref.ref(Circle())
        stepped(EVERY - 1)
        assert gone() is not None
        stepped(EVERY)
        assert gone() is None
    assert gc.isenabled()


def test_somebody_who_has_switched_it_off_finds_it_so() -> None:
    gc.disable()
    try:
        with garbage_held_off():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
