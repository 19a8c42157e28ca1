"""The commands: arguments, work, exit status. The scripts and `megatron-distill` run them."""
