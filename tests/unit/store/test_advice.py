"""What a reader says of damage: the sample or the sidecar, and the command that repairs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron_distill.errors import StoreError
from megatron_distill.store import StoreReader
from megatron_distill.store.plan import sealed
from tests.support.store_samples import settings, write_store
from tests.unit.store.test_damage import read_all, repair


@pytest.fixture
def store(tmp_path: Path) -> Path:
    write_store(tmp_path / "store", settings())
    return tmp_path / "store"


@pytest.mark.parametrize("damage", ["flipped", "cut", "gone", "of another shard", "resealed"])
def test_a_damaged_sidecar_is_found_when_a_store_is_opened(store: Path, damage: str) -> None:
    path = store / "shards/logits-000002.json"
    content = path.read_bytes()
    value = json.loads(content)
    del value["seal"]
    if damage == "gone":
        path.unlink()
    else:
        changed = {
            "flipped": content.replace(b'"count": ', b'"count":1', 1),
            "cut": content[:100],
            "of another shard": (store / "shards/logits-000001.json").read_bytes(),
            "resealed": sealed(value | {"sha256": "0" * 64}),
        }
        path.write_bytes(changed[damage])
    with pytest.raises(StoreError) as caught:
        StoreReader.open(store)
    assert str(caught.value).startswith(f"{path}: "), caught.value
    assert str(caught.value).endswith(repair(store)), caught.value
    path.write_bytes(content)
    assert read_all(store)
