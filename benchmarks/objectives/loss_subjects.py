"""Losses side by side: ours, ModelOpt's, TRL's, Liger's and plain torch, forward and backward.

Every subject takes student logits that require gradients and a teacher's, and returns a scalar
whose backward computes the student's gradient. A subject that is not installed is left out.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from megatron_distill.losses import token_divergence
from megatron_distill.ops import VocabShard
from megatron_distill.signals import DenseLogits

KEPT = 64
SAME = "renormalized"  # the support of ModelOpt's top-k

Loss = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Subject:
    """One way to compute a loss; subjects of one `family` are comparable."""

    family: str
    name: str
    loss: Loss


def subjects(shard: VocabShard, group: dist.ProcessGroup | None) -> list[Subject]:
    """Return the subjects that can run here, ours first in every family."""
    found = [*_ours(shard, group), *_modelopt(group)]
    if group is None:
        found += [
            Subject("forward_kl", "torch", _torch_kl),
            Subject("jsd", "torch", _torch_jsd),
            Subject("adaptive_kl", "torch", _torch_adaptive),
        ]
        found += [*_trl(), *_liger()]
    return found


def _ours(shard: VocabShard, group: dist.ProcessGroup | None) -> list[Subject]:
    def dense(name: str, **given: Any) -> Loss:
        def loss(student: Tensor, teacher: Tensor) -> Tensor:
            return token_divergence(
                student, DenseLogits(teacher), divergence=name, shard=shard, group=group, **given
            ).sum()

        return loss

    names = ["reverse_kl", "skewed_forward_kl", "skewed_reverse_kl", "adaptive_kl"]
    names += ["total_variation", "squared_hellinger"]
    return [
        Subject("forward_kl", "ours", dense("forward_kl")),
        Subject("forward_kl", "ours, over the logits", dense("forward_kl", overwrite_logits=True)),
        Subject("jsd", "ours", dense("js_divergence")),
        Subject("jsd", "ours, over the logits", dense("js_divergence", overwrite_logits=True)),
        Subject("top-k", "ours, renormalized", dense("forward_kl", top_k=KEPT, support=SAME)),
        Subject(
            "top-k",
            "ours, renormalized, over the logits",
            dense("forward_kl", top_k=KEPT, support=SAME, overwrite_logits=True),
        ),
        Subject("top-k", "ours, tail", dense("forward_kl", top_k=KEPT)),
        *(Subject(name, "ours", dense(name)) for name in names),
    ]


def _modelopt(group: dist.ProcessGroup | None) -> list[Subject]:
    try:
        from modelopt.torch.distill.plugins import megatron as plugin
    except ImportError:
        return []

    @dataclass
    class Config:
        tensor_model_parallel_size: int = 1 if group is None else group.size()
        sequence_parallel: bool = False

    def loss_of(module: torch.nn.Module) -> Loss:
        def loss(student: Tensor, teacher: Tensor) -> Tensor:
            # Its shape is [s, b, V]; its result includes a flag for the reduction.
            answer = module(student.unsqueeze(1), teacher.unsqueeze(1))
            return (answer[0] if isinstance(answer, tuple) else answer).sum()

        return loss

    config: Any = Config()
    return [
        Subject("forward_kl", "ModelOpt", loss_of(plugin.LogitsKLLoss(config))),
        Subject("top-k", "ModelOpt", loss_of(plugin.TopKLogitsKLLoss(config, top_k=KEPT))),
    ]


def _torch_kl(student: Tensor, teacher: Tensor) -> Tensor:
    log_q, log_p = student.float().log_softmax(-1), teacher.float().log_softmax(-1)
    return F.kl_div(log_q, log_p, reduction="none", log_target=True).sum()


def _torch_jsd(student: Tensor, teacher: Tensor) -> Tensor:
    log_q, log_p = student.float().log_softmax(-1), teacher.float().log_softmax(-1)
    log_m = torch.logsumexp(torch.stack([log_p, log_q]), 0) - torch.log(torch.tensor(2.0))
    of_teacher = F.kl_div(log_m, log_p, reduction="none", log_target=True)
    of_student = F.kl_div(log_m, log_q, reduction="none", log_target=True)
    return (0.5 * of_teacher + 0.5 * of_student).sum()


def _torch_adaptive(student: Tensor, teacher: Tensor) -> Tensor:
    log_q, log_p = student.float().log_softmax(-1), teacher.float().log_softmax(-1)
    p, q = log_p.exp(), log_q.exp()
    ordered, order = p.sort(dim=-1)
    is_tail = ordered.cumsum(-1) <= 0.5
    gaps = (p - q).detach().abs().gather(-1, order)
    tail, head = (gaps * is_tail).sum(-1), (gaps * ~is_tail).sum(-1)
    share = (head / (head + tail)).unsqueeze(-1)
    return (share * p * (log_p - log_q) + (1 - share) * q * (log_q - log_p)).sum()


def _trl() -> list[Subject]:
    try:
        from trl.experimental.gkd import GKDTrainer
    except ImportError:
        return []

    def loss(student: Tensor, teacher: Tensor) -> Tensor:
        return GKDTrainer.generalized_jsd_loss(student, teacher, beta=0.5, reduction="sum")

    return [Subject("jsd", "TRL", loss)]


def _liger() -> list[Subject]:
    try:
        from liger_kernel.chunked_loss.jsd_loss import LigerFusedLinearJSDFunction
    except ImportError:
        return []

    def loss(student: Tensor, teacher: Tensor) -> Tensor:
        # Its computation on each chunk of logits, here on all of them.
        return LigerFusedLinearJSDFunction.distillation_loss_fn(
            student.float(), teacher.float(), beta=0.5
        )

    return [Subject("jsd", "Liger", loss)]
