"""The runtime of a process: device, process groups, random state, and Megatron-Core on a CPU."""
