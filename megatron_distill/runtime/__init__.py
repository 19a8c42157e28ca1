"""Where a process runs: device, process groups, random state, and Megatron-Core on a CPU."""
