"""From a configuration to the results of lm-evaluation-harness."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from megatron_distill.config import RunConfig
from megatron_distill.errors import ConfigError
from megatron_distill.evaluation.tasks.encode import TextEncoder
from megatron_distill.models.execution import Execution
from megatron_distill.runtime.collectives import together
from megatron_distill.runtime.launch import PRECISIONS, Device
from megatron_distill.train.assemble.evaluated_model import shared_tokenizer
from megatron_distill.train.assemble.evaluation import ModelRole, Resolved
from megatron_distill.train.assemble.models import job_groups
from megatron_distill.train.assemble.sources import data_options, open_tokenizer
from megatron_distill.train.assemble.tasks import NO_TASKS

__all__ = ["evaluate_by_harness"]


def evaluate_by_harness(
    config: RunConfig,
    device: Device,
    names: Sequence[str],
    *,
    include: str | None,
    limit: int | None,
    num_fewshot: int | None = None,
    apply_chat_template: bool = False,
    samples: bool = False,
) -> dict[str, Any] | None:
    """Evaluate the student of a configuration on tasks of lm-evaluation-harness.

    `include`: folder of further tasks of the harness. `limit`: the first items of each task. The
    other three are those of `run_harness`. Returns the harness's results on the first rank of a
    node, None elsewhere. Raises a MegatronDistillError on all ranks together; those of a task that
    cannot be loaded and of a missing chat template come before the model is built.
    """
    _require_installed()
    try:
        from megatron_distill.evaluation.lm_eval_model import (
            ScorerLM,
            harness_tasks,
            require_chat_template,
            run_harness,
        )
    except ImportError as error:
        raise ConfigError(
            f"--lm-eval: lm-evaluation-harness cannot be imported ({error}); install the extra "
            "`lm-eval` again, or give --tasks"
        ) from error
    with together():
        tasks = harness_tasks(names, include=include)
    with (
        job_groups(config.parallel, config.runtime, seed=config.seed, trains=False) as groups,
        device.alone,
    ):
        options = data_options(config.data, Path(config.output))
        tokenizer, vocabulary = open_tokenizer(config, options)
        with together():
            if apply_chat_template and tokenizer is not None:
                require_chat_template(tokenizer)
        execution = Execution(PRECISIONS[config.train.precision], device.torch_device)
        role = ModelRole("student", config.seed, execution, tokenizer, vocabulary)
        resolved = Resolved.of(config, role, NO_TASKS)
        weights = resolved.digest(groups)
        model = resolved.built(
            config.evaluation, groups, cache_gib=config.generation.cache_gib, writes=True
        )
        tokenizer = shared_tokenizer(tokenizer)
        encoder = TextEncoder(tokenizer, add_bos=config.data.add_bos)
        adapter = ScorerLM(
            model.scorer,
            encoder,
            model.writer,
            seed=config.seed,
            weights=weights,
            most=resolved.source.architecture.max_position_embeddings,
        )
        return run_harness(
            adapter,
            tasks,
            limit=limit,
            num_fewshot=num_fewshot,
            apply_chat_template=apply_chat_template,
            samples=samples,
        )


def _require_installed() -> None:
    """Raise ConfigError where the harness is not installed."""
    if find_spec("lm_eval") is None:
        raise ConfigError(
            "--lm-eval: lm-evaluation-harness is not installed; install the extra `lm-eval`, or "
            "give --tasks"
        )
