"""Refused habits: none in the tree, and each one found in a source that has it."""

from collections.abc import Callable, Iterator, Sequence

import pytest

from tests.guards import habits
from tests.guards.source_tree import PACKAGE, ROOT, Source, read_sources

PACKAGE_SOURCES = read_sources(ROOT, (PACKAGE,))
PROJECT = read_sources(ROOT, (PACKAGE, "launch", "tools", "benchmarks"))
Guard = Callable[[Sequence[Source]], Iterator[str]]

IN_PACKAGE: list[Guard] = [habits.prints, habits.missing_docstrings, habits.config_probes]
EVERYWHERE: list[Guard] = [
    habits.broad_handlers,
    habits.left_open,
    habits.global_state,
    habits.not_ascii,
    habits.drawer_names,
    habits.repeated_exports,
    habits.kind_ladders,
]

TWO_KINDS = """
class Draws:
    def token_statistics(self):
        return {}
class Head:
    def token_statistics(self):
        return {}
"""
REFUSED = [
    (habits.kind_ladders, f"{TWO_KINDS}x = 1 if isinstance(y, Draws) else 2\n"),
    (habits.kind_ladders, f"{TWO_KINDS}x = isinstance(y, (signals.Head, dict))\n"),
    (habits.kind_ladders, f"{TWO_KINDS}x = isinstance(y, Draws | Head)\n"),
    (habits.kind_ladders, f"{TWO_KINDS}x = type(y) in (Draws, Head)\n"),
    (habits.kind_ladders, f"{TWO_KINDS}match y:\n    case Draws():\n        x = 1\n"),
    (habits.repeated_exports, '__all__ = ["a", "b", "a"]\n'),
    (habits.prints, "def f():\n    print(1)\n"),
    (habits.broad_handlers, "try:\n    pass\nexcept:\n    pass\n"),
    (habits.broad_handlers, "try:\n    pass\nexcept Exception as error:\n    raise\n"),
    (habits.broad_handlers, "try:\n    pass\nexcept (OSError, BaseException):\n    pass\n"),
    (
        habits.caught_collectives,
        "try:\n    dist.all_reduce(x)\nexcept RuntimeError:\n    pass\n",
    ),
    (
        habits.caught_collectives,
        "try:\n    if x:\n        torch.distributed.broadcast_object_list([x])\n"
        "except OSError as error:\n    log(error)\nexcept ValueError:\n    raise\n",
    ),
    (habits.caught_collectives, "with suppress(RuntimeError):\n    dist.barrier()\n"),
    (habits.caught_collectives, "with together(group=g):\n    dist.irecv(x)\n"),
    (
        habits.caught_collectives,
        'def total(x):\n    """Sum.\n\n    Collective: one all-reduce.\n    """\n'
        "try:\n    total(1)\nexcept ValueError:\n    x = None\n",
    ),
    (habits.left_open, "x = 1  # TODO later\n"),
    (habits.left_open, '"""Sum.\n\nFIXME: wrong for bf16.\n"""\n'),
    (habits.left_open, "def f():\n    raise NotImplementedError\n"),
    (habits.global_state, "x = 1\ndef f():\n    global x\n    x = 2\n"),
    (habits.config_probes, "def f(config):\n    return getattr(config, 'tensor', 1)\n"),
    (habits.not_ascii, "x = 1  # caf\u00e9\n"),
    (habits.missing_docstrings, "x = 1\n"),
    (habits.missing_docstrings, '"""M."""\ndef f():\n    return 1\n'),
    (habits.missing_docstrings, '"""M."""\nclass C:\n    x = 1\n'),
    (
        habits.missing_docstrings,
        '"""M."""\nclass C:\n    """C."""\n    def f(self):\n        pass\n',
    ),
]

