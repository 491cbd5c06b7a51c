"""Where it runs: ranks on this machine, or a place among those that torchrun or srun started."""
