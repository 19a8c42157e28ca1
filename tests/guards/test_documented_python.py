"""Python code in documents runs as it stands."""

import inspect
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_distill import losses
from tests.guards.source_tree import ROOT

PAGES = ("README.md", pytest.param("docs/python_api.md", marks=pytest.mark.slow))
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SECONDS = 240


def program(page: Path) -> str:
    """The page's blocks, each at its own line, so that a traceback names the line of the page."""
    text = page.read_text(encoding="utf-8")
    lines = [""] * text.count("\n")
    for block in BLOCK.finditer(text):
        first = text.count("\n", 0, block.start(1))
        code = block.group(1).splitlines()
        lines[first : first + len(code)] = code
    return "\n".join(lines)


@pytest.mark.parametrize("page", PAGES)
def test_the_blocks_of_a_page_run(page: str, tmp_path: Path) -> None:
    code = program(ROOT / page)
    assert code.strip(), f"{page} has no python block"
    script = tmp_path / f"{Path(page).stem}.py"
    script.write_text(code, encoding="utf-8")
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, str(script)], cwd=tmp_path, env=environment, capture_output=True,
        text=True, timeout=SECONDS, check=False,
    )  # fmt: skip
    assert done.returncode == 0, f"{page}: {done.stderr[-3000:]}"


def test_the_signatures_of_the_page_are_those_of_the_functions() -> None:
    text = (ROOT / "docs" / "python_api.md").read_text(encoding="utf-8")
    found = re.findall(r"^```text\n(\w+)\((.*?)\) -> ", text, re.MULTILINE | re.DOTALL)
    assert {name for name, _ in found} == {
        "token_divergence",
        "cross_tokenizer_divergence",
        "fused_linear_objective",
    }
    for name, listed in found:
        parameters = inspect.signature(getattr(losses, name)).parameters.values()
        wanted = [
            ("**" if parameter.kind is parameter.VAR_KEYWORD else "") + parameter.name
            for parameter in parameters
        ]
        words = (word.strip().partition("=")[0] for word in listed.split(","))
        assert [word for word in words if word != "*"] == wanted
