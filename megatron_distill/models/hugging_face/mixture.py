"""Conversion of a family's mixture of experts: entries of config.json and rules of tensors.

`Experts` reads the numbers that all families have. Its parts are settings of the fields of
`MixtureOfExperts` that only some have.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from megatron_distill.errors import CheckpointError
from megatron_distill.models.architecture import Architecture, MixtureOfExperts
from megatron_distill.models.hugging_face.rules import Rule, Same, Stacked
from megatron_distill.models.hugging_face.settings import ConfigEntries, Fields, Setting

_MLP = "decoder.layers.mlp."


@dataclass(frozen=True)
class Experts:
    """Experts; `parts` are settings of further fields of `MixtureOfExperts`."""

    count: str
    width: str
    renormalize: str | None = None  # an entry, or None: always
    parts: tuple[Setting, ...] = ()

    def read(self, theirs: Any) -> Fields:
        """See `Setting`."""
        more: Fields = {}
        for part in self.parts:
            more |= part.read(theirs)
        moe = MixtureOfExperts(
            num_experts=getattr(theirs, self.count),
            top_k=theirs.num_experts_per_tok,
            ffn_hidden_size=getattr(theirs, self.width),
            renormalize=self.renormalize is None or getattr(theirs, self.renormalize),
            **more,
        )
        return {"moe": moe, "ffn_hidden_size": theirs.intermediate_size}

    def write(self, architecture: Architecture) -> ConfigEntries:
        """See `Setting`."""
        moe = architecture.moe
        if moe is None:
            return {}
        entries: ConfigEntries = {
            "intermediate_size": architecture.ffn_hidden_size,
            self.count: moe.num_experts,
            "num_experts_per_tok": moe.top_k,
            self.width: moe.ffn_hidden_size,
        }
        for part in self.parts:
            entries |= part.write(architecture)
        return entries | ({self.renormalize: moe.renormalize} if self.renormalize else {})


@dataclass(frozen=True)
class DenseByList:
    """Dense layers: those of a list, and those whose number from 1 is not a multiple of a step."""

    def read(self, theirs: Any) -> Fields:
        """See `Setting`."""
        listed, step = theirs.mlp_only_layers, theirs.decoder_sparse_step
        dense = (
            layer
            for layer in range(theirs.num_hidden_layers)
            if layer in listed or (layer + 1) % step
        )
        return {"dense_layers": tuple(dense)}

    def write(self, architecture: Architecture) -> ConfigEntries:
        """See `Setting`."""
        dense = list(architecture.moe.dense_layers) if architecture.moe else []
        return {"mlp_only_layers": dense, "decoder_sparse_step": 1}


@dataclass(frozen=True)
class DenseFirst:
    """The first layers are dense; an entry has their number."""

    entry: str

    def read(self, theirs: Any) -> Fields:
        """See `Setting`."""
        return {"dense_layers": tuple(range(getattr(theirs, self.entry)))}

    def write(self, architecture: Architecture) -> ConfigEntries:
        """See `Setting`."""
        return {self.entry: len(architecture.moe.dense_layers) if architecture.moe else 0}


@dataclass(frozen=True)
class SharedWidth:
    """A gated shared expert; an entry has its width."""

    entry: str

    def read(self, theirs: Any) -> Fields:
        """See `Setting`."""
        return {"shared_ffn_hidden_size": getattr(theirs, self.entry), "shared_gate": True}

    def write(self, architecture: Architecture) -> ConfigEntries:
        """See `Setting`."""
        return {self.entry: architecture.moe and architecture.moe.shared_ffn_hidden_size}


@dataclass(frozen=True)
class SharedCount:
    """A shared expert as wide as a number of the routed ones; an entry has that number."""

    entry: str
    width: str

    def read(self, theirs: Any) -> Fields:
        """See `Setting`."""
        width = getattr(theirs, self.entry) * getattr(theirs, self.width)
        return {"shared_ffn_hidden_size": width}

    def write(self, architecture: Architecture) -> ConfigEntries:
        """See `Setting`."""
        moe = architecture.moe
        assert moe is not None
        return {self.entry: (moe.shared_ffn_hidden_size or 0) // moe.ffn_hidden_size}


@dataclass(frozen=True)
class SigmoidRouting:
    """Scores by sigmoid, a correction bias, groups of experts and a factor of the weights.

    Source: DeepSeek-V3, arXiv 2412.19437, section 2.1.2. The families add the two best scores of a
    group, Megatron-Core the best `top_k / groups_per_token`.
    """

    def read(self, theirs: Any) -> Fields:
        """See `Setting`."""
        groups, chosen = theirs.n_group, theirs.topk_group
        fields: Fields = {
            "score": "sigmoid",
            "correction_bias": True,
            "weight_scale": float(theirs.routed_scaling_factor),
        }
        if chosen == groups:
            return fields
        top_k = theirs.num_experts_per_tok
        if top_k // chosen != 2:
            raise CheckpointError(
                f"topk_group is {chosen} of {groups} groups with {top_k} experts per token; "
                "supported: two experts per token and group, or topk_group equal to n_group"
            )
        return {**fields, "groups": groups, "groups_per_token": chosen}

    def write(self, architecture: Architecture) -> ConfigEntries:
        """See `Setting`."""
        moe = architecture.moe
        assert moe is not None
        return {
            "n_group": moe.groups or 1,
            "topk_group": moe.groups_per_token or 1,
            "routed_scaling_factor": moe.weight_scale,
        }


def expert_rules(block: str, router: str, gate: str, up: str, down: str) -> dict[str, Rule]:
    """Return the rules of experts, by their names under a layer."""
    layer = f"model.layers.{{layer}}.{block}."
    return {
        f"{_MLP}router.weight": Same(f"{layer}{router}.weight"),
        **mlp_rules(f"{_MLP}experts.experts.", f"{layer}experts.{{expert}}.", gate, up, down),
    }


def mlp_rules(
    ours: str,
    theirs: str,
    gate: str = "gate_proj",
    up: str = "up_proj",
    down: str = "down_proj",
) -> dict[str, Rule]:
    """Return the rules of a gated feed-forward, by the prefixes of its names."""
    return {
        f"{ours}linear_fc1.weight": Stacked((f"{theirs}{gate}.weight", f"{theirs}{up}.weight")),
        f"{ours}linear_fc2.weight": Same(f"{theirs}{down}.weight"),
    }
