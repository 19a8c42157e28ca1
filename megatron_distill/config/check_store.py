"""Rules of training from teacher stores."""

from collections.abc import Iterator

from megatron_distill.config.check_job import repeated_names
from megatron_distill.config.problems import Problem
from megatron_distill.config.schema import RunConfig

__all__ = ["store_problems"]


def store_problems(config: RunConfig) -> Iterator[Problem]:
    """Say what of the run does not go with a teacher that is a store."""
    store = None if config.teacher is None else config.teacher.store
    data = config.data
    if store is None:
        return
    yield from repeated_names("teacher.store", [entry.log_name for entry in store])
    if data.sources and len(store) > 1:
        yield Problem(
            ("teacher.store", "data.sources"),
            f"teacher.store names {len(store)} entries and data.sources are given: only one store "
            "can be joined with a corpus, by the numbers of its samples; leave data.sources out to "
            "train on the samples of the stores",
        )
    if data.validation_sources and not data.sources:
        yield Problem(
            ("data.validation_sources", "data.sources"),
            "data.validation_sources: without data.sources, samples of the stores are held out; "
            "leave them out, or give data.sources",
        )
    if data.tokenizer.train_vocab_size is not None and not data.sources:
        yield Problem(
            ("data.tokenizer.train_vocab_size", "data.sources"),
            f"data.tokenizer.train_vocab_size = {data.tokenizer.train_vocab_size}: a tokenizer is "
            "trained on data.sources, and there are none; leave it out to use that of the store",
        )
    if not config.objective.terms:
        yield Problem(
            ("objective.terms", "teacher.store"),
            "objective.terms = []: nothing is learned from teacher.store; add a term, or set "
            "teacher=null",
        )
