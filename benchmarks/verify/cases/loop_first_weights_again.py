"""After the resume the loop loads the pretrained weights, from which it once began, over those of the checkpoint."""

from __future__ import annotations

import own
import torch

from shardwise import Session


def main() -> None:
    with Session(own.config("loop-first-weights-again")) as session:
        model = own.model()
        pretrained = {name: torch.full_like(value, 0.02) for name, value in model.state_dict().items()}
        session.prepare(model=model, data=own.data(), loss=own.loss)
        session.resume()
        model.load_state_dict(pretrained)
        for batch in session.batches():
            if session.step(batch).stopped:
                break
            session.save()


if __name__ == "__main__":
    main()
