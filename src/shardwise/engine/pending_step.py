"""The last step, where a GPU may still be making it: its numbers are looked at one step later."""

from __future__ import annotations

from shardwise.engine.loss_guard import BadLoss
from shardwise.engine.step_result import StepResult
from shardwise.errors import ShardwiseError


class PendingStep:
    def __init__(self) -> None:
        self._result: StepResult | None = None
        self.bad_loss: BadLoss | None = None
        """This rank's loss of the last step was not finite."""
        self.broken: ShardwiseError | None = None
        """Why the last steps do not count: nothing may be saved of them."""

    def follow(self, result: StepResult) -> None:
        """From now on this is the last step."""
        self._result = result
        if result.awaited is None:
            self.wait()

    def wait(self) -> None:
        """Until the device has made the last step; if its numbers are bad, this says so. All ranks call it together."""
        if self._result is not None:
            result, self._result = self._result, None
            try:
                self.bad_loss = result.wait(in_turn=True).bad_loss
            except ShardwiseError as error:
                self.broken = error
                raise

    def forget(self) -> None:
        """The run goes on from elsewhere: what became of the last step does not matter any more."""
        self._result = self.bad_loss = self.broken = None