ALLOWED = [
    (habits.kind_ladders, f"{TWO_KINDS}assert isinstance(y, Draws)\nx = isinstance(y, dict)\n"),
    (habits.prints, "def f(log):\n    log.print(1)\n"),
    (habits.broad_handlers, "try:\n    pass\nexcept (OSError, ValueError):\n    pass\n"),
    (habits.caught_collectives, "try:\n    dist.barrier()\nfinally:\n    close()\n"),
    (habits.caught_collectives, "try:\n    dist.barrier()\nexcept OSError:\n    raise\n"),
    (
        habits.caught_collectives,
        "try:\n    x = read()\nexcept OSError:\n    x = None\ndist.broadcast(x, 0)\n",
    ),
    (
        habits.caught_collectives,
        "try:\n    x.gather(1, ids)\n    functools.reduce(f, x)\nexcept ValueError:\n    pass\n",
    ),
    (habits.left_open, "todo = [1]  # the list of things to do\n"),
    (habits.config_probes, "def f(module):\n    return getattr(module, 'bias', None)\n"),
    (habits.missing_docstrings, '"""M."""\ndef _f():\n    def g():\n        pass\n'),
    (
        habits.missing_docstrings,
        '"""M."""\nclass C:\n    """C."""\n    def forward(self):\n        pass\n'
        "    def __init__(self):\n        pass\n",
    ),
    (habits.missing_docstrings, ""),
]


def source(text: str, place: str = "megatron_distill/ops/vocab.py") -> Source:
    return Source(place, text)


@pytest.mark.parametrize("guard", IN_PACKAGE, ids=lambda guard: guard.__name__)
def test_the_package_has_no(guard):
    found = list(guard(PACKAGE_SOURCES))
    assert not found, "\n".join(found)


@pytest.mark.parametrize("guard", EVERYWHERE, ids=lambda guard: guard.__name__)
def test_the_project_has_no(guard):
    found = list(guard(PROJECT))
    assert not found, "\n".join(found)


@pytest.mark.parametrize(("guard", "text"), REFUSED)
def test_a_refused_habit_is_found_once(guard, text):
    found = list(guard([source(text)]))
    assert len(found) == 1
    assert found[0].startswith("megatron_distill/ops/vocab.py:")


@pytest.mark.parametrize(("guard", "text"), ALLOWED)
def test_text_that_only_resembles_a_refused_habit_passes(guard, text):
    assert list(guard([source(text)])) == []


@pytest.mark.parametrize("name", ["utils", "helpers", "train_utils", "misc"])
def test_a_drawer_is_found_by_its_name(name):
    assert len(list(habits.drawer_names([source("", f"megatron_distill/ops/{name}.py")]))) == 1
    assert len(list(habits.drawer_names([source("", f"megatron_distill/{name}/vocab.py")]))) == 1


def test_a_module_may_ask_once_for_a_top_k_and_no_more():
    place = habits.ONE_KIND[0]
    once = f"{TWO_KINDS}x = isinstance(y, Draws)\n"
    assert list(habits.kind_ladders([source(once, place)])) == []
    assert len(list(habits.kind_ladders([source(f"{once}z = isinstance(y, Head)\n", place)]))) == 1


def test_kinds_are_found_by_their_methods():
    kinds = {"DenseLogits", "HiddenState", "TopK", "Sampled", "Recorded", "TopKEntries"}
    assert kinds <= habits.signal_kinds(PACKAGE_SOURCES)


def test_every_guard_is_shown_to_fail():
    shown = {guard for guard, _ in REFUSED} | {habits.drawer_names}
    assert shown == {*IN_PACKAGE, *EVERYWHERE, habits.caught_collectives}


def test_defect_14_no_error_is_swallowed_around_a_collective():
    # Megatron-LM's cached logits had `ignore_errors`, after which one rank waits for ever.
    assert any(source.place.startswith("megatron_distill/runtime") for source in PACKAGE_SOURCES)
    assert {"gather_ranks", "agree", "fused_linear_objective"} <= habits.communicating(
        PACKAGE_SOURCES
    )
    found = list(habits.caught_collectives(PROJECT))
    assert not found, "\n".join(found)
