"""Training on a CUDA device that is not there.

Tensors have shapes, dtypes and a device, but no numbers: torch's FakeTensorMode refuses an
operation whose tensors are on different devices, as a GPU would, and what waits for a device or
hands host memory to a collective can be counted. Megatron-Core runs unpatched.

`races`, `streams` and `messages` are a second one, with numbers: its streams are recorded, and uses
of memory that no wait orders are found.
"""
