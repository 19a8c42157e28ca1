"""`megatron-distill` as a user calls it: its own ranks, signals, chats, and an installed wheel."""

from __future__ import annotations

import io
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import closing, redirect_stderr, redirect_stdout, suppress
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import save_file

from megatron_distill.commands.job import shipped_folder
from megatron_distill.data.tokenizers.open import train_bpe
from tests.distributed.pool import Pool
from tests.e2e.converting import convert
from tests.e2e.failing import call_alone, script
from tests.e2e.processes import PATIENCE, ROOT, wait_until
from tests.e2e.runs import course, environment, quick_and_slow, run, step_records
from tests.support.chat_fixtures import chat_tokenizer
from tests.support.terminals import PseudoTerminal

PROGRAM = (sys.executable, "-m", "megatron_distill.cli")
METRICS = "run2/metrics.jsonl"
SHORT = ("train.steps=2", "schedule.warmup_steps=1")


def call(words: Sequence[str], folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        list(words),
        cwd=folder,
        env=environment(**variables),
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )


def program(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return call([*PROGRAM, *words], folder)


@pytest.mark.slow
def test_its_own_ranks_have_the_losses_of_torchruns(pool: Pool, tmp_path: Path) -> None:
    trained = program(tmp_path, "train", "tiny.yaml", *SHORT, "--processes", "2")
    assert trained.returncode == 0, trained.stderr
    assert f"configuration: {shipped_folder()}/tiny.yaml, shipped with" in trained.stderr
    # As torchrun starts the script: tests/e2e/training.
    wanted = run(pool, 2, ROOT / "configs" / "tiny.yaml", tmp_path / "expected", *SHORT)
    found = step_records(tmp_path / "runs" / "tiny")
    assert [record["step"] for record in found] == [1, 2]
    assert course(found) == course(wanted)


# A bug and a killed rank: tests/e2e/faults/test_lone_failures.py.
ENDINGS = {
    "error": (1, "error: train.steps = 0: must be 1 or more\n"),
    "3": (3, "error: rank 1 failed with exit status 3, see above\n"),
    "141": (141, ""),  # the reader of its standard output left
}


@pytest.mark.parametrize("manner", quick_and_slow(ENDINGS, ("error",)))
def test_the_ranks_own_error_comes_last_with_their_status(manner: str) -> None:
    starter = (
        "import sys; from megatron_distill.runtime.torchrun import run_ranks\n"
        "sys.exit(run_ranks('tests.support.rank_endings', sys.argv[1:], processes=2))"
    )
    done = call([sys.executable, "-c", starter, manner], ROOT)
    status, text = ENDINGS[manner]
    assert done.returncode == status, done.stderr
    assert done.stderr.endswith(text)
    assert ("error: " in done.stderr) == (text != "")
    assert "ChildFailedError" not in done.stderr
    assert "Traceback" not in done.stderr


def ranks_below(pid: int) -> list[psutil.Process]:
    found = []
    for process in psutil.Process(pid).children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            if "RANK" in process.environ():
                found.append(process)
    return found


def catches_sigterm(process: psutil.Process) -> bool:
    """Whether a rank has come to where it handles signals itself."""
    with suppress(OSError):
        lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
        (caught,) = (line.split()[1] for line in lines if line.startswith("SigCgt:"))
        return bool(int(caught, 16) >> (signal.SIGTERM - 1) & 1)
    return False


def long_task(folder: Path) -> Path:
    """A task of many texts."""
    (folder / "rows.jsonl").write_text('{"q": "def f", "a": "x"}\n' * 20_000)
    task = folder / "long.yaml"
    task.write_text(
        "kind: generation\nquestion: '{{ q }}'\nanswer: a\ngraders: [exact]\nmax_new_tokens: 20\n"
        f"stops: [zz]\nfolder: {folder}\nfiles: [rows.jsonl]\n"
    )
    return task


@pytest.mark.slow
@pytest.mark.parametrize("command", ["train", "generate", "evaluate"])
def test_an_interruption_ends_every_rank(
    pool: Pool, dense: Path, tmp_path: Path, command: str
) -> None:
    if command != "train":
        run(pool, 1, dense, tmp_path / "run", *SHORT, "checkpoint.save=true")
    words = {
        "train": (str(dense), "output=run2", "train.steps=100000", "checkpoint.save=true"),
        "generate": ("run", "--tokens", "1000000"),
        "evaluate": ("run", "--tasks", str(long_task(tmp_path))),
    }[command]
    process = subprocess.Popen(
        [*PROGRAM, command, *words, "--processes", "2"],
        cwd=tmp_path,
        env=environment(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        if command == "train":
            wait_until((tmp_path / METRICS).exists, process)
        wait_until(lambda: len(ranks_below(process.pid)) >= 2, process)
        ranks = ranks_below(process.pid)
        if command == "evaluate":
            wait_until(lambda: all(map(catches_sigterm, ranks)), process)
        process.send_signal(signal.SIGINT)
        _, reported = process.communicate(timeout=PATIENCE)
    finally:
        process.kill()
        process.wait()
    _, alive = psutil.wait_procs(ranks, timeout=PATIENCE)  # what the system has yet to clear away
    assert not alive
    if command == "train":
        assert process.returncode == 0, reported
        last = step_records(tmp_path / "run2")[-1]["step"]
        assert f"stopped by a signal after step {last}\n" in reported
    else:
        assert process.returncode == 128 + signal.SIGINT
        assert reported.endswith("stopped\n")
        assert "Traceback" not in reported


@pytest.fixture(scope="module")
def chatting(pool: Pool, dense: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the run of a student whose tokenizer has a chat template."""
    folder = tmp_path_factory.mktemp("chatting")
    chat_tokenizer("qwen25").save(folder / "tokenizer")
    tokenizer = f"data.tokenizer.path={folder / 'tokenizer'}"
    # The last step has a learning rate of 0: random weights write different tokens.
    one_step = ("train.steps=1", "schedule.warmup_steps=0", "checkpoint.save=true")
    untied = ("student.architecture.tied_embeddings=false", "student.architecture.init_std=0.5")
    changes = (*one_step, *untied, "data.sequence_length=64", tokenizer)
    run(pool, 1, dense, folder / "run", *changes)
    return folder


GENERATE = ROOT / "launch" / "generate.py"


@pytest.mark.slow
def test_a_chat_is_the_one_that_transformers_holds(pool: Pool, chatting: Path) -> None:
    chat = ("--chat", "--prompt", "Is it sunny?", "--system", "Be brief.", "--temperature", "0")
    words = (*chat, "--tokens", "12")
    ours = program(chatting, "generate", "run", *words, "parallel.tensor=2", "--processes", "2")
    assert ours.returncode == 0, ours.stderr
    out = chatting / "out"
    (exported,) = convert(pool, "export", "--checkpoint", chatting / "run", "--hf", out, world=1)
    assert exported.status == 0, exported.stderr
    for by in ([], ["--transformers"]):
        other = call_alone(pool, GENERATE, "--hf", out, *by, *words)
        assert other.status == 0, other.stderr
        assert ours.stdout == other.stdout
    assert len(set(ours.stdout)) > 6, ours.stdout
    assert "Is it sunny?" not in ours.stdout
    assert "evaluate run\n" in ours.stderr
    assert "convert export --checkpoint run --hf DIR\n" in ours.stderr


def test_a_checkpoint_with_a_named_tokenizer_writes_the_text_of_its_run(
    pool: Pool, chatting: Path
) -> None:
    words = ("--prompt", "Is it", "--tokens", "12", "--temperature", "0")
    expected = call_alone(pool, GENERATE, chatting / "run", *words)
    weights = ("--checkpoint", chatting / "run" / "checkpoints")
    named = shutil.copytree(chatting / "tokenizer", chatting / "elsewhere")
    found = call_alone(pool, GENERATE, *weights, "--tokenizer", named, *words)
    assert found.status == 0, found.stderr
    assert found.stdout == expected.stdout
    assert len(set(found.stdout)) > len(set("Is it"))
    assert f"{weights[1]}: 12 tokens, greedy" in found.stderr

    train_bpe(["a"], vocab_size=260).save(chatting / "other")
    found = call_alone(pool, GENERATE, *weights, "--tokenizer", chatting / "other", *words)
    assert found.status == 1
    assert "was trained with another tokenizer" in found.stderr


CYCLE = "a\u00e9b\u6f22\n"  # characters of one, two and three bytes, none of them twice


@pytest.fixture(scope="module")
def writes_a_cycle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face folder whose model follows each byte of `CYCLE` by the next one."""
    folder = tmp_path_factory.mktemp("cycle")
    tokenizer = train_bpe(["a"], vocab_size=260)  # of single bytes
    tokenizer.save(folder)
    ids = [int(one) for one in tokenizer.encode_batch([CYCLE])[0]]
    assert len(set(ids)) == len(CYCLE.encode())
    size, heads = {"vocab_size": 260, "hidden_size": 260}, {"num_attention_heads": 2}
    shape = {"model_type": "llama", "num_hidden_layers": 1, "intermediate_size": 8}
    others = {"max_position_embeddings": 64, "tie_word_embeddings": False}
    config = size | heads | shape | others
    (folder / "config.json").write_text(json.dumps(config))
    head = torch.zeros(260, 260)
    head[ids[1:] + ids[:1], ids] = 1.0
    weights = {"lm_head": head, "model.embed_tokens": torch.eye(260), "model.norm": torch.ones(260)}
    layer = {"self_attn": "qkvo", "mlp": ("gate", "up", "down")}
    for part, names in layer.items():  # layers that add nothing
        for name in names:
            rows, columns = (260, 260) if part == "self_attn" else (8, 260)
            zeros = torch.zeros((columns, rows) if name == "down" else (rows, columns))
            weights[f"model.layers.0.{part}.{name}_proj"] = zeros
    for name in ("input", "post_attention"):
        weights[f"model.layers.0.{name}_layernorm"] = torch.ones(260)
    save_file({f"{k}.weight": v for k, v in weights.items()}, folder / "model.safetensors")
    return folder


def _shown(rank: int, world: int, words: list[str]) -> tuple[int, list[bytes], str]:
    """Return the exit status, what a terminal received at each flush, and standard error."""
    error = io.StringIO()
    with closing(PseudoTerminal()) as screen, redirect_stderr(error), redirect_stdout(screen):
        assert screen.isatty()
        status = script(GENERATE).main(words)
        return status, screen.shown, error.getvalue()


def test_a_terminal_shows_each_character_when_it_is_whole(pool: Pool, writes_a_cycle: Path) -> None:
    options = ["--prompt", "a", "--tokens", "16", "--temperature", "0"]
    words = ["--hf", str(writes_a_cycle), *options]
    ((status, shown, error),) = pool.run(1, _shown, words)
    assert status == 0, error
    # Sixteen ids are the eight bytes twice, and the prompt is the first of them.
    assert [piece.decode() for piece in shown] == [*CYCLE, *CYCLE, "a", "\n"]
    assert call_alone(pool, GENERATE, *words).stdout == 2 * CYCLE + "a\n"

    # A stop string that may begin is held back, and not shown where it is one.
    words += ["--stop", "b\u6f22"]
    ((status, shown, error),) = pool.run(1, _shown, words)
    assert status == 0, error
    assert b"".join(shown).decode() == "a\u00e9\n"


@pytest.mark.parametrize("by", [[], ["--transformers"]], ids=["ours", "transformers"])
def test_weights_that_are_cut_are_named(
    pool: Pool, writes_a_cycle: Path, tmp_path: Path, by: list[str]
) -> None:
    damaged = shutil.copytree(writes_a_cycle, tmp_path / "damaged")
    weights = damaged / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    done = call_alone(pool, GENERATE, "--hf", damaged, *by, "--tokens", "1")
    assert done.status == 1
    assert done.stderr.splitlines()[-1].startswith("error: ")
    assert str(damaged) in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr


def _cut_pickle(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(b"\x80\x02" + bytes(100))


def _wrong_type(folder: Path) -> None:
    (folder / "config.json").write_text('{"model_type": "llama", "hidden_size": "x"}')


@pytest.mark.parametrize("damage", [_cut_pickle, _wrong_type])
def test_a_folder_that_transformers_cannot_load_is_one_line(
    pool: Pool, writes_a_cycle: Path, tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    damaged = shutil.copytree(writes_a_cycle, tmp_path / "damaged")
    damage(damaged)
    done = call_alone(pool, GENERATE, "--hf", damaged, "--transformers", "--tokens", "1")
    assert done.status == 1
    last = done.stderr.splitlines()[-1]
    assert last.startswith(f"error: {damaged}: transformers cannot load it (")
    assert last.endswith("; download or export it again")


@pytest.mark.parametrize("seed", [-(2**63), 2**64 - 1])
def test_seeds_of_64_bits_are_taken(pool: Pool, writes_a_cycle: Path, seed: int) -> None:
    words = ("--hf", writes_a_cycle, "--prompt", "a", "--tokens", "2", "--seed", seed)
    for by in ([], ["--transformers"]):
        done = call_alone(pool, GENERATE, *words, *by)
        assert done.status == 0, done.stderr
        assert f"seed {seed}, in " in done.stderr


def test_a_chat_without_a_template_names_the_tokenizer(pool: Pool, chatting: Path) -> None:
    bare = chatting / "bare"
    shutil.copytree(chatting / "tokenizer", bare)
    (bare / "chat_template.jinja").unlink()
    words = ("--chat", f"data.tokenizer.path={bare}")
    done = call_alone(pool, GENERATE, chatting / "run", *words)
    assert done.status == 1
    assert done.stderr.splitlines()[-1] == (
        f"error: --chat: the tokenizer {bare} has no chat template; add a chat_template.jinja to "
        "its folder, or leave --chat out"
    )


def test_a_chat_that_the_model_cannot_see_whole_is_refused(pool: Pool, chatting: Path) -> None:
    words = ("--chat", "--prompt", "sunny " * 70)
    done = call_alone(pool, GENERATE, chatting / "run", *words)
    assert done.status == 1
    last = done.stderr.splitlines()[-1]
    assert last.endswith("the model has 64 positions: none is left; shorten --prompt or --system")


@pytest.mark.slow
def test_an_evaluation_proposes_the_next_commands(chatting: Path) -> None:
    held_out = ("validation.samples=4", "--json", "figures.json")
    done = program(chatting, "evaluate", "run", *held_out)
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""
    assert json.loads((chatting / "figures.json").read_text())["ce_loss"] > 0
    assert "run: evaluated on 4 held-out sequences of 64 tokens in " in done.stderr
    assert done.stderr.splitlines()[-2:] == [
        "text from it: megatron-distill generate run",
        "a Hugging Face folder of it: megatron-distill convert export --checkpoint run --hf DIR",
    ]


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of this tree, unpacked; pip fetches the build backend."""
    folder = tmp_path_factory.mktemp("wheel")
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    built = call([*pip, "wheel", "--no-deps", "-w", str(folder), str(ROOT)], folder)
    if "No matching distribution found for hatchling" in built.stderr:
        pytest.skip("the build backend, hatchling, cannot be fetched")
    assert built.returncode == 0, built.stderr
    (wheel,) = folder.glob("*.whl")
    done = call(
        [*pip, "install", "--no-deps", "--target", str(folder / "site"), str(wheel)], folder
    )
    assert done.returncode == 0, done.stderr
    return folder / "site"


@pytest.mark.slow
def test_the_wheel_trains_a_shipped_configuration_outside_of_the_repository(
    installed: Path, tmp_path: Path
) -> None:
    shipped = installed / "megatron_distill" / "configs"
    files = {path.name: path.read_bytes() for path in (ROOT / "configs").glob("*.yaml")}
    assert {path.name: path.read_bytes() for path in shipped.iterdir()} == files
    capture = next(name for name, text in sorted(files.items()) if b"\nstore:" in text)
    words = [*PROGRAM, "capture", f"configs/{capture}", "--print-config"]
    printed = call(words, tmp_path, PYTHONPATH=str(installed))
    assert printed.returncode == 0, printed.stderr
    assert f"configuration: {shipped / capture}, shipped with" in printed.stderr
    words = [*PROGRAM, "train", "tiny.yaml", *SHORT, f"output={tmp_path}", "--processes", "2"]
    done = call(words, tmp_path, PYTHONPATH=str(installed))
    assert done.returncode == 0, done.stderr
    assert f"configuration: {shipped / 'tiny.yaml'}, shipped with" in done.stderr
    assert [record["step"] for record in step_records(tmp_path)] == [1, 2]
    script = call(
        [str(installed / "bin" / "megatron-distill"), "--version"],
        tmp_path,
        PYTHONPATH=os.pathsep.join([str(installed)]),
    )
    assert script.stdout == "megatron-distill 0.1.0\n"
