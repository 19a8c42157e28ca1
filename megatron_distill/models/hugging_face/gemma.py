"""What Gemma 2 and Gemma 3 have in common."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from megatron_distill.models.architecture import Architecture
from megatron_distill.models.hugging_face.llama_like import (
    DENSE,
    DIMENSIONS,
    NO_ATTENTION_BIAS,
)
from megatron_distill.models.hugging_face.settings import (
    Always,
    Choice,
    Entries,
    Field,
    Fields,
    HeadSize,
    Off,
    WindowByLayer,
)


@dataclass(frozen=True)
class EmbeddingScale:
    """Embeddings are multiplied by the root of their width."""

    def read(self, theirs: Any) -> Fields:
        """See `Setting`."""
        return {"embedding_scale": theirs.hidden_size**0.5}

    def write(self, architecture: Architecture) -> Entries:  # noqa: ARG002
        """See `Setting`."""
        return {}


@dataclass(frozen=True)
class QueryScalar:
    """What the scores are divided by the root of."""

    def read(self, theirs: Any) -> Fields:
        """See `Setting`."""
        scalar = float(theirs.query_pre_attn_scalar)
        is_usual = scalar == HeadSize().read(theirs)["head_size"]
        return {"attention_scalar": None if is_usual else scalar}

    def write(self, architecture: Architecture) -> Entries:
        """See `Setting`."""
        scalar = architecture.attention_scalar or architecture.head_size
        return {"query_pre_attn_scalar": int(scalar) if scalar == int(scalar) else scalar}


GEMMA_SETTINGS = (
    *DIMENSIONS,
    DENSE,
    NO_ATTENTION_BIAS,
    Off("use_bidirectional_attention"),
    HeadSize(),
    Choice("activation", "hidden_activation", {"gelu_pytorch_tanh": "geglu_tanh", "gelu": "geglu"}),
    Always("norm", "zero_centered_rmsnorm"),
    Always("post_norms", True),
    EmbeddingScale(),
    QueryScalar(),
    WindowByLayer(),
    Field("attention_softcap", "attn_logit_softcapping"),
    Field("logit_softcap", "final_logit_softcapping"),
)
