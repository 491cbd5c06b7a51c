"""Which layer has the largest gradient? Asked before gradients are clipped, every fourth step.

python examples/watch_layers.py
"""

from shardwise import Observer, Session
from shardwise.config import parse_config
from shardwise.engine.run import Run

CONFIG = """
task: chess
name: watch-layers
data: {source: synthetic, num_games: 64, max_plies: 12}
model: {architecture: llama, hidden_dim: 32, num_layers: 2, num_heads: 2}
training: {strategy: single, device: cpu, batch_size: 8, max_steps: 8, gradient_clip: 1.0}
"""


class LargestGradient(Observer):
    def gradients_ready(self, run: Run) -> None:
        if run.steps_done % 4:
            return
        norms = {}
        for name, parameter in run.strategy.module.named_parameters():
            gradient = run.strategy.gradient_of(parameter)
            if gradient is not None:
                norms[name] = float(gradient.norm())
        largest = max(norms, key=lambda name: norms[name])
        print(f"step {run.steps_done + 1}  {largest}  {norms[largest]:.3f}")


def main() -> None:
    with Session(parse_config(CONFIG), observers=[LargestGradient()]) as session:
        session.prepare()
        for batch in session.batches():
            session.step(batch)


if __name__ == "__main__":
    main()
