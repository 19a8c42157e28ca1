"""Records of a capture against whole float64 logits of its teacher, in every layout."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from megatron_distill.config import load_capture_config
from megatron_distill.runtime.mcore_patches import prepare_megatron_core
from megatron_distill.store import SampleRecord, StoreReader, verify
from tests.distributed.hugging_face_models import save_model
from tests.distributed.pool import Pool
from tests.e2e.captures import SAMPLES, run_in, write_capture
from tests.e2e.runs import CPU, Inputs, configure, layout, quick_and_slow
from tests.support.store_samples import contents

K = 12
TEMPERATURES = (0.5, 2.0)
MOE = "teacher.architecture.moe={num_experts: 4, top_k: 2, ffn_hidden_size: 24}"
CLOSE = {"rtol": 1e-5, "atol": 1e-5}
LAYOUTS = (
    "one rank", "TP2+sequence", "PP2", "CP2", "DP2", "DP2, sharded weights", "TP2xPP2",
    "TP4",
)  # fmt: skip


@pytest.fixture(scope="module")
def config(inputs: Inputs) -> Path:
    return write_capture(inputs, "capture")


def samples_of(store: Path) -> list[SampleRecord]:
    """Every record of a store that is sound."""
    assert not verify(store).problems
    reader = StoreReader.open(store)
    return reader.read(range(reader.samples))


def whole_logits(
    rank: int, world: int, path: Path, overrides: list[str], tokens: np.ndarray, docs: np.ndarray
) -> np.ndarray:
    """The teacher's logits [n, S, G] of real columns, head and softmax in float64, on one rank."""
    config = configure(rank, path, overrides, world, load_capture_config)
    from megatron_distill.data.collation import micro_batch, pack_samples
    from megatron_distill.data.samples import FULLY_TRAINED, Sample
    from megatron_distill.models.execution import Execution
    from megatron_distill.models.gpt import vocab_shard
    from megatron_distill.train.assemble.models import job_groups, resolve_model, teacher_seed
    from megatron_distill.train.assemble.sources import data_options, open_tokenizer
    from megatron_distill.train.teachers.live import OnlineTeacher

    options = data_options(config.data, Path(config.folder))
    with job_groups(config.parallel, config.runtime, seed=config.seed, trains=False) as groups:
        _, vocabulary = open_tokenizer(config, options)
        source = resolve_model(config, "teacher", vocabulary)
        teacher = OnlineTeacher.of_source(
            source,
            Execution(torch.float32, CPU.torch_device),
            seed=teacher_seed(config.seed),
            sequence_length=config.data.sequence_length,
            shard=vocab_shard(source.architecture, groups, tokens=vocabulary.size),
            groups=groups,
        )
        flags = np.full(tokens.shape, FULLY_TRAINED, np.uint8)
        samples = [
            Sample(*row) for row in zip(tokens, docs, flags, range(len(tokens)), strict=True)
        ]
        batch = pack_samples(samples)
        whole = micro_batch(batch, slice(None), isolate_documents=True).with_trained_rows()
        (signal,) = teacher.signals([whole])
        assert signal is not None
        state = signal.logit_source()
        logits = state.hidden.double() @ state.weight[: vocabulary.size].double().t()
        return logits.view(len(tokens), -1, vocabulary.size).numpy()


