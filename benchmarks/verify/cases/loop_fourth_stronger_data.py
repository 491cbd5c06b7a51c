"""After each step the loop makes the augmentation of its data set stronger, which begins anew in a resumed run."""

from __future__ import annotations

import own
import torch
from torch import Tensor
from torch.utils.data import Dataset

from shardwise import Session


class Noisy(Dataset):
    def __init__(self, samples: list[tuple[Tensor, Tensor]]) -> None:
        self.samples = samples
        self.strength = 0.0

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        x, y = self.samples[i]
        return x + self.strength * torch.randn(x.shape), y


def main() -> None:
    data = Noisy(own.data())
    with Session(own.config("fourth-loop-stronger-data")) as session:
        session.prepare(model=own.model(), data=data, loss=own.loss, valid=own.valid())
        session.resume()
        for batch in session.batches():
            if session.step(batch).stopped:
                break
            data.strength = min(0.5, data.strength + 0.1)
            session.save()


if __name__ == "__main__":
    main()
