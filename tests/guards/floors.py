"""Which package may import which: floors, fences, and no cycle."""

from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatch
from graphlib import CycleError, TopologicalSorter

from tests.guards.source_tree import PACKAGE, Source, within

FLOORS = {
    "errors": 0,
    "log": 0,
    "config": 0,
    "runtime": 1,
    "signals": 2,
    "launching": 2,
    "align": 3,
    "ops": 3,
    "store": 4,
    "losses": 5,
    "models": 5,
    "data": 5,
    "evaluation": 6,
    "planning": 6,
    "rollouts": 6,
    "train": 7,
    "commands": 8,
    "cli": 9,
    "launch": 9,
    "tools": 9,
}

# The ground that all floors stand on, their own neighbour `config` included.
GROUND = ("errors", "log")

# A dotted name, and the only places that may import it.
FENCES = {
    "megatron": (
        "megatron_distill/runtime/*",
        "megatron_distill/models/*",
        "megatron_distill/train/*",
    ),
    "triton": ("megatron_distill/ops/kernels/*",),
    "array_record": ("megatron_distill/store/binary.py",),
    "megatron_distill.config": (
        "megatron_distill/config/*",
        "megatron_distill/train/assemble/*",
        "megatron_distill/train/reports/*",
        "megatron_distill/train/optimizer.py",
        "megatron_distill/commands/*",
        "launch/*",
        "tools/*",
    ),
    "launch": (),
    "tools": (),
    "tests": (),
    "benchmarks": (),
}


def floor_violations(
    sources: Sequence[Source], floors: Mapping[str, int] = FLOORS, ground: Sequence[str] = GROUND
) -> Iterator[str]:
    """Find imports that go upwards or across a floor, and packages that stand on none."""
    for source in sources:
        if source.room and source.room not in floors:
            yield f"{source.place}: {source.room} stands on no floor"
            continue
        for imported in source.imports():
            parts = imported.name.split(".")
            if parts[0] != PACKAGE or len(parts) < 2:
                continue
            target = parts[1]
            where = f"{source.place}:{imported.line}"
            if not source.room:
                yield f"{where}: the package's own __init__ imports {imported.name}"
            elif target == source.room or target == "__version__":
                continue
            elif target not in floors:
                yield f"{where}: imports {imported.name}, which stands on no floor"
            elif floors[target] > floors[source.room]:
                yield f"{where}: {source.room} imports {target} from a floor above"
            elif floors[target] == floors[source.room] and (
                target not in ground or source.room in ground
            ):
                yield f"{where}: {source.room} imports {target} from the same floor"


def fence_violations(
    sources: Sequence[Source], fences: Mapping[str, Sequence[str]] = FENCES
) -> Iterator[str]:
    """Find imports of a fenced name outside of its places."""
    for source in sources:
        for imported in source.imports():
            for name, places in fences.items():
                inside = any(fnmatch(source.place, place) for place in places)
                if within(imported.name, name) and not inside:
                    yield (
                        f"{source.place}:{imported.line}: imports {imported.name}; "
                        f"{name} is allowed only in {', '.join(places) or 'no module'}"
                    )


def cycles(sources: Sequence[Source]) -> Iterator[str]:
    """Find modules that import each other in a circle.

    `from package import submodule` is an edge to the submodule, any other name of a package an
    edge to its __init__; that importing a submodule runs the parents' __init__ is no edge.
    """
    known = {source.module for source in sources}
    graph: dict[str, set[str]] = {source.module: set() for source in sources}
    for source in sources:
        for imported in source.imports():
            for target in (imported.name, imported.name.rpartition(".")[0]):
                if target in known:
                    graph[source.module].add(target)
                    break
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        yield " -> ".join(error.args[1])
