"""One folder per operation: `__init__` validates and picks, `reference` is plain torch and the CPU path, `triton` is
one kernel and its launcher for GPUs."""
