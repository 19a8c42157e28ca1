"""The tool's screens and exit status, from tokenizers on disk."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors.numpy import load, save

from megatron_distill.data.tokenizers.tiktoken_encodings import written_ranks
from tests.support.tokenizer_kinds import write_tiktoken
from tests.unit.tools.conftest import Call

TOOL = "vocabulary_map.py"
BYTES = [bytes([byte]) for byte in range(256)]


@pytest.fixture
def pair(tmp_path: Path) -> list[object]:
    """The options of a student with 201 as a token and of a teacher of bytes and `ab`."""
    sides: dict[str, tuple[bytes, ...]] = {"student": (b"20", b"201", b"ab"), "teacher": (b"ab",)}
    options: list[object] = []
    for side, merges in sides.items():
        ranks = {token: rank for rank, token in enumerate((*BYTES, *merges))}
        rules = {
            "pattern": r"\p{N}+|[^\p{N}]+",
            "special_tokens": {"<|endoftext|>": 300, "<t>": 301},
        }
        path = tmp_path / f"{side}.tiktoken"
        options += [f"--{side}", write_tiktoken(path, written_ranks(ranks), rules)]
    return options


@pytest.fixture
def built(tmp_path: Path, call: Call, pair: list[object]) -> Path:
    path = tmp_path / "map.safetensors"
    assert call("build", *pair, "--output", path)[0] == 0
    return path


def test_build_prints_coverage(tmp_path: Path, call: Call, pair: list[object]) -> None:
    text = tmp_path / "text.txt"
    text.write_text("201ab20")
    output = tmp_path / "map.safetensors"
    status, out, err = call("build", *pair, "--output", output, "--text", text)
    assert (status, err) == (0, "")
    lines = {line.split("  ")[0].strip() or line.split()[0]: " ".join(line.split())
             for line in out.splitlines()}  # fmt: skip
    assert lines["exact pairs"] == "exact pairs 257 (85.1%) 257 (85.1%)"
    assert lines["pairs of special tokens"] == "pairs of special tokens 1 1"
    assert lines["holes"] == "holes 0"
    assert lines["special tokens alone"] == "special tokens alone 1"
    assert lines["ids without a token"] == "ids without a token 41"
    assert lines["tokens of 7 bytes"] == "tokens of 7 bytes 3 6"
    assert "257 b'201' encoded 3 pieces 50 b'2' 0.9009, 48 b'0' 0.0901, 49 b'1' 0.0090" in (
        " ".join(out.split())
    )
    status, _, err = call("build", *pair, "--output", output)
    assert (status, err) == (
        1,
        f"error: --output {output}: exists; add --overwrite to replace it\n",
    )
    special = "special tokens student teacher paired '<|endoftext|>' '<|endoftext|>'"
    assert f"{special} alone '<t>' '<t>' largest" in " ".join(out.split())
    again = [*pair, "--output", output, "--overwrite", "--pair", "<t>", "<t>"]
    written = " ".join(call("build", *again)[1].split())
    assert "pairs of special tokens 2 2" in written
    assert f"{special} paired '<t>' '<t>' largest" in written


def test_inspect_prints_rows(call: Call, pair: list[object], built: Path) -> None:
    status, out, _ = call("inspect", built, "--ids", "257", "258")
    assert status == 0
    assert [line.split() for line in out.splitlines()] == [
        ["257", "encoded", "3", "pieces", "50", "0.9009,", "48", "0.0901,", "49", "0.0090"],
        ["258", "exact", "1", "piece", "256", "1.0000"],
    ]
    _, out, _ = call("inspect", built, "ab", *pair)
    assert out.split() == ["258", "b'ab'", "exact", "1", "piece", "256", "b'ab'", "1.0000"]
    _, out, _ = call("inspect", built, "<|endoftext|>", *pair)
    token = "b'<|endoftext|>'"
    assert out.split() == ["300", token, "role", "1", "piece", "300", token, "1.0000"]
    assert "paired '<|endoftext|>'" in " ".join(call("inspect", built, *pair)[1].split())
    assert "exact pairs" in call("inspect", built)[1]
    assert call("inspect", built, "ab")[0] == 2
    assert call("inspect", built, "--text", built)[0] == 2
    status, _, err = call("inspect", built, "--ids", "999")
    assert (status, err) == (1, "error: --ids 999: is outside of the student's vocabulary of 302\n")
    status, _, err = call("inspect", built, "abc", *pair)
    assert status == 1
    assert "no single token of" in err


def test_verify_fails_for_a_file_that_is_not_the_map(
    call: Call, pair: list[object], built: Path
) -> None:
    status, out, err = call("verify", built, *pair)
    assert (status, err) == (0, "")
    assert "257 exact pairs, 0 holes" in out
    swapped = [pair[0], pair[3], pair[2], pair[1]]
    status, _, err = call("verify", built, *swapped)
    assert status == 1
    assert f"--student = {pair[3]}" in err
    assert f"a map of the student {pair[1]}" in err
    # A file that fits together, with the row of 20 on other bytes.
    content = built.read_bytes()
    arrays = load(content)
    arrays["row_teacher_ids_n"][256] = 7
    length = int.from_bytes(content[:8], "little")
    built.write_bytes(save(arrays, json.loads(content[8 : 8 + length])["__metadata__"]))
    status, out, _ = call("verify", built, *pair)
    assert status == 1
    assert "1 row of these tokenizers differ" in out
    assert "file" in out
    assert "b'\\x07' 0.9091" in out
    built.write_bytes(content[:-1])
    status, _, err = call("verify", built, *pair)
    assert status == 1
    assert err.startswith(f"error: {built}: is damaged")