def assert_equals_the_logits(record: SampleRecord, logits: np.ndarray) -> None:
    """One record against float64 logits [S, G]."""
    entries, scalars = record.entries, record.scalars
    assert scalars is not None
    sums = np.logaddexp.reduce(logits, axis=1)
    dense = logits - sums[:, None]
    order = np.lexsort((np.broadcast_to(np.arange(dense.shape[1]), dense.shape), -dense))
    ranked = np.take_along_axis(dense, order, 1)
    np.testing.assert_allclose(entries.log_probs_SK, ranked[:, :K], **CLOSE)
    # Two logits that are nearer than their rounding may change places.
    clear = (np.diff(ranked[:, : K + 1], axis=1) < -1e-5).all(1)
    assert clear.mean() > 0.9
    np.testing.assert_array_equal(entries.ids_SK[clear], order[clear, :K])
    of_ids = np.take_along_axis(dense, entries.ids_SK.astype(np.int64), 1)
    np.testing.assert_allclose(entries.log_probs_SK, of_ids, **CLOSE)
    tail = np.logaddexp.reduce(ranked[:, K:], axis=1)
    np.testing.assert_allclose(entries.log_tail_S, tail, **CLOSE)
    np.testing.assert_allclose(scalars.log_sum_exp_S, sums, **CLOSE)
    np.testing.assert_allclose(scalars.entropy_S, -(np.exp(dense) * dense).sum(1), **CLOSE)
    label = np.take_along_axis(dense, record.tokens_S1[1:, None].astype(np.int64), 1)[:, 0]
    np.testing.assert_allclose(scalars.label_log_prob_S, label, **CLOSE)
    for row, temperature in enumerate(TEMPERATURES):
        assert entries.log_sum_exp_TS is not None
        assert entries.log_tail_TS is not None
        whole = np.logaddexp.reduce(logits / temperature, axis=1)
        np.testing.assert_allclose(entries.log_sum_exp_TS[row], whole, **CLOSE)
        others = np.take_along_axis(logits, order[:, K:], 1) / temperature
        tail = np.logaddexp.reduce(others, axis=1) - whole
        np.testing.assert_allclose(entries.log_tail_TS[row], tail, **CLOSE)


