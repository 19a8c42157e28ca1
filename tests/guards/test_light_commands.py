"""Commands that a user waits for at a prompt load neither torch nor Megatron-Core."""

import json
import subprocess
import sys
from pathlib import Path

from tests.guards.source_tree import ROOT
from tests.unit.commands.test_plan import RUN

# Each takes a second or more to import, or brings one that does.
HEAVY = ("torch", "megatron", "transformers", "triton", "datasets", "matplotlib", "numpy")
LOADED_BY_TRANSFORMERS = ("torch", "megatron", "triton", "datasets", "matplotlib")
LLAMA = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 512,
    "intermediate_size": 1408, "num_hidden_layers": 8, "num_attention_heads": 8,
    "num_key_value_heads": 4, "vocab_size": 32768, "max_position_embeddings": 4096,
    "hidden_act": "silu", "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "torch_dtype": "bfloat16",
}  # fmt: skip
PROBE = """
import contextlib, io, json, sys
from megatron_distill.cli import main
loaded = []
for words in json.loads(sys.argv[1]):
    with contextlib.redirect_stdout(io.StringIO()):
        assert main(words) == 0, words
    loaded.append(sorted({name.partition(".")[0] for name in sys.modules}))
import transformers
assert transformers.utils.is_torch_available(), "a later import finds torch"
print(json.dumps(loaded))
"""


def test_plan_status_layout_and_help_load_no_heavy_package(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    config = run / "config.yaml"
    config.write_text(RUN)
    (run / "metrics.jsonl").write_text('{"step": 1, "step_seconds": 0.5}\n')
    folder = tmp_path / "llama"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(LLAMA))
    files = tmp_path / "files.yaml"
    section = f"{{hf: {folder}}}"
    files.write_text(f"student: {section}\nteacher: {section}\n" + RUN[RUN.index("data:") :])
    commands = [
        ["--help"],
        ["status", str(run)],
        ["train", str(config), "--print-layout", "2x4"],
        ["plan", str(config), "--devices", "8", "--device", "h100-80gb"],
        # transformers reads config.json, and imports torch where it is not told otherwise.
        ["plan", str(files), "--devices", "8", "--device", "h100-80gb"],
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
    assert len(loaded) == len(commands)
    for words, names in zip(commands, loaded, strict=True):
        heavy = LOADED_BY_TRANSFORMERS if str(files) in words else HEAVY
        assert not [name for name in heavy if name in names], words
