"""The progress display of a training run."""

import io

import pytest

from megatron_distill.train.progress import TrainingProgress, total_texts
from tests.support.terminals import Clock, Terminal


def record(step: int, **values: object) -> dict[str, object]:
    return {
        "step": step,
        "tokens": step * 2048,
        "ce_loss": 4.0,
        "kd_loss": 0.5,
        "total_loss": 4.5,
        "grad_norm": 1.25,
        "learning_rate": 3e-4,
        "tokens_per_second": 14823.0,
        "peak_memory_bytes": 1_234_000_000,
        **values,
    }


def play(
    stream: io.StringIO,
    *,
    total: int,
    start: int,
    last: int,
    interval: int = 1,
    failed: bool = False,
) -> None:
    """Two seconds a step."""
    clock = Clock()
    display = TrainingProgress(
        stream, total_steps=total, start_step=start, interval=interval, clock=clock
    )
    for step in range(start + 1, last + 1):
        clock.now += 2.0
        display.write(record(step))
    display.close(failed=failed)


def test_a_pipe_gets_whole_lines_at_the_interval_and_no_control_characters() -> None:
    stream = io.StringIO()
    play(stream, total=10, start=0, last=10, interval=4)
    lines = stream.getvalue().splitlines()
    assert [line.split()[:2] for line in lines[:-1]] == [
        ["step", "1/10"],
        ["step", "4/10"],
        ["step", "8/10"],
        ["step", "10/10"],
    ]
    assert lines[1] == (
        "step 4/10  total_loss 4.500 = ce 4.000 + kd 0.5000  grad norm 1.25  lr 3.00e-04"
        "  14.8k tok/s  1.23 GB  eta 0:12"
    )
    assert lines[-1] == (
        "finished 10 steps in 0:20, 20.5k tokens, ce 4.0000, 1024 tokens/s, peak memory 1.23 GB"
    )
    assert "\x1b" not in stream.getvalue()
    assert "\r" not in stream.getvalue()


def test_a_run_whose_last_save_failed_is_not_called_finished() -> None:
    stream = io.StringIO()
    play(stream, total=10, start=0, last=10, failed=True)
    assert (
        stream.getvalue().splitlines()[-1].startswith("stopped at step 10 of 10 after 0:20, 20.5k")
    )


def test_a_run_that_was_finished_before_is_reported() -> None:
    stream = io.StringIO()
    play(stream, total=10, start=10, last=10)
    assert stream.getvalue() == "no step was needed: 10 steps are done, the run has 10\n"


def test_a_run_that_fails_in_its_first_step_is_not_called_done() -> None:
    stream = io.StringIO()
    play(stream, total=10, start=4, last=4)
    assert stream.getvalue() == "no step was done, the run is at step 4 of 10\n"


@pytest.mark.parametrize(
    ("values", "ce_weight", "text"),
    [
        ({}, 1.0, "total_loss 4.500 = ce 4.000 + kd 0.5000"),
        ({"total_loss": 0.9}, 0.1, "total_loss 0.9000 = ce 0.1*4.000 + kd 0.5000"),
        ({"total_loss": 0.5}, 0.0, "total_loss 0.5000 = kd 0.5000  ce 4.000"),
        (
            {"kd_loss": 2e-5, "total_loss": 4.00002},
            1.0,
            "total_loss 4.000 = ce 4.000 + kd 2.000e-05",
        ),
        (
            {"features_loss": 0.0125, "total_loss": 4.5125},
            1.0,
            "total_loss 4.513 = ce 4.000 + kd 0.5000 + features 0.01250",
        ),
        (
            {
                "features_loss": 0.25,
                "total_loss": 7.0,
                "balance": {
                    "alpha": 0.5,
                    "ce_weight": 0.25,
                    "kd_scale": 8.0,
                    "feature_scale": 4.0,
                },
            },
            1.0,
            "total_loss 7.000 = ce 0.25*4.000 + kd 4*0.5000 + features 16*0.2500",
        ),
        ({"total_loss": 4.6}, 1.0, "total_loss 4.600 ~ ce 4.000 + kd 0.5000"),
        ({"kd_loss": 0.0, "total_loss": 2.0}, 0.5, "total_loss 2.000 = ce 0.5*4.000"),
    ],
)
def test_the_total_is_the_sum_of_its_weighted_parts(
    values: dict[str, object], ce_weight: float, text: str
) -> None:
    if "balance" in values:
        values = {**values, "total_loss": 1.0 + 2.0 + 4.0}
    assert total_texts(record(1, **values), ce_weight=ce_weight)[0] == text


BALANCE = {"alpha": 1.0, "ce_weight": 1.0, "kd_scale": 2.0}
HELD_OUT = {"ce_loss": 4.21, "kd_loss": 0.75, "top1_agreement": 0.423, "teacher_ce_loss": 3.9}
SOURCES = {"wiki": {"ce_loss": 2.5, "kd_loss": 0.25}, "code": {"ce_tokens": 0}}
SHOWN: list[tuple[dict[str, object], tuple[str, ...]]] = [
    (record(1, ce_loss=float("nan"), grad_norm=float("inf")), ("ce nan", "grad norm inf")),
    (record(1, kd_loss=0.0, total_loss=4.0), ("ce 4.000  grad norm",)),
    (
        record(1, total_loss=5.0, balance=BALANCE),
        ("total_loss 5.000 = ce 4.000 + kd 2*0.5000  alpha 1  kd_scale 2",),
    ),
    (
        {"step": 1, "validation": HELD_OUT},
        ("step 1 held-out:  ce 4.2100  kd 0.75000  top-1 agreement 42.3%  teacher ce 3.9000",),
    ),
    (
        {"step": 1, "validation": {"ce_loss": 2.5, "sources": SOURCES}},
        ("held-out:  ce 2.5000", "held-out by source: wiki ce 2.5000 kd 0.25000, code -"),
    ),
    ({"step": 1, "validation": {"ce_loss": 4.5, "kd_loss": 0.0}}, ("held-out:  ce 4.5000\n",)),
]


@pytest.mark.parametrize("kind", [io.StringIO, Terminal])
def test_the_figures_of_a_record_are_shown(kind: type[io.StringIO]) -> None:
    # A bar shows what fits; what is held out has lines of its own everywhere.
    for shown, texts in SHOWN[3:5] if kind is Terminal else SHOWN:
        stream = kind()
        display = TrainingProgress(stream, total_steps=2, start_step=0)
        display.write(record(1))
        display.write(shown)
        display.close()
        for text in texts:
            assert text in stream.getvalue(), text
        assert "stopped at step 1 of 2" in stream.getvalue()
        if "validation" in shown:
            assert f"held-out ce {shown['validation']['ce_loss']:.4f}" in stream.getvalue()  # type: ignore[index]


def test_an_evaluation_is_a_line_per_model_with_its_difference_to_the_teacher() -> None:
    stream = io.StringIO()
    minus = {"teacher": {"acc": {"difference": -0.125, "low": -0.25, "high": 0.0}}}
    student = {"quiz": {"acc": 0.5, "acc_stderr": 0.1387, "n": 14, "minus": minus}}
    display = TrainingProgress(stream, total_steps=4, start_step=0, interval=1, clock=Clock())
    display.write(
        {"step": 2, "evaluation": {"teacher": {"quiz": {"acc": 0.625}}, "student": student}}
    )
    assert stream.getvalue().splitlines() == [
        "step 2 teacher:  quiz acc 0.6250",
        "step 2 student:  quiz acc 0.5000 +- 0.1387"
        " (minus teacher -0.1250, 95 % -0.2500 to +0.0000)",
    ]
