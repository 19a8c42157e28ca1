"""A map's file: read as it was written, refused when damaged, and built once in a cache.

Regimes: a file cut short, of another program or version, without an array; a map of other
tokenizers; a damaged cache; several builders at a time.
"""

from __future__ import annotations

import json
import logging
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load, save

from megatron_distill.align import (
    VocabularyMap,
    build_vocabulary_map,
    cached_vocabulary_map,
    load_map,
    save_map,
)
from megatron_distill.align.coverage import differing_rows, text_coverage
from megatron_distill.align.map_file import check_map_tokenizer, map_bytes, map_from_bytes
from megatron_distill.errors import DataError, StoreError
from tests.support.tokenizer_kinds import HARD_TEXTS, no_underscores, tokenizer_of

STUDENT, TEACHER = "hf_bytes", "sp_bpe"


@pytest.fixture(scope="module")
def found() -> VocabularyMap:
    return build_vocabulary_map(tokenizer_of(STUDENT), tokenizer_of(TEACHER))


def test_a_file_is_read_as_it_was_written(tmp_path: Path, found: VocabularyMap) -> None:
    path = tmp_path / "map.safetensors"
    save_map(found, path)
    again = load_map(path)
    assert (again.student, again.teacher) == (found.student, found.teacher)
    assert len(differing_rows(again, found)) == 0
    assert map_bytes(again) == path.read_bytes() == map_bytes(found)
    assert [one.name for one in tmp_path.iterdir()] == [path.name]


def test_damaged_files_are_refused(tmp_path: Path, found: VocabularyMap) -> None:
    content = map_bytes(found)
    arrays = load(content)

    def written(**about: object) -> bytes:
        length = int.from_bytes(content[:8], "little")
        header = json.loads(json.loads(content[8 : 8 + length])["__metadata__"]["vocabulary_map"])
        return save(arrays, {"vocabulary_map": json.dumps(header | about)})

    del_one = {name: array for name, array in arrays.items() if name != "pieces_V"}
    half = arrays | {"row_weights_n": arrays["row_weights_n"] * np.float32(0.5)}
    for damaged, message in (
        (b"", "not a vocabulary map"),
        (content[:-1], "is damaged"),
        (content[: len(content) // 2], "is damaged"),
        (save(arrays), "not a vocabulary map"),
        (b"\x00" * 100, "not a vocabulary map"),
        (written(version=2), "is of version 2, and this program reads version 1"),
        (written(format="x"), "not a vocabulary map"),
        (written(student={"name": "x"}), "is damaged"),
        (_with(content, del_one), "is damaged"),
        (_with(content, half), "sums to 0.5000000, not to 1"),
    ):
        path = tmp_path / "map.safetensors"
        path.write_bytes(damaged)
        with pytest.raises(DataError, match=f"{path}: .*{message}.*build it again"):
            load_map(path)
    with pytest.raises(DataError, match="cannot be read"):
        load_map(tmp_path / "none")


def _with(content: bytes, arrays: dict[str, np.ndarray]) -> bytes:
    length = int.from_bytes(content[:8], "little")
    return save(arrays, json.loads(content[8 : 8 + length])["__metadata__"])


def test_a_map_of_other_tokenizers_is_refused_with_both_names(found: VocabularyMap) -> None:
    for side, kind in (("student", STUDENT), ("teacher", TEACHER)):
        check_map_tokenizer(found, side, tokenizer_of(kind), place="m", key="k")
        with pytest.raises(DataError, match=rf"k = small ranks \(.*: m is a map of the {side} "):
            check_map_tokenizer(found, side, tokenizer_of("tiktoken"), place="m", key="k")


def test_the_cache_is_built_once_for_all_that_wait(
    tmp_path: Path, found: VocabularyMap, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="megatron_distill")
    pair = tokenizer_of(STUDENT), tokenizer_of(TEACHER)
    with ThreadPoolExecutor(4) as pool:
        all_maps = list(
            pool.map(lambda _: cached_vocabulary_map(*pair, folder=tmp_path / "new"), range(4))
        )
    assert {map_bytes(one) for one in all_maps} == {map_bytes(found)}
    (built,) = [line for line in caplog.messages if "; built" in line]
    rows = sum(len(found.row(number)[0]) > 0 for number in range(found.student.size))
    sizes = f"of {found.student.size:,} and {found.teacher.size:,} tokens, {rows:,} ids with a row"
    assert f": {found.exact_pairs:,} exact pairs {sizes}; built {tmp_path}" in built
    caplog.clear()
    cached_vocabulary_map(*pair, folder=tmp_path / "new")
    (again,) = caplog.messages
    assert again == built.replace("; built", "; read")
    (path,) = (tmp_path / "new").iterdir()
    # The other direction and further pairs of special tokens have files of their own.
    cached_vocabulary_map(*reversed(pair), folder=tmp_path / "new")
    cached_vocabulary_map(*pair, folder=tmp_path / "new", special_pairs=[("<|endoftext|>", "</s>")])
    assert len(list((tmp_path / "new").iterdir())) == 3
    path.write_bytes(path.read_bytes()[:-9])
    caplog.clear()
    assert map_bytes(cached_vocabulary_map(*pair, folder=tmp_path / "new")) == map_bytes(found)
    assert "building the vocabulary map again" in caplog.messages[0]
    assert path.read_bytes() == map_bytes(found)


def test_a_cache_that_cannot_be_written_names_its_folder(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    pair = tokenizer_of(STUDENT), tokenizer_of(TEACHER)
    with pytest.raises(StoreError, match=f"cannot write {tmp_path}/file"):
        cached_vocabulary_map(*pair, folder=tmp_path / "file")


def test_text_coverage_counts_tokens(found: VocabularyMap) -> None:
    texts = no_underscores(HARD_TEXTS) * 5
    student, teacher = tokenizer_of(STUDENT), tokenizer_of(TEACHER)
    covered = text_coverage(found, student, teacher, texts)
    mine = [n for ids in student.encode_batch(texts) for n in ids.tolist()]
    its = [n for ids in teacher.encode_batch(texts) for n in ids.tolist()]
    paired, its_paired = set(found.student_ids_p.tolist()), set(found.teacher_ids_p.tolist())
    reached = set(found.row_teacher_ids_n.tolist())
    assert covered.bytes == sum(len(text.encode()) for text in texts)
    assert (covered.student_tokens, covered.teacher_tokens) == (len(mine), len(its))
    assert covered.student_paired == sum(n in paired for n in mine)
    assert covered.teacher_paired == sum(n in its_paired for n in its)
    assert covered.student_in_rows == sum(len(found.row(n)[0]) > 0 for n in mine)
    assert covered.teacher_in_rows == sum(n in reached for n in its)
    assert 0 < covered.student_paired < len(mine)


def test_rows_that_differ_are_found(found: VocabularyMap) -> None:
    for name in ("row_teacher_ids_n", "pieces_V"):
        array = getattr(found, name).copy()
        long = int(np.flatnonzero(np.diff(found.row_offsets) > 1)[0])
        place = found.row_offsets[long] if name == "row_teacher_ids_n" else long
        unused = found.unreached_teacher_ids[0]
        array[place] = unused if name == "row_teacher_ids_n" else 77
        other = map_from_bytes(_with(map_bytes(found), load(map_bytes(found)) | {name: array}),
                               place="x")  # fmt: skip
        assert differing_rows(found, other).tolist() == [long]
