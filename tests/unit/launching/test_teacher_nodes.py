"""Jobs of Slurm whose teacher has nodes of its own, where scripts stand in for Slurm's programs."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_distill.cli import main
from tests.guards.source_tree import ROOT
from tests.unit.launching.slurm_programs import BY_HAND, StandIn

TINY = str(ROOT / "configs" / "tiny.yaml")
NODES = ("n1", "n2")
every_way = pytest.mark.parametrize("way", ["submitted", "by hand"])


def settings(stand_in: StandIn, *own: str) -> list[str]:
    return [TINY, f"output={stand_in.folder}/run", *own]


def prepared(stand_in: StandIn, way: str, words: list[str], *rules: str) -> tuple[Path, list[str]]:
    """A batch script, and its words."""
    if way == "by hand":
        return BY_HAND, [*rules, "--", "train", *words]
    return stand_in.submit(*rules, program=words), []


@pytest.mark.parametrize(
    ("way", "ranks"),
    [
        ("by hand", 2),
        pytest.param("submitted", 1, marks=pytest.mark.slow),
        pytest.param("submitted", 2, marks=pytest.mark.slow),
    ],
)
def test_every_node_has_its_ranks_of_one_launch_and_the_teacher_s_nodes_among_the_words(
    stand_in: StandIn, way: str, ranks: int
) -> None:
    """The layout of each model fits the ranks of one node."""
    layouts = (f"parallel.tensor={ranks}", f"teacher.parallel.tensor={ranks}")
    words = settings(stand_in, "teacher.nodes=1", *layouts)
    rules = () if ranks == 1 else ("--ranks-per-node", str(ranks))
    script, rest = prepared(stand_in, way, words, *rules)
    done = stand_in.run(script, *rest, nodes=NODES, RANKS="done")
    assert done.returncode == 0, done.stderr
    first, _, step = stand_in.called("srun")
    assert {"--nodes=1", "--nodelist=n1", "megatron_distill.commands.preflight"} <= {*first}
    assert first[first.index("--nodes") :] == ["--nodes", "2", *rules, "--", "train", *words]
    assert {"--nodes=2", "--ntasks=2", "--nodelist=n1,n2"} <= {*step}
    found = {call[1]: call for call in stand_in.called("torchrun")}
    for node, is_first in zip(NODES, (1, 0), strict=True):
        call = found[node]
        assert {"--nnodes=2", f"--nproc-per-node={ranks}", f"--rdzv-id={stand_in.job}-0"} <= {*call}
        assert f"--rdzv-endpoint=127.0.0.1:{stand_in.port}" in call
        assert f"--rdzv-conf=is_host={is_first}" in call
        assert call[call.index("-m") :] == ["-m", "--", "megatron_distill.cli", "train", *words]


@every_way
def test_a_teacher_without_nodes_left_for_the_student_ends_the_job_before_its_checks(
    stand_in: StandIn, way: str
) -> None:
    """A node without GPUs has one rank, which a submission does not see."""
    script, rest = prepared(stand_in, way, settings(stand_in, "teacher.nodes=2"))
    done = stand_in.run(script, *rest, nodes=NODES, RANKS="done")
    assert done.returncode == 78, done.stderr
    gives = "teacher.nodes gives the teacher 2 ranks, but the launch has 2 processes in all"
    assert gives in done.stderr
    assert len(stand_in.called("srun")) == 1
    assert stand_in.called("scontrol", "requeue") == []


def test_a_submission_whose_student_has_other_ranks_than_its_layout_reaches_no_queue(
    stand_in: StandIn, capsys: pytest.CaptureFixture[str]
) -> None:
    words = settings(stand_in, "teacher.nodes=1", "parallel.tensor=4")
    assert main(["submit", "slurm", *words, "--nodes", "4", "--gpus-per-node", "2"]) == 1
    assert "the teacher has 2. Set teacher.nodes or one of these" in capsys.readouterr().err
    assert stand_in.called("sbatch") == []


@pytest.mark.slow
@pytest.mark.parametrize(("bad", "nodes"), [("n1", ["n2", "n3"]), ("n3", ["n1", "n2"])])
def test_a_spare_node_has_a_role_only_where_a_node_before_it_fails(
    stand_in: StandIn, bad: str, nodes: list[str]
) -> None:
    words = settings(stand_in, "teacher.nodes=1")
    rules = ("--spare-nodes", "1", "--health-command", f'test "$SLURMD_NODENAME" != {bad}')
    script, _ = prepared(stand_in, "submitted", words, *rules)
    done = stand_in.run(script, RANKS="done")
    assert done.returncode == 0, done.stderr
    first, _, ranks = stand_in.called("srun")
    assert first[first.index("--nodes") + 1] == "2"
    assert {"--nodes=2", f"--nodelist={','.join(nodes)}"} <= {*ranks}
    place = int(nodes[0][1:])
    port = stand_in.launches.all()[0].ports[place - 1]  # each node begins with another one
    meeting = f"--rdzv-endpoint=127.0.0.{place}:{port}"
    found = {call[1]: call for call in stand_in.called("torchrun")}
    for node, is_first in zip(nodes, (1, 0), strict=True):
        assert {"--nnodes=2", meeting, f"--rdzv-conf=is_host={is_first}"} <= {*found[node]}


@pytest.mark.slow
@every_way
def test_the_student_trains_on_the_first_nodes_of_slurm_and_the_teacher_answers_on_the_last(
    stand_in: StandIn, way: str
) -> None:
    """In real ranks; by name n10 would come first."""
    own = ("teacher.nodes=1", "train.steps=2", "validation.interval=0", "runtime.threads=1")
    script, rest = prepared(stand_in, way, settings(stand_in, *own))
    done = stand_in.run(script, *rest, nodes=("n9", "n10"))
    assert done.returncode == 0, done.stderr
    assert {tuple(call[1:]) for call in stand_in.called("rank")} == {("0", "n9"), ("1", "n10")}
    (launch,) = stand_in.launches.all()
    assert launch.nodes == ["n9", "n10"]
    folder = stand_in.launches.of(launch)
    for rank, name in ((0, "student.0"), (1, "teacher.0")):
        assert f" {name} " in (folder / f"rank_{rank:05d}.err").read_text()
    assert stand_in.launches.progress == 2
