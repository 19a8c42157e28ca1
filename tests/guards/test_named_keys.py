"""Every key and every option that a message names exists."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

import pytest
from torch.distributed.run import get_args_parser

from megatron_distill.config import CaptureConfig, RunConfig
from megatron_distill.config.messages import dotted_names
from megatron_distill.train.capture.folder import KEYS, WORDS, configured
from tests.guards.source_tree import ROOT, read_sources
from tests.guards.test_torchrun_options import script_options

NAMES = {name for kind in (RunConfig, CaptureConfig) for name in dotted_names(kind)}
SECTIONS = {name.partition(".")[0] for name in NAMES if "." in name}
ANY_ENTRY = {re.sub(r"\.0(?=\.|$)", "", name) for name in NAMES}
# A section's name, a dot and more, not within a longer name, a path or a file.
KEY = re.compile(rf"(?<![\w./=-])(?:{'|'.join(sorted(SECTIONS))})(?:\.(?:[a-z][a-z0-9_]*|\d+))+")
OPTION = re.compile(r"(?<![\w-])--[a-z][a-z0-9_-]+")
# A figure of the log and a name within a checkpoint, which look like keys.
NOT_KEYS = {"validation.ce_loss", "optimizer.state"}
# Names of a store's own fields, which are no keys, and the file that translates them.
STORE_NAMES = {*KEYS, *WORDS}
TRANSLATION = "capture/folder.py"
FILE_ENDS = (".py", ".json", ".jsonl", ".yaml", ".md")
# Of Slurm's programs and its plugin pyxis.
SLURM_OPTIONS = {
    "--chdir", "--container-image", "--container-workdir", "--exclude", "--export", "--jobs",
    "--kill-on-bad-exit", "--no-container-mount-home", "--nodelist", "--noheader", "--ntasks",
    "--ntasks-per-node", "--oneliner", "--open-mode", "--parsable", "--partition", "--requeue",
    "--reservation", "--signal", "--states", "--user", "--wait",
}  # fmt: skip
# Of other programs: Megatron-LM's preprocessing, wandb, pip, nvidia-smi, hf.
FOREIGN_OPTIONS = {"--append-eod", "--append", "--help", "--list-gpus", "--query-gpu"}
FOREIGN_OPTIONS |= {"--local-dir", "--exclusive", "--id"}
FOREIGN_OPTIONS |= SLURM_OPTIONS


def message_texts(folders: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    """Place and text of every string, docstrings of functions aside; parts of one as a whole."""
    for source in read_sources(ROOT, folders):
        inner: set[int] = set()
        for node in source.nodes:
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
                inner.add(id(node.value))
            if isinstance(node, ast.JoinedStr):
                inner |= {id(part) for part in ast.walk(node) if part is not node}
                parts = (
                    str(part.value) if isinstance(part, ast.Constant) else "0"
                    for part in node.values
                )
                yield f"{source.place}:{node.lineno}", "".join(parts)
        for node in source.nodes:
            if isinstance(node, ast.Constant) and id(node) not in inner:
                yield f"{source.place}:{node.lineno}", str(node.value)


def test_every_key_that_a_message_names_is_in_the_schema() -> None:
    wrong, seen = [], 0
    for where, text in message_texts(("megatron_distill", "launch", "tools")):
        for found in KEY.findall(text):
            if found in NOT_KEYS or found.endswith(FILE_ENDS):
                continue
            if found in STORE_NAMES and TRANSLATION in where:
                continue
            seen += 1
            if re.sub(r"\.\d+(?=\.|$)", "", found) not in ANY_ENTRY:
                wrong.append(f"{where}: {found}")
    assert seen > 150, "the messages name keys"
    assert not wrong, "\n".join(wrong)


@pytest.mark.slow
def test_every_option_that_a_message_names_is_one() -> None:
    known = FOREIGN_OPTIONS | {option for _, option in script_options()}
    known |= {o for action in get_args_parser()._actions for o in action.option_strings}
    wrong = [
        f"{where}: {option}"
        for where, text in message_texts(("megatron_distill", "launch", "tools"))
        for option in OPTION.findall(text)
        if option not in known
    ]
    assert not wrong, "\n".join(wrong)


def test_no_message_of_the_package_names_an_option_that_only_some_scripts_have() -> None:
    """`--config` is an option of two scripts, and the loader is called by four."""
    wrong = [
        where
        for where, text in message_texts(("megatron_distill",))
        if where.startswith(("megatron_distill/config", "megatron_distill/data"))
        and "--config" in text
    ]
    assert not wrong, wrong


def test_names_in_a_store_s_message_are_a_key_of_a_capture() -> None:
    keys = set(dotted_names(CaptureConfig))
    assert [name for name in KEYS if configured(name) not in keys] == []


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("seed", "seed"),
        ("sequence_length", "data.sequence_length"),
        ("shuffle_buffer", "data.shuffle_buffer"),
        ("isolate_documents", "data.isolate_documents"),
        ("sources.0.share", "data.sources.0.weight"),
        ("sources.0.files", "data.sources.0.paths"),
        ("sources.0.text_key", "data.sources.0.text_key"),
        ("sources.0.conversation.prompt_keys", "data.sources.0.conversation.prompt_key"),
        ("sources.0.conversation.chat_template", "data.sources.0.conversation.chat_template"),
    ],
)
def test_names_of_data_in_a_store_s_message_are_a_key(name: str, key: str) -> None:
    assert configured(f"identity.settings.dataset.{name}") == key
    assert key in NAMES
