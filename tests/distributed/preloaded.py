"""Imported once, by the server that the pool's workers are forked from."""

from importlib import import_module

from megatron_distill.runtime.mcore_patches import prepare_megatron_core

# As every worker does before its first import of Megatron-Core.
prepare_megatron_core(on_cuda=False)
for _name in (
    "transformers",
    "transformers.models.auto.tokenization_auto",
    "torch._dynamo",  # by the first optimizer
    "torch.distributed.run",
    "megatron_distill.train.assemble.run",
):
    import_module(_name)
