"""The peer's training step: Megatron-Core with ModelOpt's distillation plugin, at its best.

Stock GPTModels with an output layer, wrapped by `modelopt.torch.distill`, under Megatron-Core's
stock schedule, data parallelism, distributed optimizer and gradient finalisation; the loss function
is the one of Megatron-LM's post-training entry (sum over tokens, divided by their number in the
finalisation). Layers, attention (torch SDPA), weights, data and optimizer settings are ours.

Changes to the peer's defaults, in its favour:

* `skip_lm_loss` false, so that it computes CE and KL as ours does;
* a plain sum as loss balancer (an argument the plugin offers): its own scales the KL by CE / KL of
  each micro-batch, which is another objective and two more synchronisations;
* in fp32 the student's CE runs on a copy of the logits: Megatron-Core's overwrites fp32 logits in
  place before ModelOpt reads them, and the KL comes out wrong. `peer-unrepaired` omits the copy: a
  wrong loss for one buffer less. bf16 needs no copy;
* its attention is ours, because Megatron-Core's own without Transformer Engine holds every score
  [b, heads, s, s]. `peer-stock` has that one, under the mask that Megatron-LM passes to it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import modelopt.torch.distill as mtd
import modelopt.torch.distill.plugins.megatron as mtd_mcore
import torch
import torch.distributed as dist
from megatron.core.distributed.finalize_model_grads import finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.dot_product_attention import DotProductAttention
from torch import Tensor

from benchmarks.harness.op_profile import LOSS_RANGE
from benchmarks.steps.cases import Body, Case
from benchmarks.steps.subject import (
    OPTIMIZER,
    STUDENT_SEED,
    TEACHER_SEED,
    StepFigures,
    TrainingState,
    architecture,
    draw_on_device,
    execution,
    training_state,
)
from megatron_distill.models.execution import transformer_config
from megatron_distill.models.layers import layer_specs
from megatron_distill.models.taps import LayerCall
from megatron_distill.models.weights import initialise
from megatron_distill.runtime.batch import Batch, StepBatches
from megatron_distill.runtime.groups import Groups
from megatron_distill.train.optimizer import wrap_data_parallel


@dataclass(frozen=True)
class Peer:
    """The changes to the peer's defaults."""

    keeps_logits: bool = True  # in fp32, where the CE would overwrite them
    torch_attention: bool = True


PEERS = {
    "peer": Peer(),
    "peer-unrepaired": Peer(keeps_logits=False),
    "peer-stock": Peer(torch_attention=False),
}


class SumOfLosses(mtd.DistillationLossBalancer):
    """CE + KL, each with weight one."""

    def forward(self, losses: dict[str, Tensor]) -> dict[str, Tensor]:
        ce = losses.pop(mtd.loss_balancers.STUDENT_LOSS_KEY)
        (kl,) = losses.values()
        return {"kd_loss": ce + kl, "logits_loss": kl}


class MarkedGPT(GPTModel):
    """A GPTModel whose cross-entropy is visible as a range in a profile."""

    def compute_language_model_loss(self, labels: Tensor, logits: Tensor) -> Tensor:
        """Return the loss per token [b, s]."""
        with torch.profiler.record_function(LOSS_RANGE):
            return super().compute_language_model_loss(labels, logits)


class CopyingGPT(MarkedGPT):
    """A GPTModel whose cross-entropy does not overwrite fp32 logits."""

    def compute_language_model_loss(self, labels: Tensor, logits: Tensor) -> Tensor:
        """Return the loss per token [b, s]."""
        with torch.profiler.record_function(LOSS_RANGE):
            return super().compute_language_model_loss(labels, logits.clone())


@dataclass(frozen=True)
class PeerStep:
    """The distillation model and the parts of Megatron-LM's trainer around it."""

    case: Case
    model: Any  # ModelOpt's subclass of the student's class, made at run time
    attention_mask_11ss: Tensor | None
    training: TrainingState
    groups: Groups

    @property
    def models(self) -> Sequence[torch.nn.Module]:
        """The student, which holds the teacher."""
        return [self.model]

    def step(self, batches: StepBatches) -> StepFigures:
        """Take a step as Megatron-LM's `train_step` does."""
        training = self.training
        for chunk in training.wrapped:
            chunk.zero_grad_buffer()
        training.optimizer.zero_grad()
        workload = self.case.workload
        reports = get_forward_backward_func()(
            forward_step_func=partial(
                _forward, model=self.model, attention_mask_11ss=self.attention_mask_11ss
            ),
            data_iterator=iter(batches.micro_batches),
            model=list(training.wrapped),
            num_microbatches=len(batches.micro_batches),
            seq_length=workload.sequence_length,
            micro_batch_size=workload.micro_batch_size,
            decoder_seq_length=workload.sequence_length,
            forward_only=False,
            adjust_tensor_shapes_fn=self._tensor_shapes(),
        )
        training.optimizer.step()
        training.schedule.step(1)
        sums = torch.stack(reports).sum(0) if reports else torch.zeros(2)
        for group in (self.groups.data_context, self.groups.pipeline):
            dist.all_reduce(sums, group=group)
        ce, kd = (sums / batches.positions).tolist()
        return StepFigures(ce, kd)

    def _tensor_shapes(self) -> Any:
        workload = self.case.workload
        return mtd_mcore.get_tensor_shapes_adjust_fn_for_distillation(
            self.model,
            seq_length=workload.sequence_length,
            micro_batch_size=workload.micro_batch_size,
            decoder_seq_length=workload.sequence_length,
        )


