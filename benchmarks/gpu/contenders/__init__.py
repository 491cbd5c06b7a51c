"""shardwise beside other tools on one GPU: `python -m benchmarks.gpu.contenders`, see README.md.

One file per work (llama, games, volumes, cells, curves), one per tool (by_hand, with_*), and what they share: problem.py says
what is trained, meter.py measures, turns.py runs one contender after the other, table.py writes what was found.
"""
