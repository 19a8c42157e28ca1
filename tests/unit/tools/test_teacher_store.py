"""The tool's screens, and one line with status 1 for whatever is wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_distill.store import StoreReader
from megatron_distill.store.documents import documents_name, load_documents, publish_documents
from tests.support.store_maxtext_files import example, sequence, write
from tests.support.store_samples import begin, contents, settings, write_store
from tests.unit.store.test_store_documents import packed_epochs
from tests.unit.store.test_store_documents import write as write_listed
from tests.unit.tools.conftest import Call

TOOL = "teacher_store.py"


def test_inspect_prints_the_plan(tmp_path: Path, call: Call) -> None:
    write_store(tmp_path, settings(k=5, top_p=None))
    status, out, _ = call("inspect", tmp_path)
    assert status == 0
    lines = {line.split("  ")[0].strip(): line for line in out.splitlines()}
    for name, value in {
        "samples": "10 of 16 positions",
        "tokens": "160",
        "size": "GB in 3 shards of 4 samples",
        "entries": "5 ids per position of a vocabulary of 131,073",
        "codec": "u8",
        "temperatures": "1",
        "serves": "tail, renormalized, raw",
        "lacks": "nothing",
        "teacher": "sha256:aa",
        "tokenizer": "sha256:bb",
        "dataset": "sha256:cc",
        "settings.name": "made up",
    }.items():
        assert value in lines[name], name
    assert f"{3 * 131_072 / 160:,.1f}" in lines["bytes/token"]


def test_inspect_has_a_row_for_each_setting_of_the_capture(tmp_path: Path, call: Call) -> None:
    given = {"dataset": {"seed": 7, "sources": {"0": {"format": "jsonl"}}}, "precision": "fp32"}
    write_store(tmp_path, settings(), settings=given)
    rows = [line.split() for line in call("inspect", tmp_path)[1].splitlines()]
    assert ["settings.dataset.seed", "7"] in rows
    assert ["settings.dataset.sources.0.format", "jsonl"] in rows
    assert ["settings.precision", "fp32"] in rows


def test_stats_prints_means_over_trained_positions(tmp_path: Path, call: Call) -> None:
    wanted = settings(codec="f32")
    write_store(tmp_path, wanted)
    status, out, _ = call("stats", tmp_path)
    assert status == 0
    with StoreReader.open(tmp_path) as reader:
        totals = reader.manifest.totals
    assert 0 < totals.positions < 160
    assert totals.kept == 8 * totals.positions
    assert f"positions {totals.positions}" in " ".join(out.split())
    assert f"{totals.kept_mass / totals.positions:.5f}" in out
    assert f"{totals.entropy / totals.positions:.4f} nat" in out
    assert f"{-totals.label_log_prob / totals.positions:.4f} nat" in out
    assert "8 to 15" in out
    assert "100.00%" in out


def test_stats_of_draws(tmp_path: Path, call: Call) -> None:
    write_store(tmp_path, settings(mode="sampled", sampling_seed=1))
    status, out, _ = call("stats", tmp_path)
    assert status == 0
    assert "stored probability" in out
    assert "not defined" in out
    assert "8 draws per position" in call("inspect", tmp_path)[1]


def test_verify_and_repair_print_their_findings(tmp_path: Path, call: Call) -> None:
    write_store(tmp_path, settings())
    status, out, _ = call("verify", tmp_path)
    assert (status, out.splitlines()[-1]) == (
        0,
        "10 of 10 samples are good; 0 problems, 0 bad shards, 0 missing",
    )
    intact = contents(tmp_path)
    path = tmp_path / "shards" / "logits-000001.array_record"
    content = bytearray(path.read_bytes())
    content[500] ^= 1
    path.write_bytes(content)
    status, out, _ = call("verify", tmp_path)
    assert status == 1
    assert "shards/logits-000001.array_record" in out
    assert "its bytes do not match the SHA-256 of its sidecar" in out
    status, out, _ = call("repair", tmp_path)
    assert status == 0
    assert f"moved to {tmp_path}/quarantine/logits-000001.array_record" in out
    assert "run the capture again" in out
    write_store(tmp_path, settings())
    assert {n: c for n, c in contents(tmp_path).items() if "quarantine" not in n} == intact


def test_a_store_of_one_sample_is_counted_in_the_singular(tmp_path: Path, call: Call) -> None:
    write_store(tmp_path, settings(), samples=1)
    assert "GB in 1 shard of " in call("inspect", tmp_path)[1]
    path = tmp_path / "shards" / "logits-000000.array_record"
    path.write_bytes(b"x" + path.read_bytes()[1:])
    last = call("verify", tmp_path)[1].splitlines()[-2]
    assert last == "0 of 1 sample is good; 1 problem, 1 bad shard, 0 missing"


def test_a_bad_list_is_one_line_each_and_moves_no_record(tmp_path: Path, call: Call) -> None:
    samples = packed_epochs(3, 0)
    write_listed(tmp_path, samples)
    plan = begin(tmp_path, settings(), samples=len(samples)).plan
    pieces = load_documents(tmp_path, plan, 0)
    publish_documents(tmp_path, plan, 0, [pieces[pieces["sample"] >= 2]])
    (tmp_path / "shards" / documents_name(1)).unlink()
    status, out, _ = call("verify", tmp_path)
    assert status == 1
    lines = out.splitlines()
    assert len(lines) == 5
    for sample in range(2):
        assert lines[sample].startswith(
            f"shards/documents-000000.json: sample {sample}: lists 0 documents; the record has "
        )
    assert lines[2].startswith("shards/documents-000001.json: cannot be read (No such file")
    assert lines[3] == (
        f"{len(samples)} of {len(samples)} samples are good; 3 problems, 0 bad shards, 0 missing, "
        "2 bad lists"
    )
    assert "moves the bad lists of documents away" in lines[4]
    assert "from the texts without the teacher" in lines[4]
    status, out, _ = call("repair", tmp_path)
    assert status == 0
    assert f"moved to {tmp_path}/quarantine/documents-000000.json" in out
    assert "logits-" not in out
    assert "writes the missing lists of documents, and runs no teacher" in out
    with StoreReader.open(tmp_path) as reader:
        assert len(reader.read(range(len(samples)))) == len(samples)


def test_convert_makes_a_store_for_the_renormalised_support(tmp_path: Path, call: Call) -> None:
    file = write(tmp_path / "part.array_record", [example(sequence(n)) for n in range(3)])
    store = tmp_path / "store"
    words = ("convert", "--from", "maxtext", file, "--to", store, "--vocab-size", 1000)
    status, out, err = call(*words, "--teacher", "sha256:t", "--codec", "f16")
    assert (status, err) == (0, "")
    assert "3 samples, 33 tokens" in out
    assert "renormalized only, because the files lack log_tail" in out
    _, out, _ = call("inspect", store)
    assert "log_tail, log_sum_exp, entropy, label_log_prob" in out
    assert "maxtext" in out
    _, out, _ = call("stats", store)
    assert out.count("unknown") == 2
    status, _, err = call(*words)
    assert status == 1
    assert "(codec is 'f16' in the store, not 'u8'" in err


@pytest.mark.parametrize("command", ["inspect", "verify", "stats", "repair"])
def test_errors_are_one_line(tmp_path: Path, call: Call, command: str) -> None:
    status, out, err = call(command, tmp_path)
    assert (status, out) == (1, "")
    assert err == f"error: {tmp_path}: not a teacher store (no plan.json); correct the path\n"
