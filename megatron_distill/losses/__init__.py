"""Objective terms on top of the vocabulary-parallel mathematics: masks, counts and weights."""

from megatron_distill.losses.balance import (
    BalanceMode,
    BalanceScales,
    BalanceState,
    LossWeights,
    RatioBalance,
    RawLosses,
    ScheduleKind,
    ValueSchedule,
    scaled_weights,
    weighted_sum,
)
from megatron_distill.losses.chunk_terms import (
    ChunkTerm,
    SharedVocabularies,
    ranked_term,
)
from megatron_distill.losses.cross_tokenizer import AlignedSide, cross_tokenizer_divergence
from megatron_distill.losses.features import (
    ATTENTION,
    AttentionInputs,
    AttentionLoss,
    FeatureLoss,
    FeaturePair,
    Projector,
    ScoreRule,
    add_gradients,
    feature_loss,
)
from megatron_distill.losses.objective import fused_linear_objective, token_weights
from megatron_distill.losses.several_teachers import (
    SampleTeachers,
    several_teachers_objective,
)
from megatron_distill.losses.terms import Mixture, TeacherScore, Term, TermTeachers
from megatron_distill.losses.token_divergence import token_divergence

__all__ = [
    "ATTENTION",
    "AlignedSide",
    "AttentionInputs",
    "AttentionLoss",
    "BalanceMode",
    "BalanceScales",
    "BalanceState",
    "ChunkTerm",
    "FeatureLoss",
    "FeaturePair",
    "LossWeights",
    "Mixture",
    "Projector",
    "RatioBalance",
    "RawLosses",
    "SampleTeachers",
    "ScheduleKind",
    "ScoreRule",
    "SharedVocabularies",
    "TeacherScore",
    "Term",
    "TermTeachers",
    "ValueSchedule",
    "add_gradients",
    "cross_tokenizer_divergence",
    "feature_loss",
    "fused_linear_objective",
    "ranked_term",
    "scaled_weights",
    "several_teachers_objective",
    "token_divergence",
    "token_weights",
    "weighted_sum",
]
