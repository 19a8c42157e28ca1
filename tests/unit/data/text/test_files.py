"""Files: every way a path can be wrong, and reading that is the same from any offset."""

import gzip
from pathlib import Path

import pytest
import zstandard

from megatron_distill.data.text.files import DamagedFileError, InputFile, expand_paths
from megatron_distill.errors import DataError

CONTENT = b"".join(b"line %d of the corpus\n" % index for index in range(4000))


def write_as(folder: Path, suffix: str, content: bytes = CONTENT) -> Path:
    path = folder / f"corpus.txt{suffix}"
    if suffix == ".gz":
        path.write_bytes(gzip.compress(content))
    elif suffix == ".zst":
        half = len(content) // 2
        frames = [zstandard.compress(part) for part in (content[:half], content[half:])]
        path.write_bytes(b"".join(frames))
    else:
        path.write_bytes(content)
    return path


def test_globs_and_names_are_merged_sorted_and_listed_once(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    for name in ("b.txt", "a.txt", "deep/c.txt", "d.md"):
        (tmp_path / name).write_text("x")
    patterns = [f"{tmp_path}/**/*.txt", f"{tmp_path}/d.md", f"{tmp_path}/a.txt"]
    names = [str(path.relative_to(tmp_path)) for path in expand_paths(patterns)]
    assert names == ["a.txt", "b.txt", "d.md", "deep/c.txt"]


def test_a_file_whose_name_looks_like_a_glob_is_found(tmp_path: Path) -> None:
    path = tmp_path / "part[1].txt"
    path.write_text("x")
    assert expand_paths([str(path)]) == [path]


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("absent.txt", "absent.txt: no such file"),
        ("*.parquet", "the glob matches no file"),
        ("folder", "folder: is a folder; give its files as a glob"),
        ("fold*", "the glob matches no file"),
        ("folder/inner.txt/x.txt", "no such file"),
    ],
)
def test_wrong_paths_are_named(tmp_path: Path, pattern: str, expected: str) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "inner.txt").write_text("x")
    with pytest.raises(DataError, match="data|glob") as caught:
        expand_paths([str(tmp_path / pattern)])
    assert expected in str(caught.value)
    assert str(tmp_path / pattern) in str(caught.value)


@pytest.mark.parametrize("patterns", [[], [""], ["  "]])
def test_an_empty_path_is_an_error(patterns: list[str]) -> None:
    with pytest.raises(DataError, match=r"data\.sources\.paths"):
        expand_paths(patterns)


def test_a_file_that_cannot_be_opened_is_named(tmp_path: Path) -> None:
    # Not by permissions, which do not bind root: a link that leads back to itself.
    link = tmp_path / "loop.txt"
    link.symlink_to(link)
    with pytest.raises(DataError, match=r"loop\.txt"):
        expand_paths([str(link)])
    unreadable = Path("/proc/self/mem")  # exists and opens; reading its first page fails
    if unreadable.exists():
        with pytest.raises(DataError, match=r"/proc/self/mem: cannot be read"):
            expand_paths([str(unreadable)])


@pytest.mark.parametrize("suffix", ["", ".gz", ".zst"])
def test_reading_from_any_offset_equals_the_slice(tmp_path: Path, suffix: str) -> None:
    path = write_as(tmp_path, suffix)
    for offset in (0, 1, 41_000, len(CONTENT) // 2, len(CONTENT) - 1, len(CONTENT)):
        file = InputFile(path, offset=offset)
        line = file.read_line(1 << 20)
        rest = file.read(1 << 20)
        assert line + rest == CONTENT[offset:]
        assert file.offset == len(CONTENT)
        file.close()


@pytest.mark.parametrize("suffix", ["", ".gz", ".zst"])
def test_a_byte_order_mark_is_passed_over_and_counted(tmp_path: Path, suffix: str) -> None:
    path = write_as(tmp_path, suffix, b"\xef\xbb\xbfone\ntwo\n")
    file = InputFile(path)
    assert file.read_line(100) == b"one\n"
    resumed = InputFile(path, offset=file.offset)
    assert resumed.read_line(100) == b"two\n"


def read_to_the_end(path: Path) -> None:
    file = InputFile(path)
    while file.read(1 << 16):
        pass


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
@pytest.mark.parametrize("damage", ["cut", "cut in header", "flipped", "not compressed at all"])
def test_damaged_compression_is_an_error(tmp_path: Path, suffix: str, damage: str) -> None:
    path = write_as(tmp_path, suffix)
    data = bytearray(path.read_bytes())
    if damage == "cut":
        del data[-20:]
    elif damage == "cut in header":
        del data[3:]
    elif damage == "flipped":
        for index in range(len(data) // 2, len(data) // 2 + 40):
            data[index] ^= 0xFF
    else:
        data = bytearray(CONTENT)
    path.write_bytes(data)
    with pytest.raises(DamagedFileError, match=rf"corpus\.txt\{suffix}: damaged or cut off after"):
        read_to_the_end(path)


def test_a_file_that_is_removed_while_reading_is_a_data_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"gone\.txt: cannot be read at byte 0"):
        InputFile(tmp_path / "gone.txt")
