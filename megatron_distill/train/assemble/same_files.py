"""Comparison of the data files of student and teacher, which may be on machines of their own."""

from __future__ import annotations

from megatron_distill.config import DataConfig
from megatron_distill.data.formats import source_files
from megatron_distill.data.text.files import fingerprint
from megatron_distill.errors import DataError
from megatron_distill.runtime.bridge import Bridge
from megatron_distill.train.assemble.sources import source_specs

__all__ = ["publish_files", "require_same_files"]

_FILES = "data/files"


def publish_files(data: DataConfig, bridge: Bridge) -> None:
    """Tell the teacher's ranks number, names and sizes of the student's files.

    Call it on the student's first rank. Raises DataError: a file is missing.
    """
    bridge.publish(_FILES, _files(data))


def require_same_files(data: DataConfig, bridge: Bridge) -> None:
    """Raise DataError unless this machine has files of the same number, names and sizes.

    Content is compared later, by the hash of tokens in each answer. Call it on the teacher's first
    rank, after a meeting.
    """
    own, first = _files(data), bridge.published(_FILES)
    for name, found in own.items():
        if found != first[name]:
            of_rank = bridge.roles.name
            raise DataError(
                f"data source {name}: {of_rank(bridge.rank)} on {bridge.host(bridge.rank)} has "
                f"other files than {of_rank(0)} on {bridge.host(0)} (names and sizes are {found}, "
                f"and {first[name]}). Give both machines the same files"
            )


def _files(data: DataConfig) -> dict[str, str]:
    specs = source_specs((*data.sources, *data.validation_sources))
    return {spec.name: fingerprint(source_files(spec)) for spec in specs}
