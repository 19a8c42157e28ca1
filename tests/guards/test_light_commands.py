"""Commands that a user waits for at a prompt load neither torch nor Megatron-Core."""

import json
import subprocess
import sys
from pathlib import Path

from tests.guards.source_tree import ROOT
from tests.unit.commands.test_plan import RUN

# Each takes a second or more to import, or brings one that does.
HEAVY = ("torch", "megatron", "transformers", "triton", "datasets", "matplotlib", "numpy")
PROBE = """
import contextlib, io, json, sys
from megatron_distill.cli import main
loaded = {}
for words in json.loads(sys.argv[1]):
    with contextlib.redirect_stdout(io.StringIO()):
        assert main(words) == 0, words
    loaded[words[0]] = sorted({name.partition(".")[0] for name in sys.modules})
print(json.dumps(loaded))
"""


def test_plan_status_layout_and_help_load_no_heavy_package(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    config = run / "config.yaml"
    config.write_text(RUN)
    (run / "metrics.jsonl").write_text('{"step": 1, "step_seconds": 0.5}\n')
    commands = [
        ["--help"],
        ["status", str(run)],
        ["train", str(config), "--print-layout", "2x4"],
        ["plan", str(config), "--devices", "8", "--device", "h100-80gb"],
    ]
    done = subprocess.run(
        [sys.executable, "-c", PROBE, json.dumps(commands)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    loaded = json.loads(done.stdout)
    assert set(loaded) == {words[0] for words in commands}
    for command, names in loaded.items():
        assert not [name for name in HEAVY if name in names], command
