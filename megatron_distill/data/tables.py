"""Rows of Parquet and Arrow files, saved Hugging Face datasets included, a few at a time."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from megatron_distill.data.files import DamagedFileError
from megatron_distill.errors import DataError

TABLE_FORMATS: Final = ("parquet", "arrow")
_BATCH_ROWS: Final = 256
_STATE_FILE: Final = "state.json"  # of a dataset that save_to_disk wrote
_SPLITS_FILE: Final = "dataset_dict.json"
_FILE_MAGIC: Final = b"ARROW1"  # of Arrow's random-access format; others are streams


def expand_saved(patterns: Sequence[str]) -> list[str]:
    """The patterns, those that name a saved dataset's folder replaced by its files.

    Raises DataError: a folder holds no saved dataset, or several splits of one.
    """
    found: list[str] = []
    for pattern in patterns:
        folder = Path(pattern).expanduser()
        found += _saved_files(folder) if pattern.strip() and folder.is_dir() else [pattern]
    return found


def _saved_files(folder: Path) -> list[str]:
    if (folder / _SPLITS_FILE).is_file():
        splits = _read_json(folder / _SPLITS_FILE).get("splits", [])
        named = ", ".join(str(folder / str(split)) for split in splits)
        raise DataError(f"{folder}: holds the splits of a dataset; name one of {named}")
    if not (folder / _STATE_FILE).is_file():
        raise DataError(
            f"{folder}: a folder without {_STATE_FILE} is no saved dataset; name its files with a "
            f"glob, as {folder}/*.arrow"
        )
    files = [
        str(folder / entry["filename"])
        for entry in _read_json(folder / _STATE_FILE).get("_data_files", [])
    ]
    if not files:
        raise DataError(f"{folder}: the saved dataset names no data file; save it again")
    return files


def _read_json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: cannot be read ({error}); save the dataset again") from error
    if not isinstance(found, dict):
        raise DataError(f"{path}: not what save_to_disk writes; save the dataset again")
    return found


def record_batches(
    path: Path, *, required: Sequence[str], optional: Sequence[str] = (), first_row: int = 0
) -> Iterator[tuple[int, Any]]:
    """Yield the number of rows before it, and a pyarrow RecordBatch of these columns.

    Rows before `first_row` are passed over. A file is Parquet or Arrow as its content says. Memory:
    one batch, and of Parquet one row group's pages. Raises DamagedFileError, and DataError where a
    required column is missing.
    """
    import pyarrow as pa  # takes a fifth of a second, which other formats need not wait for

    try:
        row = 0
        for batch in _batches(path, required, optional, first_row):
            if isinstance(batch, int):
                row += batch
                continue
            skipped = min(max(0, first_row - row), batch.num_rows)
            if skipped < batch.num_rows:
                yield row + skipped, batch.slice(skipped)
            row += batch.num_rows
    except (pa.ArrowException, OSError) as error:  # of a cut-off stream it is an OSError
        reason = (str(error).strip() or repr(error)).splitlines()[0]
        raise DamagedFileError(f"{path}: damaged or cut off ({reason}); replace it") from error


def _batches(
    path: Path, required: Sequence[str], optional: Sequence[str], first_row: int
) -> Iterator[Any]:
    """Yield batches, and the number of rows where a row group is passed over unread."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    with path.open("rb") as stream:
        magic = stream.read(len(_FILE_MAGIC))
    if magic[:4] == b"PAR1":
        with pq.ParquetFile(path, memory_map=True, pre_buffer=False) as file:
            columns = _columns(path, file.schema_arrow.names, required, optional)
            row = 0
            for group in range(file.num_row_groups):
                rows = file.metadata.row_group(group).num_rows
                row += rows
                if row <= first_row:
                    yield rows
                else:
                    yield from file.iter_batches(_BATCH_ROWS, row_groups=[group], columns=columns)
        return
    with pa.memory_map(str(path)) as source:
        if magic == _FILE_MAGIC:
            reader = pa.ipc.open_file(source)
            found = (reader.get_batch(index) for index in range(reader.num_record_batches))
        else:
            reader = pa.ipc.open_stream(source)
            found = iter(reader)
        columns = _columns(path, reader.schema.names, required, optional)
        for batch in found:
            chosen = batch.select(columns)
            for start in range(0, chosen.num_rows, _BATCH_ROWS):
                yield chosen.slice(start, _BATCH_ROWS)


def _columns(
    path: Path, names: Sequence[str], required: Sequence[str], optional: Sequence[str]
) -> list[str]:
    for name in required:
        if name not in names:
            raise DataError(
                f"{path}: has no column {name!r} (its columns: {', '.join(names) or 'none'}); set "
                "text_key or `conversation` of the data source"
            )
    return [name for name in (*required, *optional) if name in names]
