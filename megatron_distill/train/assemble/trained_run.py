"""Evaluation and text generation with trained models, from a configuration."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from megatron_distill.config import RunConfig
from megatron_distill.data.tokenizers.open import Tokenizer
from megatron_distill.errors import ConfigError
from megatron_distill.models.architecture import Execution
from megatron_distill.models.generation.model import CachedGPT
from megatron_distill.runtime.collectives import together
from megatron_distill.runtime.launch import PRECISIONS, Device
from megatron_distill.train.assemble.distillation import open_held_out, open_run
from megatron_distill.train.assemble.models import job_groups, resolve_model
from megatron_distill.train.assemble.site import Site
from megatron_distill.train.assemble.sources import data_options, open_tokenizer, read_tokenizer
from megatron_distill.train.comparison import compare_held_out
from megatron_distill.train.metrics import LabelTotals, public_names
from megatron_distill.train.optimizer import wrap_data_parallel
from megatron_distill.train.step import Student
from megatron_distill.train.validation import validate


def evaluate(config: RunConfig, device: Device) -> dict[str, object]:
    """Return the held-out figures of the student, and of its teacher if the configuration has one.

    Names, including `sources` and `teachers`, are those of the `validation` objects of a run's
    metrics; `comparison` has the figures of `compare_held_out`.

    Raises a MegatronDistillError on all ranks together.
    """
    if config.validation.samples == 0:
        raise ConfigError("validation.samples=0: nothing is held out; set it to 1 or more")
    with (
        job_groups(config.parallel, config.runtime, seed=config.seed, trains=False) as groups,
        ExitStack() as resources,
        device.alone,
    ):
        # Nothing is trained, so nothing is recomputed.
        execution = Execution(PRECISIONS[config.train.precision], device.torch_device)
        opened = open_run(config, Site(groups, execution, device, resources))
        chunks = opened.student.build(opened.site.execution, groups=groups, seed=config.seed)
        for chunk in chunks:
            chunk.requires_grad_(False)  # so that the wrapper allocates no gradient buffers
        wrapped = wrap_data_parallel(chunks, config.optimizer, groups=groups)
        student = Student(chunks, wrapped, groups, config.data.sequence_length)
        held_out = open_held_out(config.train, config.objective, opened)
        means, sources = validate(student, held_out)
        counts = LabelTotals.of(held_out.steps, ()).whole
        teachers = held_out.objective.take_teacher_figures(means, counts)
        found: dict[str, object] = {**public_names(means)}
        if sources:
            found["sources"] = sources
        if teachers:
            found["teachers"] = teachers
        return found | {"comparison": compare_held_out(student, held_out)}


@dataclass(frozen=True)
class TextWriter:
    """A student that is found but not built, for checks of a prompt before its weights are read.

    Attributes:
        tokenizer: on the first rank, or on all that asked for it.
        positions: the most tokens of a text.
        build: reads the weights. Raises a MegatronDistillError on all ranks together.
    """

    tokenizer: Tokenizer | None
    positions: int
    build: Callable[[], CachedGPT]


@contextmanager
def text_writer(
    config: RunConfig, device: Device, *, tokenizer_everywhere: bool = False
) -> Iterator[TextWriter]:
    """Open the tokenizer of a student that generates text, and find its model.

    tokenizer_everywhere: on all ranks, which stop strings need. Raises a MegatronDistillError on
    all ranks together.
    """
    with (
        job_groups(config.parallel, config.runtime, seed=config.seed, trains=False) as groups,
        device.alone,
    ):
        options = data_options(
            config.data, Path(config.output), shows_progress=config.logging.progress
        )
        tokenizer, vocabulary = open_tokenizer(config, options)
        if tokenizer_everywhere:
            with together():
                tokenizer = tokenizer or read_tokenizer(config, options)
        source = resolve_model(config, "student", vocabulary)
        execution = Execution(PRECISIONS[config.train.precision], device.torch_device)

        def build() -> CachedGPT:
            return CachedGPT(
                source.build(execution, groups=groups, seed=config.seed),
                source.architecture,
                groups,
                device.torch_device,
                vocab_size=vocabulary.size,
                cache_gib=config.generation.cache_gib,
                decode=None if tokenizer is None else tokenizer.decode,
            )

        yield TextWriter(tokenizer, source.architecture.max_position_embeddings, build)
