"""The state that changes from step to step, and its saving to and loading from checkpoints."""

from __future__ import annotations

import io
import random
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from megatron.core.optimizer.optimizer import ChainedOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.tensor_parallel import get_cuda_rng_tracker

from megatron_distill.data.prefetch import StepSource
from megatron_distill.errors import CheckpointError
from megatron_distill.losses import BalanceState
from megatron_distill.models.architecture import Architecture
from megatron_distill.models.pipeline_stages import even_layers
from megatron_distill.models.stage_table import configured_layers
from megatron_distill.runtime.batch import StepBatches
from megatron_distill.runtime.collectives import together
from megatron_distill.runtime.groups import Groups
from megatron_distill.train.checkpoint.best import Best, BestRule
from megatron_distill.train.checkpoint.description import (
    USE_ANOTHER,
    Description,
    check_same_model,
    resumed_from,
)
from megatron_distill.train.checkpoint.folder import CheckpointFolder
from megatron_distill.train.checkpoint.reader import MappedChunks, load_shards
from megatron_distill.train.checkpoint.shards import Shard
from megatron_distill.train.checkpoint.state import (
    model_shards,
    optimizer_shards,
    replicated_shards,
    set_steps,
)
from megatron_distill.train.features import FeatureLosses, Projectors
from megatron_distill.train.step import Student
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
    best: Best | None = None
    configuration: dict[str, Any] = field(default_factory=dict)  # plain, for the description
    load_seconds: float = 0.0  # of the checkpoint that this start resumes from

    def advance(self, batches: StepBatches, *, applied: bool) -> None:
        """Count one step."""
        self.step += 1
        self.tokens += batches.positions
        self.bad_steps += not applied

    def note_best(self, rule: BestRule | None, values: Mapping[str, float]) -> bool:
        """Return whether this step has the best value of the rule's metric so far."""
        found = None if rule is None else rule.better(self.step, values, self.best)
        self.best = found or self.best
        return found is not None

    def require_room(self) -> None:
        """Raise CheckpointError where the disk is too full: see `CheckpointFolder.require_room`."""
        self.checkpoints.require_room(model_shards(self.student.chunks, self.student.groups))

    def save(self, loader: StepSource) -> None:
        """Write a checkpoint of this step; see `CheckpointFolder.save`."""
        with evaluating(self.student):
            self.checkpoints.save(
                self._shards(),
                Description(
                    step=self.step,
                    tokens=self.tokens,
                    bad_steps=self.bad_steps,
                    architecture=self.architecture.as_dict(),
                    tokenizer=self.tokenizer_hash,
                    layout=_layout_name(self.student),
                    data=loader.state_dict(),
                    balance=self.balance.as_dict(),
                    features=self._features(),
                    configuration=self.configuration,
                    best=None if self.best is None else vars(self.best),
                ),
                _random_states(self.student.groups),
            )

    def restore(self, folder: Path, loader: StepSource) -> None:
        """Resume from a checkpoint written in this or any other layout.

        Random states are restored in the same layout only; they affect dropout alone. Raises
        CheckpointError when the checkpoint's model, tokenizer, optimizer or feature losses differ.
        """
        began = time.perf_counter()
        with resumed_from(folder):
            description = Description.read(folder)
            balance, best = saved_balance(description, folder), Best.of(description.best, folder)
        self.require_same(description, folder)
        same_layout = description.layout == _layout_name(self.student)
        groups = self.student.groups
        with together(), resumed_from(folder):
            chunks = MappedChunks(folder)
        load_shards(self._shards(), chunks, groups, resumes=True)
        self.step, self.tokens = description.step, description.tokens
        self.bad_steps = description.bad_steps
        self.balance, self.best = balance, best
        applied = self.step - self.bad_steps
        set_steps(self.optimizer, applied)
        if self._projectors is not None:
            self._projectors.set_steps(applied)
        if same_layout:
            with together(), resumed_from(folder):
                (states,) = chunks.object(_random_key(groups))
            _restore_rng(states)
        # Set from the counters: the schedule in checkpoints of older releases is a step ahead.
        self.schedule.step(applied)
        loader.load_state_dict(description.data)
        self.load_seconds = time.perf_counter() - began

    def require_same(self, description: Description, folder: Path) -> None:
        """Raise CheckpointError where a checkpoint's model or features differ from this run's."""
        before, now = (
            one.get("train", {}).get("precision")
            for one in (description.configuration, self.configuration)
        )
        if (before, now) == ("fp32", "bf16"):
            raise CheckpointError(
                f"train.precision = 'bf16': {folder} is of a run in fp32, without the optimizer's "
                "fp32 copies. Set train.precision=fp32, or begin a run in bf16 with "
                "student.checkpoint and another output"
            )
        check_same_model(description, self.architecture, self.tokenizer_hash, folder)
        check_same_features(description, self._features(), folder)

    @property
    def _projectors(self) -> Projectors | None:
        return self.features.projectors if self.features else None

    def _features(self) -> dict[str, Any] | None:
        return self.features.as_dict() if self.features else None

    def _shards(self) -> list[Shard]:
        chunks, groups = self.student.chunks, self.student.groups
        shards = model_shards(chunks, groups)
        shards += optimizer_shards(self.optimizer, chunks, groups)
        if self._projectors is not None:
            shards += replicated_shards(self._projectors.sharded_state(), groups)
        return shards