@pytest.fixture(scope="module")
def reference(pool: Pool, config: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The store of one rank, whose records are those of the logits."""
    store = tmp_path_factory.mktemp("capture") / "one"
    assert run_in(pool, 1, config, store) is True
    return store


def logits_of(pool: Pool, config: Path, records: list[SampleRecord], *overrides: str) -> np.ndarray:
    tokens = np.stack([record.tokens_S1 for record in records])
    documents = np.stack([record.document_ids_S1 for record in records])
    arguments = (config, list(overrides), tokens, documents)
    found: np.ndarray = pool.run(1, whole_logits, *arguments)[0]
    return found


@pytest.mark.parametrize("name", quick_and_slow(LAYOUTS, ["TP2xPP2"]))
def test_every_layout_writes_the_values_of_the_whole_logits(
    pool: Pool, config: Path, reference: Path, tmp_path: Path, name: str
) -> None:
    world, overrides = layout(name)
    own = ("teacher.shard_weights=true",) if "sharded" in name else ()
    assert run_in(pool, world, config, tmp_path / "store", *overrides, *own) is True
    records, expected = samples_of(tmp_path / "store"), samples_of(reference)
    assert [record.sample_id for record in records] == list(range(SAMPLES))
    logits = logits_of(pool, config, expected)
    for record, one, of_sample in zip(records, expected, logits, strict=True):
        for field in ("tokens_S1", "document_ids_S1", "flags_S1"):
            np.testing.assert_array_equal(getattr(record, field), getattr(one, field))
        assert_equals_the_logits(record, of_sample)


@pytest.fixture(scope="module")
def singly(pool: Pool, config: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The store of one rank with micro-batches of one sample."""
    store = tmp_path_factory.mktemp("capture") / "singly"
    assert run_in(pool, 1, config, store, "capture.micro_batch_size=1") is True
    return store


@pytest.mark.parametrize(
    "overrides",
    [
        pytest.param((2, ()), id="two replicas"),
        pytest.param((4, ()), id="four replicas", marks=pytest.mark.slow),
        pytest.param((1, ("capture.micro_batches=3",)), id="other steps", marks=pytest.mark.slow),
        pytest.param((2, ("parallel.pipeline=2",)), id="two stages"),
    ],
)
def test_where_the_numbers_are_equal_so_are_the_files(
    pool: Pool,
    config: Path,
    singly: Path,
    reference: Path,
    tmp_path: Path,
    overrides: tuple[int, tuple[str, ...]],
) -> None:
    world, changes = overrides
    other = tmp_path / "other"
    assert run_in(pool, world, config, other, *changes, "capture.micro_batch_size=1") is True
    assert contents(other) == contents(singly)
    assert contents(other).keys() == contents(reference).keys()


def test_experts_exchange_over_replicas_of_which_one_has_nothing_left(
    pool: Pool, config: Path, tmp_path: Path
) -> None:
    store = tmp_path / "store"
    overrides = (MOE, "store.samples=13", "parallel.expert=2")
    assert run_in(pool, 2, config, store, *overrides) is True
    records = samples_of(store)
    for record, logits in zip(records, logits_of(pool, config, records, MOE), strict=True):
        assert_equals_the_logits(record, logits)


def test_a_cut_at_a_mass_keeps_the_shortest_head(
    pool: Pool, config: Path, reference: Path, tmp_path: Path
) -> None:
    assert run_in(pool, 2, config, tmp_path / "store", "store.top_p=0.3") is True
    for record, whole in zip(samples_of(tmp_path / "store"), samples_of(reference), strict=True):
        entries = record.entries
        assert entries.n_kept_S is not None
        kept = np.arange(K) < entries.n_kept_S[:, None]
        np.testing.assert_array_equal(entries.ids_SK[kept], whole.entries.ids_SK[kept])
        mass = np.exp(entries.log_probs_SK).sum(1)
        assert ((mass > 0.3 - 1e-5) | (entries.n_kept_S == K)).all()


@pytest.mark.slow
def test_draws_are_the_same_for_every_split(pool: Pool, config: Path, tmp_path: Path) -> None:
    changes = ("store.mode=sampled", "store.temperatures=[]", "store.k=40")
    stores = []
    for name in ("one rank", "TP2", "CP2", "PP2", "DP2"):
        world, overrides = layout(name)
        stores.append(tmp_path / name)
        assert run_in(pool, world, config, stores[-1], *overrides, *changes) is True
    first, *others = (samples_of(store) for store in stores)
    for records in others:
        differing = 0
        for record, one in zip(records, first, strict=True):
            differing += int((record.entries.ids_SM != one.entries.ids_SM).any(1).sum())
        # A number that falls within a rounding of an edge may go to the neighbour.
        assert differing <= 1


def write_hugging_face(rank: int, world: int, folder: Path, tokenizer: Path) -> None:
    """A small Llama of the session's tokenizer in a folder, and the checkpoint imported from it."""
    prepare_megatron_core(on_cuda=False)
    save_model(folder / "Llama-0B", "llama2", vocab_size=304)
    for path in tokenizer.iterdir():
        shutil.copy(path, folder / "Llama-0B")
    from megatron_distill.train.convert.convert import import_checkpoint

    import_checkpoint(folder / "Llama-0B", folder / "imported", dtype=None, overwrite=False)


@pytest.mark.slow
def test_a_hugging_face_teacher_and_its_checkpoint_are_one(
    pool: Pool, inputs: Inputs, config: Path, tmp_path: Path
) -> None:
    pool.run(1, write_hugging_face, tmp_path, inputs.tokenizer)
    models = {"hf": tmp_path / "Llama-0B", "checkpoint": tmp_path / "imported"}
    overrides = ["teacher.architecture=null", "store.samples=6"]
    stores = []
    for kind, folder in models.items():
        # The checkpoint's assets are no tokenizer of the configuration's; the folder's own is.
        where = "null" if kind == "hf" else inputs.tokenizer
        given = [*overrides, f"teacher.{kind}={folder}", f"data.tokenizer.path={where}"]
        stores.append(tmp_path / f"store_{kind}")
        assert run_in(pool, 2, config, stores[-1], *given) is True
    one, other = (StoreReader.open(store) for store in stores)
    for name in ("teacher", "tokenizer", "dataset"):
        assert getattr(one.identity, name) == getattr(other.identity, name)
    assert one.identity.settings["teacher"] == "Llama-0B"
    assert other.identity.settings["teacher"] == "imported"
    assert one.settings.vocab_size == 301, "the tokenizer's ids, not the rows of the model"
    kept = (stores[0] / "tokenizer" / "tokenizer.json").read_bytes()
    assert kept == (inputs.tokenizer / "tokenizer.json").read_bytes()
    for record, same in zip(samples_of(stores[0]), samples_of(stores[1]), strict=True):
        np.testing.assert_array_equal(record.entries.log_probs_SK, same.entries.log_probs_SK)
    # In another precision it is another store, near to this one.
    given = [*overrides, f"teacher.hf={models['hf']}", "data.tokenizer.path=null"]
    narrow = tmp_path / "narrow"
    assert run_in(pool, 2, config, narrow, *given, "capture.precision=bf16") is True
    for record, same in zip(samples_of(narrow), samples_of(stores[0]), strict=True):
        assert record.scalars is not None
        assert same.scalars is not None
        apart = np.abs(record.scalars.entropy_S - same.scalars.entropy_S)
        assert 0 < apart.max() < 0.2
