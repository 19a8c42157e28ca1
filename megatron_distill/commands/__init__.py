"""The commands of `megatron-distill` and the scripts: arguments, work, exit status."""