def check_same_features(
    description: Description,
    features: dict[str, Any] | None,
    folder: Path,
    *,
    remedy: str = "start a new run with student.checkpoint and another `output`",
) -> None:
    """Raise CheckpointError when a checkpoint's feature losses or projectors differ."""
    none: dict[str, Any] = {"losses": [], "projectors": None}
    there, here = description.features or none, features or none
    for key, setting in (("losses", "objective.features"), ("projectors", "objective.projector")):
        if there[key] != here[key]:
            raise CheckpointError(
                f"{folder} has other feature losses: {key} are {there[key]} in the checkpoint and "
                f"{here[key]} in this run. Change {setting}, or {remedy}"
            )


def saved_balance(description: Description, folder: Path) -> BalanceState:
    """Return the running means of a checkpoint; raises CheckpointError if they are malformed."""
    try:
        return BalanceState.from_dict(description.balance)
    except (KeyError, TypeError) as error:
        raise CheckpointError(
            f"{folder}: `balance` in its description is damaged ({error!r}); {USE_ANOTHER}"
        ) from error


def _layout_name(student: Student) -> str:
    """Name the layout; layers per stage are part of it where they are not spread evenly."""
    groups, config = student.groups, student.chunks[0].config
    layout, layers = groups.layout, configured_layers(config)
    is_even = layers == even_layers(config.num_layers, layout.stages)
    return (
        f"tp{layout.tensor}-pp{layout.pipeline}-vpp{layout.virtual_pipeline or 1}-"
        f"cp{layout.context}-ep{layout.expert}-dp{groups.data.size()}"
    ) + ("" if is_even else f"-layers{'.'.join(map(str, layers))}")


def _random_key(groups: Groups) -> str:
    return f"rng/shard_{groups.world.rank()}_{groups.world.size()}"


def _random_states(groups: Groups) -> dict[str, bytes]:
    """Return this rank's random states, by their name in a checkpoint."""
    states = {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "torch": torch.get_rng_state(),
        "device": torch.cuda.get_rng_state(),
        "tracker": get_cuda_rng_tracker().get_states(),
    }
    content = io.BytesIO()
    torch.save([states], content)
    return {_random_key(groups): content.getvalue()}


def _restore_rng(states: dict[str, Any]) -> None:
    random.setstate(states["python"])
    np.random.set_state(states["numpy"])
    torch.set_rng_state(states["torch"])
    torch.cuda.set_rng_state(states["device"])
    get_cuda_rng_tracker().set_states(states["tracker"])
