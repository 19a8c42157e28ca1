"""A corpus tokenised once: the pair holds every document, whole or not at all."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_distill.data.formats import SourceSpec
from megatron_distill.data.sources import DataOptions, open_training
from megatron_distill.data.text import documents
from megatron_distill.data.text.stream import tokenized_documents
from megatron_distill.errors import DataError
from tests.support.data_fixtures import ByteTokenizer, story, write_files, write_jsonl

ROOT = Path(__file__).parents[3]
TEXTS = [story(index) for index in range(1, 60)]


def write(
    spec: SourceSpec, prefix: Path, *, skip_bad: bool = False, overwrite: bool = False
) -> None:
    from megatron_distill.runtime.indexed_dataset import open_indexed  # slow to import

    with open_indexed(prefix, vocab_size=ByteTokenizer.vocab_size, overwrite=overwrite) as writer:
        for rows in tokenized_documents(spec, ByteTokenizer(), skip_bad=skip_bad):
            writer.add(rows)


def read(prefix: Path) -> list[str]:
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    dataset = IndexedDataset(str(prefix))
    assert len(dataset.document_indices) == len(dataset) + 1, "one sequence per document"
    rows = [dataset[index].tolist() for index in range(len(dataset))]
    assert all(row[-1] == 0 and 0 not in row[:-1] for row in rows)
    return [ByteTokenizer().decode(row[:-1]) for row in rows]


@pytest.mark.parametrize("kind", ["files", "lines", "jsonl", "gzip"])
def test_the_pair_holds_every_document_in_order(tmp_path: Path, kind: str) -> None:
    lines = tmp_path / "lines.txt"
    lines.write_text("\n".join(TEXTS))
    packed = tmp_path / "packed.jsonl.gz"
    jsonl = write_jsonl(tmp_path / "a.jsonl", TEXTS, key="content")
    packed.write_bytes(gzip.compress(jsonl.read_bytes()))
    spec = {
        "files": SourceSpec("text", (f"{write_files(tmp_path / 'files', TEXTS)}/*.txt",)),
        "lines": SourceSpec("text", (str(lines),), documents="line"),
        "jsonl": SourceSpec("jsonl", (str(jsonl),), text_key="content"),
        "gzip": SourceSpec("jsonl", (str(packed),), text_key="content"),
    }[kind]
    write(spec, tmp_path / "new" / "pair")
    assert read(tmp_path / "new" / "pair") == TEXTS
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == ["pair.bin", "pair.idx"]
    tokens = sum(len(text.encode()) + 1 for text in TEXTS)
    assert (tmp_path / "new" / "pair.bin").stat().st_size == 2 * tokens, "two bytes per token"


def test_a_long_file_read_in_pieces_is_one_document(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(documents, "PIECE_BYTES", 64)
    texts = ["".join(f"{name}{index:02}\n" for index in range(90)) for name in "abc"]
    write(SourceSpec("text", (f"{write_files(tmp_path / 'l', texts)}/*.txt",)), tmp_path / "pair")
    assert read(tmp_path / "pair") == texts


def test_a_run_reads_the_written_corpus(tmp_path: Path) -> None:
    write(SourceSpec("jsonl", (str(write_jsonl(tmp_path / "a.jsonl", TEXTS)),)), tmp_path / "pair")
    source = open_training(
        [SourceSpec("megatron", (str(tmp_path / "pair"),))],
        tokenizer=ByteTokenizer(),
        options=DataOptions(sequence_length=16, index_cache=tmp_path / "cache"),
        seed=1,
    )
    text = "\0" + "\0".join(TEXTS) + "\0"
    for _ in range(20):
        row = source.next_sample().tokens_S1.tolist()
        found = "".join("\0" if token == 0 else ByteTokenizer().decode([token]) for token in row)
        # The order is one of documents: of every sample each document's part is in the corpus.
        assert all(part in text for part in found.split("\0"))
        assert len(found) == 17


def test_a_failure_leaves_no_file(tmp_path: Path) -> None:
    bad = tmp_path / "bad.jsonl"
    bad.write_text(json.dumps({"text": "good"}) + "\n{broken\n")
    spec = SourceSpec("jsonl", (str(bad),))
    with pytest.raises(DataError, match=r"bad\.jsonl:2: not a JSON object"):
        write(spec, tmp_path / "pair")
    assert not list(tmp_path.glob("pair*"))
    write(spec, tmp_path / "pair", skip_bad=True)
    assert read(tmp_path / "pair") == ["good"]
    before = (tmp_path / "pair.bin").read_bytes()
    with pytest.raises(DataError, match=r"pair\.bin: exists already.*--overwrite"):
        write(spec, tmp_path / "pair", skip_bad=True)
    with pytest.raises(DataError, match=r"bad\.jsonl:2"):
        write(spec, tmp_path / "pair", overwrite=True)
    assert (tmp_path / "pair.bin").read_bytes() == before, "a failure replaces nothing"
    empty = tmp_path / "empty.jsonl"
    empty.write_text("\n")
    with pytest.raises(DataError, match="no document to write"):
        write(SourceSpec("jsonl", (str(empty),)), tmp_path / "other")
    with pytest.raises(DataError, match="already tokenised"):
        write(SourceSpec("megatron", (str(tmp_path / "pair"),)), tmp_path / "other")
    assert not list(tmp_path.glob("other*"))


@pytest.mark.slow
def test_a_full_disk_is_named(tmp_path: Path) -> None:
    spec = SourceSpec("jsonl", (str(write_jsonl(tmp_path / "a.jsonl", TEXTS)),))
    with pytest.raises(DataError, match=r"/dev/full/pair\.bin\.partial: cannot be written"):
        write(spec, Path("/dev/full/pair"))
    # No bytecode: the limit would cut it.
    limited = (
        "import resource, sys; resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100));"
        "import signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN);"
        "from tests.unit.tools.test_tokenize_corpus import *; from pathlib import Path\n"
        "try: write(SourceSpec('jsonl', (sys.argv[1],)), Path(sys.argv[2]))\n"
        "except DataError as error: print(error)"
    )
    reported = subprocess.run(
        [sys.executable, "-B", "-c", limited, str(tmp_path / "a.jsonl"), str(tmp_path / "pair")],
        cwd=ROOT, capture_output=True, text=True, check=True, timeout=240,
    ).stdout  # fmt: skip
    assert "cannot be written (File too large); free disk space" in reported
    assert not list(tmp_path.glob("pair*"))
