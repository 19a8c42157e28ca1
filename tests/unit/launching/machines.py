"""Hosts of this machine, which a job reaches as over ssh."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from megatron_distill.launching.program import Program
from megatron_distill.launching.records import Launches
from megatron_distill.launching.ssh import Hosts

__all__ = ["SHELL", "Machines", "machines_in"]

# A host whose name is in the file `broken` has no connection, as ssh shows it. Each has a home of
# its own, with Python packages and programs in it.
SHELL = """\
host=$1; shift
export HOME={folder}/$host PYTHONPATH={folder}/$host PATH={folder}/$host:{folder}/programs:$PATH
grep -qx "$host" {folder}/broken && {{ echo "connect to host $host: No route" >&2; exit 255; }}
exec "$@"
"""


@dataclass(frozen=True)
class Machines:
    """Hosts of this machine, some of them with a broken connection, and a program for them."""

    folder: Path

    def break_connections(self, *names: str) -> None:
        (self.folder / "broken").write_text("".join(f"{name}\n" for name in names))

    @property
    def shell(self) -> str:
        return f"sh {self.folder / 'shell'} {{host}}"

    def hosts(self, *names: str, wanted: int, pause: float = 0.0) -> Hosts:
        addresses = dict.fromkeys(names, "127.0.0.1")
        found = Hosts([*names], wanted, addresses, self.shell, {}, first_pause=pause)
        found.restart = 1  # they had an answer before the first launch
        return found

    @property
    def program(self) -> Program:
        return Program(str(self.folder / "program.py"), ("x",))

    @property
    def launches(self) -> Launches:
        return Launches(self.folder / "run" / "launches", self.folder / "run", "")


def machines_in(folder: Path) -> Machines:
    """Return hosts without a broken connection, with their files in a folder."""
    (folder / "shell").write_text(SHELL.format(folder=folder))
    settings = f"output: {folder}/run\ncorpus: ~/corpus.jsonl"
    (folder / "program.py").write_text(f"print({settings!r})\n")
    found = Machines(folder)
    found.break_connections()
    return found
