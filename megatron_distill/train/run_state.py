"""The state that changes from step to step, and its saving to and loading from checkpoints."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.optimizer.optimizer import ChainedOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.tensor_parallel import get_cuda_rng_tracker

from megatron_distill.errors import CheckpointError
from megatron_distill.losses import BalanceState
from megatron_distill.models.architecture import Architecture, architecture_differences
from megatron_distill.models.gpt import HiddenStateGPT
from megatron_distill.runtime.batch import StepBatches
from megatron_distill.runtime.groups import Groups
from megatron_distill.train.checkpoint.folder import (
    CheckpointFolder,
    Description,
    load_state,
    sharding_metadata,
)
from megatron_distill.train.features import FeatureLosses, Projectors
from megatron_distill.train.optimizer import load_optimizer, shards_of, without_layout
from megatron_distill.train.step import Student
from megatron_distill.train.teachers.lookahead import StepSource
from megatron_distill.train.validation import evaluating


@dataclass
class RunState:
    """The student, its optimizer and the counters: all state of a resumed run except the data."""

    student: Student
    optimizer: ChainedOptimizer
    schedule: OptimizerParamScheduler
    architecture: Architecture
    tokenizer_hash: str
    checkpoints: CheckpointFolder
    features: FeatureLosses | None = None
    step: int = 0
    tokens: int = 0
    bad_steps: int = 0
    balance: BalanceState = BalanceState()
    configuration: dict[str, Any] = field(default_factory=dict)  # plain, for the description

    def advance(self, batches: StepBatches, *, applied: bool) -> None:
        """Count one step."""
        self.step += 1
        self.tokens += batches.positions
        self.bad_steps += not applied

    def save(self, loader: StepSource) -> None:
        """Write a checkpoint of this step; see `CheckpointFolder.save`."""
        with evaluating(self.student):
            state = self._sharded(is_loading=False)
            self.checkpoints.save(
                {**state, "optimizer": shards_of(state["optimizer"])},
                Description(
                    step=self.step,
                    tokens=self.tokens,
                    bad_steps=self.bad_steps,
                    architecture=self.architecture.as_dict(),
                    tokenizer=self.tokenizer_hash,
                    layout=_layout_name(self.student.groups),
                    data=loader.state_dict(),
                    balance=self.balance.as_dict(),
                    features=self._features(),
                    configuration=self.configuration,
                ),
            )

    def restore(self, folder: Path, loader: StepSource) -> None:
        """Resume from a checkpoint written in this or any other layout.

        Random states are restored in the same layout only; they affect dropout alone. Raises
        CheckpointError when the checkpoint's model, tokenizer, optimizer or feature losses differ.
        """
        description = Description.read(folder)
        self.require_same(description, folder)
        same_layout = description.layout == _layout_name(self.student.groups)
        state = self._sharded(is_loading=True, with_rng=same_layout)
        loaded = load_state({**state, "optimizer": shards_of(state["optimizer"])}, folder)
        load_chunks(self.student.chunks, loaded)
        self.step, self.tokens = description.step, description.tokens
        self.bad_steps = description.bad_steps
        self.balance = saved_balance(description, folder)
        applied = self.step - self.bad_steps
        load_optimizer(
            self.optimizer, state["optimizer"], loaded["optimizer"], applied_steps=applied
        )
        if self._projectors is not None:
            self._projectors.load(loaded["projectors"], applied_steps=applied)
        if same_layout:
            _restore_rng(loaded["rng"])
        # Set from the counters: the schedule in checkpoints of older releases is a step ahead.
        self.schedule.step(applied)
        loader.load_state_dict(description.data)

    def require_same(self, description: Description, folder: Path) -> None:
        """Raise CheckpointError where a checkpoint's model or features differ from this run's."""
        check_same_model(description, self.architecture, self.tokenizer_hash, folder)
        check_same_features(description, self._features(), folder)

    @property
    def _projectors(self) -> Projectors | None:
        return self.features.projectors if self.features else None

    def _features(self) -> dict[str, Any] | None:
        return self.features.as_dict() if self.features else None

    def _sharded(self, *, is_loading: bool, with_rng: bool = True) -> dict[str, Any]:
        groups = self.student.groups
        metadata = sharding_metadata(groups)
        state = sharded_model(self.student.chunks, groups)
        state["optimizer"] = without_layout(
            self.optimizer.sharded_state_dict(state, is_loading=is_loading, metadata=metadata),
            has_master_weights=self.student.chunks[0].config.bf16,
        )
        if self._projectors is not None:
            state["projectors"] = self._projectors.sharded_state()
        if with_rng:
            state["rng"] = _sharded_rng(groups)
        return state


def sharded_model(chunks: Sequence[HiddenStateGPT], groups: Groups) -> dict[str, Any]:
    """Return the sharded description of every parameter, one entry per model chunk.

    Without the extra state of Transformer Engine's modules, which holds the scales of FP8: other
    layers have none, and load and write the same checkpoints.
    """
    metadata = sharding_metadata(groups)
    names = ["model"] if len(chunks) == 1 else [f"model{index}" for index in range(len(chunks))]
    state = {}
    for name, chunk in zip(names, chunks, strict=True):
        assert not chunk.config.fp8
        entries = chunk.sharded_state_dict(metadata=metadata)
        state[name] = {key: entry for key, entry in entries.items() if not _is_extra(key)}
    return state


def load_chunks(chunks: Sequence[HiddenStateGPT], state: dict[str, Any]) -> None:
    """Copy a loaded state into the model chunks."""
    for index, chunk in enumerate(chunks):
        own = state["model" if len(chunks) == 1 else f"model{index}"]
        found = chunk.load_state_dict(own, strict=False)
        missing = [key for key in found.missing_keys if not _is_extra(key)]
        assert not missing, missing
        assert not found.unexpected_keys, found.unexpected_keys


def _is_extra(key: str) -> bool:
    return key.endswith("_extra_state")


def check_same_model(
    description: Description, architecture: Architecture, tokenizer_hash: str, folder: Path
) -> None:
    """Raise CheckpointError when a checkpoint has a different architecture or tokenizer."""
    differences = architecture_differences(saved_architecture(description, folder), architecture)
    if differences:
        raise CheckpointError(
            f"{folder} is a checkpoint of another model (checkpoint vs configuration): "
            f"{'; '.join(differences)}; change the architecture, or `output` to start a run of "
            "its own"
        )
    # Weights may have been imported without a tokenizer.
    if description.tokenizer and description.tokenizer != tokenizer_hash:
        raise CheckpointError(
            f"{folder} was trained with another tokenizer ({description.tokenizer[:12]}, not "
            f"{tokenizer_hash[:12]}); set data.tokenizer.path to that one"
        )


def check_same_features(
    description: Description, features: dict[str, Any] | None, folder: Path
) -> None:
    """Raise CheckpointError when a checkpoint's feature losses or projectors differ."""
    none: dict[str, Any] = {"losses": [], "projectors": None}
    there, here = description.features or none, features or none
    for key, setting in (("losses", "objective.features"), ("projectors", "objective.projector")):
        if there[key] != here[key]:
            raise CheckpointError(
                f"{folder} has other feature losses: {key} are {there[key]} in the checkpoint and "
                f"{here[key]} in this run; change {setting}, or start a run of its own with "
                "student.checkpoint and another `output`"
            )


