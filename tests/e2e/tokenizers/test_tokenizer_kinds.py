"""A SentencePiece model and tiktoken ranks through every script that a run's tokenizer meets."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import pytest

from megatron_distill.data.tokenizers.open import (
    holds_tokenizer,
    is_hugging_face,
    load_tokenizer,
    require_same_ids,
)
from megatron_distill.data.tokenizers.sentencepiece_model import SentencePieceTokenizer
from megatron_distill.data.tokenizers.tiktoken_encodings import written_ranks
from tests.distributed.pool import Pool
from tests.e2e.captures import run_in, write_capture
from tests.e2e.failing import SCRIPT, call, call_alone, call_script, message
from tests.e2e.processes import ROOT
from tests.e2e.runs import SECONDS, Inputs, course, quick_and_slow, step_records
from tests.support.tokenizer_kinds import byte_level, ranks_of, sentencepiece_model, write_tiktoken

KINDS = ("sentencepiece", "tiktoken")
RULES = {"pattern": "gpt2", "special_tokens": {"<|endoftext|>": 425, "<|begin|>": 426},
         "bos": "<|begin|>"}  # fmt: skip
STEPS = 3
SHORT = (f"train.steps={STEPS}", "schedule.warmup_steps=1", "validation.samples=8")
TERM = "objective.terms=[{divergence: forward_kl, top_k: 12}]"
PROMPT = "def parse(self, text): # \u00e9\u6f22"


@dataclass(frozen=True)
class Trained:
    """A tokenizer's file and the run that was trained with it."""

    tokenizer: Path
    run: Path


def tokenizer_file(kind: str, folder: Path) -> Path:
    if kind == "tiktoken":
        return write_tiktoken(folder / "own.tiktoken", written_ranks(ranks_of(byte_level())), RULES)
    path = folder / "own.model"
    path.write_bytes(sentencepiece_model("bpe"))
    return path