def _forward(
    iterator: Iterator[Batch],
    wrapped: torch.nn.Module,
    *,
    model: Any,
    attention_mask_11ss: Tensor | None,
) -> tuple[Tensor, Any]:
    batch = next(iterator)
    losses = wrapped(
        input_ids=batch.tokens_bs,
        position_ids=batch.position_ids_bs,
        attention_mask=attention_mask_11ss,
        labels=batch.labels_bs,
        # Our attention reads the documents; Megatron-Core's own has the mask.
        extra_block_kwargs=None
        if attention_mask_11ss is not None
        else LayerCall(batch.segments).arguments,
    )
    return losses, partial(_loss, batch.ce_mask_bs, model=model)


def _loss(mask_bs: Tensor, losses_bs: Tensor, *, model: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Return (sum over tokens, number of tokens, report), as Megatron-LM's loss function does."""
    ce = _masked_sum(losses_bs, mask_bs)
    with torch.profiler.record_function(LOSS_RANGE):
        losses = model.compute_kd_loss(
            student_loss=ce, loss_reduction_fn=partial(_masked_sum, mask_bs=mask_bs)
        )
    report = torch.stack([ce.detach(), losses["logits_loss"].detach()])
    return losses["kd_loss"], mask_bs.sum().to(torch.int), report


def _masked_sum(losses: Any, mask_bs: Tensor) -> Tensor:
    vocabulary_parallel = False
    if isinstance(losses, tuple):
        losses, vocabulary_parallel, _ = losses
    total = torch.sum(losses.reshape(-1).float() * mask_bs.reshape(-1).float())
    if vocabulary_parallel:
        dist.all_reduce(total, group=mtd_mcore.parallel_state.get_tensor_model_parallel_group())
    return total


def build_peer_step(case: Case, *, peer: Peer, groups: Groups, device: torch.device) -> PeerStep:
    """Assemble the peer on a case."""
    copies = peer.keeps_logits and case.precision == "fp32"
    build = partial(_gpt, case=case, peer=peer, groups=groups, device=device)
    student = build(CopyingGPT if copies else MarkedGPT, case.workload.student, STUDENT_SEED)
    teacher = build(GPTModel, case.workload.teacher, TEACHER_SEED)
    model = _distillation_model(student, teacher)
    wrapped = wrap_data_parallel([model], OPTIMIZER, groups=groups)
    model.config.finalize_model_grads_func = finalize_model_grads
    model.config.no_sync_func = wrapped[0].no_sync
    return PeerStep(
        case=case,
        model=model,
        attention_mask_11ss=None
        if peer.torch_attention
        else _later_positions(case.workload.sequence_length, device),
        training=training_state(wrapped, dtype=execution(case, device).dtype),
        groups=groups,
    )


def _later_positions(length: int, device: torch.device) -> Tensor:
    """Return bool [1, 1, s, s], true where a query must not attend to a key."""
    return torch.ones(1, 1, length, length, dtype=torch.bool, device=device).triu(1)


def _distillation_model(student: GPTModel, teacher: GPTModel) -> Any:
    settings = mtd_mcore.setup_distillation_config(
        mtd_mcore.DistillationConfig(skip_lm_loss=False, loss_balancer=SumOfLosses()),
        student.config,
        teacher.config,
    )
    mode = {
        "teacher_model": teacher,
        "criterion": settings.criterion,
        "loss_balancer": settings.loss_balancer,
    }
    model = mtd.convert(student, mode=[("kd_loss", mode)])
    mtd_mcore.adjust_distillation_model_for_mcore(model, settings)
    model.train()
    return model


def _gpt(
    kind: type[GPTModel],
    body: Body,
    seed: int,
    *,
    case: Case,
    peer: Peer,
    groups: Groups,
    device: torch.device,
) -> GPTModel:
    shape = architecture(body, case)
    config = transformer_config(shape, groups.layout, execution(case, device))
    layers = layer_specs(shape, config, device=device, vp_stage=None, groups=groups)
    if not peer.torch_attention:
        for layer in layers.layer_specs:
            layer.submodules.self_attention.submodules.core_attention = DotProductAttention
    model = kind(
        config=config,
        transformer_layer_spec=layers,
        vocab_size=shape.padded_vocab_size(groups.layout.tensor),
        max_sequence_length=shape.max_position_embeddings,
        pre_process=groups.is_first_stage,
        post_process=groups.is_last_stage,
        parallel_output=True,
        share_embeddings_and_output_weights=False,
        position_embedding_type="rope",
        rotary_base=int(shape.rope_base),
        pg_collection=groups.megatron,
    )
    for parameter in model.parameters():
        parameter.data = parameter.data.to(device=device, dtype=config.params_dtype)
    if device.type == "cuda":
        draw_on_device([model], std=shape.init_std, seed=seed)
    else:
        initialise([model], shape, seed=seed, groups=groups)
    return model