def saved_architecture(description: Description, folder: Path) -> Architecture:
    """Return the architecture of a checkpoint; fields unknown to older releases get defaults.

    Raises CheckpointError for field names of a different release.
    """
    try:
        return Architecture.from_dict(description.architecture)
    except TypeError as error:
        raise CheckpointError(
            f"{folder}: the architecture in its description is of another release ({error}); "
            "use the release that wrote it"
        ) from error


def saved_balance(description: Description, folder: Path) -> BalanceState:
    """Return the running means of a checkpoint; raises CheckpointError if they are malformed."""
    try:
        return BalanceState.from_dict(description.balance)
    except (KeyError, TypeError) as error:
        raise CheckpointError(
            f"{folder}: `balance` in its description is damaged ({error!r}); use another checkpoint"
        ) from error


def _layout_name(groups: Groups) -> str:
    layout = groups.layout
    return (
        f"tp{layout.tensor}-pp{layout.pipeline}-vpp{layout.virtual_pipeline or 1}-"
        f"cp{layout.context}-ep{layout.expert}-dp{groups.data.size()}"
    )


def _sharded_rng(groups: Groups) -> ShardedObject:
    rank, size = torch.distributed.get_rank(groups.world), groups.world.size()
    states = {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "torch": torch.get_rng_state(),
        "device": torch.cuda.get_rng_state(),
        "tracker": get_cuda_rng_tracker().get_states(),
    }
    return ShardedObject("rng", states, (size,), (rank,), replica_id=0)


def _restore_rng(states: dict[str, Any]) -> None:
    random.setstate(states["python"])
    np.random.set_state(states["numpy"])
    torch.set_rng_state(states["torch"])
    torch.cuda.set_rng_state(states["device"])
    get_cuda_rng_tracker().set_states(states["tracker"])
