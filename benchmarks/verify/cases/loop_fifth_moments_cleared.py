"""After a resume an observer clears the optimizer, "because old moments made the loss jump"."""

from __future__ import annotations

from pathlib import Path

import own

from shardwise import Observer, Session
from shardwise.engine.run import Run


class Fresh(Observer):
    def resumed(self, run: Run, path: Path) -> None:
        run.parts.optimizer.state.clear()


def main() -> None:
    with Session(own.config("fifth-loop-moments-cleared"), observers=[Fresh()]) as session:
        session.prepare(model=own.model(), data=own.data(), loss=own.loss, valid=own.valid())
        session.resume()
        for batch in session.batches():
            if session.step(batch).stopped:
                break
            session.save()


if __name__ == "__main__":
    main()
