"""Where the training stream stands at the beginnings of shards, kept while a store is captured.

A start after a kill then goes on where the first missing shard begins, and does not tokenise all
that comes before it again.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from megatron_distill.data.samples import State
from megatron_distill.errors import StoreError
from megatron_distill.signals.store.durable import publish_first, remove_stale
from megatron_distill.signals.store.sealed import sealed, unsealed

_FORMAT: Final = "megatron-distill place in a training stream"
_NAME: Final = re.compile(r"stream-(\d{6,})\.json")
_ADVICE: Final = "remove it, and the stream is read from an earlier place"


def working_folder(store: Path) -> Path:
    """Return where a capture keeps what it needs to go on; a finished store has none."""
    return store / "capture"


class StreamPlaces:
    """States of the stream by the shard that begins there, one sealed file each.

    They belong to the plan whose uid they name. What is lost costs time, nothing else.
    """

    def __init__(self, folder: Path, uid: bytes) -> None:
        self._folder = folder
        self._uid = uid.hex()

    def load(self) -> dict[int, State]:
        """Every state that is kept. Raises StoreError: damaged, or of another store."""
        remove_stale(self._folder)
        found: dict[int, State] = {}
        for path in sorted(self._folder.glob("stream-*.json")):
            name = _NAME.fullmatch(path.name)
            value = unsealed(path, advice=_ADVICE)
            if name is None or value.get("format") != _FORMAT or value.get("shard") != int(name[1]):
                raise StoreError(f"{path}: not what its name says; {_ADVICE}")
            if value.get("capture_uid") != self._uid:
                raise StoreError(f"{path}: of another store, {value.get('capture_uid')}; {_ADVICE}")
            found[int(name[1])] = value["state"]
        return found

    def save(self, states: Mapping[int, State]) -> None:
        """Keep states. Raises StoreError: they cannot be written."""
        for shard, state in states.items():
            if not self._folder.is_dir():
                return  # another job has finished the store
            said = {"format": _FORMAT, "capture_uid": self._uid, "shard": shard, "state": state}
            publish_first(self._folder / f"stream-{shard:06d}.json", sealed(said))
