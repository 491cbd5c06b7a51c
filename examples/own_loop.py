"""A loop of your own: five verbs, and the same file runs on one process or many.

python examples/own_loop.py
torchrun --nproc-per-node 2 examples/own_loop.py
"""

import torch
from torch import Tensor, nn

from shardwise import Loss, Session
from shardwise.config import parse_config

CONFIG = """
task: own
name: own-loop
training: {batch_size: 8, max_epochs: 20, total_batch_size: 16, gradient_clip: 1.0, optimizer: {lr: 0.02}}
"""


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Loss:
    x, y = batch
    return Loss(sum=(model(x) - y).square().sum(), count=len(x))


def main() -> None:
    generator = torch.Generator().manual_seed(0)
    points = [(x, x.prod(dim=0, keepdim=True)) for x in torch.rand(250, 2, generator=generator)]

    with Session(parse_config(CONFIG)) as session:  # take this process's place among the ranks
        session.prepare(model=nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 1)), data=points, loss=loss)
        session.resume()  # go on from the last whole checkpoint, if there is one
        for batch in session.batches():  # this rank's share of each global batch
            result = session.step(batch)
            if result.stopped:  # some rank was asked to stop, so all do
                break
            if session.steps_done % 50 == 0:
                mean = session.loss(result)  # over all ranks, so all ranks call it
                if session.world.is_first:
                    print(f"step {session.steps_done} of {session.total_steps}  loss {mean:.5f}")
                session.save()  # all ranks together; a killed run goes on from here
        session.save()


if __name__ == "__main__":
    main()
