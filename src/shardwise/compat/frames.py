"""How PyTorch shows in a stack: its files and functions, by which is known what a rank waits for."""

from __future__ import annotations

COLLECTIVES = ("/torch/distributed/distributed_c10d.py", "/torch/distributed/_functional_collectives.py")
"""Files of functions that wait for other ranks. Seen on 2.11, 2.13, 2.15."""
STORE = ("/torch/distributed/rendezvous.py",)
"""Files of functions that wait for the rendezvous. Seen on 2.11, 2.13, 2.15."""
EXCHANGES = ("/torch/nn/parallel/distributed.py", "/torch/distributed/fsdp/", "/torch/distributed/pipelining/")
"""Files of what DDP, fully_shard and a pipeline do around the model. Seen on 2.11, 2.13, 2.15."""
BACKWARD = "_engine_run_backward"
"""The function in which Python waits for autograd's engine. Seen on 2.11, 2.13, 2.15."""