@pytest.fixture(
    scope="module", params=["sentencepiece", pytest.param("tiktoken", marks=pytest.mark.slow)]
)
def trained(
    request: pytest.FixtureRequest, pool: Pool, dense: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Trained:  # fmt: skip
    """Two steps, stopped, and the third after a new start, by the entry script on two ranks."""
    folder = tmp_path_factory.mktemp(request.param)
    found = Trained(tokenizer_file(request.param, folder), folder / "run")
    for steps in (STEPS - 1, STEPS):
        endings = call(
            *(pool, dense, found.run, *SHORT, f"train.steps={steps}"),
            *("parallel.tensor=2", "checkpoint.save=true", f"schedule.decay_steps={STEPS}"),
            f"data.tokenizer.path={found.tokenizer}",
        )
        assert [ending.status for ending in endings] == [0, 0], endings[0].stderr
    return found


def written(pool: Pool, path: Path, *words: object) -> tuple[str, str]:
    found = call_alone(pool, path, *words)
    assert found.status == 0, found
    return found.stdout, found.stderr


def test_a_run_is_trained_continued_and_keeps_its_tokenizer(trained: Trained) -> None:
    tokenizer = load_tokenizer(trained.tokenizer)
    assert [record["step"] for record in step_records(trained.run)] == [1, 2, 3]
    (newest,) = (trained.run / "checkpoints").glob("step_*3")
    description = json.loads(next(newest.glob("*.json")).read_text())
    assert description["tokenizer"] == tokenizer.identity
    assert description["architecture"]["vocab_size"] == tokenizer.vocab_size
    kept = load_tokenizer(trained.run / "hugging_face")
    assert (type(kept), kept.identity) == (type(tokenizer), tokenizer.identity)
    special = json.loads((trained.run / "hugging_face" / "config.json").read_text())
    assert special == {
        "bos_token_id": tokenizer.bos_id,
        "eos_token_id": tokenizer.eos_id,
        "pad_token_id": None,
    }


def test_text_is_written_by_the_run_and_by_its_saved_tokenizer(
    pool: Pool, trained: Trained
) -> None:
    words = ("--run", trained.run, "--prompt", PROMPT, "--tokens", 6, "--seed", 3)
    generate = ROOT / "launch" / "generate.py"
    text, _ = written(pool, generate, *words)
    assert text.startswith(PROMPT)
    assert len(text) > len(PROMPT) + 1
    kept = f"data.tokenizer.path={trained.run / 'hugging_face'}"
    assert written(pool, generate, *words, kept)[0] == text


def test_an_export_warns_that_transformers_finds_no_tokenizer(
    pool: Pool, inputs: Inputs, trained: Trained, tmp_path: Path
) -> None:
    tool, out = ROOT / "tools" / "convert_checkpoint.py", tmp_path / "out"
    _, reported = written(pool, tool, *("export", "--checkpoint", trained.run, "--hf", out))
    assert "the run's tokenizer is not a Hugging Face tokenizer" in reported
    assert holds_tokenizer(out)
    assert not is_hugging_face(out)
    assert not any((out / name).exists() for name in ("tokenizer.model", "tokenizer_config.json"))
    expected = load_tokenizer(trained.tokenizer).identity
    assert load_tokenizer(out).identity == expected
    text, _ = written(
        pool, ROOT / "launch" / "generate.py", "--hf", out, "--prompt", PROMPT, "--tokens", 4
    )
    assert text.startswith(PROMPT)
    # A model imported again has it, too; a tokenizer of transformers takes its place if wished.
    back, other = tmp_path / "back", tmp_path / "other"
    written(pool, tool, "import", "--hf", out, "--output", back)
    assert load_tokenizer(back / "hugging_face").identity == expected
    words = ("export", "--checkpoint", back, "--hf", other, "--tokenizer", inputs.tokenizer)
    _, reported = written(pool, tool, *words)
    assert "not a Hugging Face tokenizer" not in reported
    assert is_hugging_face(other)


@pytest.mark.parametrize("kind", quick_and_slow(KINDS, ("tiktoken",)))
def test_a_store_brings_the_tokenizer_along(
    pool: Pool, inputs: Inputs, tmp_path: Path, kind: str
) -> None:
    path = tokenizer_file(kind, tmp_path)
    config = write_capture(inputs, f"of_{kind}", samples=16, per_shard=8)
    store = tmp_path / "store"
    assert run_in(pool, 1, config, store, f"data.tokenizer.path={path}") is True
    kept = load_tokenizer(store / "tokenizer")
    assert kept.identity == load_tokenizer(path).identity
    offline = (
        *(pool, inputs.folder / "dense.yaml"),
        *("teacher.architecture=null", f"teacher.store={store}", "train.steps=2"),
        *("schedule.warmup_steps=1", "checkpoint.save=true", TERM),
    )
    for name, tokenizer in (("brought", "null"), ("given", str(path))):
        endings = call(*offline[:2], tmp_path / name, *offline[2:],
                       f"data.tokenizer.path={tokenizer}", world=1)  # fmt: skip
        assert endings[0].status == 0, endings[0].stderr
    found = [course(step_records(tmp_path / name)) for name in ("brought", "given")]
    assert found[0] == found[1]
    # The run that took the store's tokenizer finds it in its own folder.
    text, _ = written(
        pool, ROOT / "launch" / "generate.py", "--run", tmp_path / "brought", "--tokens", 2
    )
    assert text.startswith("def ")


def test_an_encoding_that_was_not_fetched_is_an_error_on_all_ranks(
    pool: Pool, dense: Path, tmp_path: Path
) -> None:
    arguments = [
        *("--config", str(dense), f"output={tmp_path / 'run'}", *SHORT),
        *("data.tokenizer.path=null", "data.tokenizer.encoding=o200k_base"),
    ]
    cache = {"TIKTOKEN_CACHE_DIR": str(tmp_path / "cache")}
    text = message(pool.run(2, call_script, SCRIPT, arguments, None, cache, timeout=SECONDS))
    assert "data.tokenizer.encoding = 'o200k_base': its rank file" in text
    assert f"is expected at {tmp_path / 'cache'}" in text
    assert "it is not downloaded at run time" in text


def test_a_model_of_one_vocabulary_goes_with_either_kind_of_its_tokenizer(
    tmp_path: Path,
) -> None:
    from megatron_distill.errors import ConfigError

    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "tokenizer.model").write_bytes(sentencepiece_model("bpe"))
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "LlamaTokenizer"}')
    model = load_tokenizer(folder / "tokenizer.model")
    require_same_ids(model, str(folder), named="student.hf")
    other = SentencePieceTokenizer(sentencepiece_model("suffix"), name="other")
    with pytest.raises(ConfigError, match="use one tokenizer for data and models"):
        require_same_ids(other, str(folder), named="student.hf")
