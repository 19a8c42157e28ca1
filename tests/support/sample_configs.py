"""The smallest configurations, shared by the tests of the configuration."""

from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from megatron_distill.config import RunConfig, load_config
from megatron_distill.errors import ConfigError

ARCHITECTURE = {
    "num_layers": 4,
    "hidden_size": 64,
    "ffn_hidden_size": 128,
    "num_attention_heads": 4,
    "num_kv_heads": 2,
}
MINIMAL = {
    "student": {"architecture": ARCHITECTURE},
    "data": {
        "sources": [{"format": "python_stdlib"}],
        "tokenizer": {"train_vocab_size": 512},
        "sequence_length": 64,
    },
    "train": {"steps": 3, "global_batch_size": 4},
}
TAUGHT = MINIMAL | {"teacher": {"architecture": ARCHITECTURE}}
EXPERTS = "student.architecture.moe={num_experts: 4, top_k: 2}"


def load_tree(folder: Path, tree: dict, *overrides: str) -> RunConfig:
    """Write a tree to folder/run.yaml and load it."""
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(tree), encoding="utf-8")
    return load_config(path, overrides)


def complaints(call: Callable[..., object], *arguments: object) -> list[str]:
    """Call a function that must raise a ConfigError, and return the listed problems."""
    with pytest.raises(ConfigError) as caught:
        call(*arguments)
    head, *problems = str(caught.value).split("\n  - ")
    count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
    assert head.endswith(f": {count}")
    return problems


def read_table(text: str) -> list[tuple[list[str], list[str]]]:
    """The cases of a table: overrides, a line each, and below them the lines that they bring.

    A line of the latter begins with `->`; two spaces more than its first continue either kind.
    """
    cases: list[tuple[list[str], list[str]]] = []
    for line in text.strip("\n").splitlines():
        words = line.strip()
        if words.startswith("-> "):
            cases[-1][1].append(words.removeprefix("-> "))
        elif line.startswith(" "):
            part = cases[-1][bool(cases[-1][1])]
            part[-1] += f" {words}"
        elif cases and not cases[-1][1]:
            cases[-1][0].append(words)
        else:
            cases.append(([words], []))
    return cases
