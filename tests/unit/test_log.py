"""Which rank logs what, in one line format."""

import io
import logging
import re

import pytest

from megatron_distill import log


@pytest.fixture(autouse=True)
def package_logger_as_before():
    logger = logging.getLogger("megatron_distill")
    before = (list(logger.handlers), logger.level, logger.propagate)
    yield
    logger.handlers[:], logger.level, logger.propagate = before


def lines(rank, **levels):
    stream = io.StringIO()
    log.configure(rank, stream=stream, **levels)
    log.get_logger("megatron_distill.train.loop").info("step %d", 3)
    log.get_logger("launch.quickstart").warning("slow")
    return stream.getvalue().splitlines()


def test_rank_zero_shows_information_in_the_one_format():
    first, second = lines(0)
    stamp = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d"
    assert re.fullmatch(rf"{stamp} INFO    rank 0 megatron_distill.train.loop: step 3", first)
    assert re.fullmatch(rf"{stamp} WARNING rank 0 megatron_distill.launch.quickstart: slow", second)


def test_other_ranks_show_warnings_only():
    assert [line.split(" ", 2)[2] for line in lines(3)] == [
        "WARNING rank 3 megatron_distill.launch.quickstart: slow"
    ]


def test_levels_can_be_chosen():
    assert len(lines(0, level=logging.ERROR)) == 0
    assert len(lines(3, other_ranks_level=logging.INFO)) == 2


def test_a_second_call_replaces_the_first():
    early, late = io.StringIO(), io.StringIO()
    log.configure(0, stream=early)
    log.configure(1, stream=late)
    log.get_logger("megatron_distill.data").warning("once")
    assert early.getvalue() == ""
    assert late.getvalue().count("once") == 1


def test_records_do_not_reach_the_root_logger_twice(caplog):
    assert len(lines(0)) == 2
    assert caplog.records == []
