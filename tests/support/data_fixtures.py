"""A tokenizer simple enough to check by eye, and corpora written to a folder."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from megatron_distill.data.formats import SourceSpec
from megatron_distill.data.samples import Sample


class ByteTokenizer:
    """Token = byte + 1; 0 ends a document."""

    vocab_size = 257
    eos_id = 0
    bos_id = None
    adds_bos = False
    identity = "bytes"

    def encode_batch(self, texts: Sequence[str]) -> list[NDArray[np.int32]]:
        return [np.frombuffer(text.encode(), np.uint8).astype(np.int32) + 1 for text in texts]

    def decode(self, ids: Iterable[int]) -> str:
        return bytes(int(token) - 1 for token in ids).decode()


def stream_tokens(samples: Sequence[Sample]) -> list[int]:
    """The row of tokens that consecutive samples were cut from."""
    row = [int(samples[0].tokens_S1[0])]
    for sample in samples:
        assert sample.tokens_S1[0] == row[-1], "a sample does not begin with the last label"
        row.extend(sample.tokens_S1[1:].tolist())
    return row


def complete_documents(samples: Sequence[Sample]) -> list[str]:
    """The documents that lie whole in consecutive samples, in order."""
    row, documents, begin = stream_tokens(samples), [], 0
    for index, token in enumerate(row):
        if token == ByteTokenizer.eos_id:
            documents.append(ByteTokenizer().decode(row[begin:index]))
            begin = index + 1
    return documents


def write_jsonl(path: Path, texts: Iterable[str], *, key: str = "text") -> Path:
    path.write_text("".join(json.dumps({key: text}) + "\n" for text in texts))
    return path


def jsonl_source(path: Path, texts: Iterable[str]) -> SourceSpec:
    """A source of these texts, one in each row."""
    return SourceSpec("jsonl", (str(write_jsonl(path, texts)),))


def write_files(folder: Path, texts: Iterable[str]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for index, text in enumerate(texts):
        (folder / f"{index:04}.txt").write_text(text)
    return folder


def story(index: int) -> str:
    """A document of its own content and length."""
    return f"<{index}>" + "abcdefghij"[: index % 10] * (1 + index % 7)
