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
loaded = []
for words in json.loads(sys.argv[1]):
    with contextlib.redirect_stdout(io.StringIO()):
        assert main(words) == 0, words
    loaded.append(sorted({name.partition(".")[0] for name in sys.modules}))
print(json.dumps(loaded))
"""
# As published models have it: nothing of what `transformers` would add.
LLAMA = """
{"architectures": ["LlamaForCausalLM"], "model_type": "llama", "attention_bias": false,
 "bos_token_id": 128000, "eos_token_id": 128001, "hidden_act": "silu", "hidden_size": 4096,
 "initializer_range": 0.02, "intermediate_size": 14336, "max_position_embeddings": 131072,
 "mlp_bias": false, "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8,
 "rms_norm_eps": 1e-05, "rope_theta": 500000.0, "rope_scaling": {"factor": 8.0,
  "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
  "rope_type": "llama3"}, "tie_word_embeddings": false, "torch_dtype": "bfloat16",
 "vocab_size": 128256}
"""
FOLDERS = """
student: {hf: model, num_layers: 16}
teacher: {hf: model}
data: {sources: [{format: megatron, paths: a}], sequence_length: 8192, tokenizer: {path: model}}
train: {steps: 1000, global_batch_size: 4096, precision: bf16}
"""


def test_plan_status_layout_and_help_load_no_heavy_package(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    config = run / "config.yaml"
    config.write_text(RUN)
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(LLAMA)
    folders = tmp_path / "folders.yaml"
    folders.write_text(FOLDERS.replace("model", str(model)))
    (run / "metrics.jsonl").write_text('{"step": 1, "step_seconds": 0.5}\n')
    commands = [
        ["--help"],
        ["status", str(run)],
        ["train", str(config), "--print-layout", "2x4"],
        ["plan", str(config), "--devices", "8", "--device", "h100-80gb"],
        *(
            ["plan", str(folders), "--devices", devices, "--device", "h100-80gb"]
            for devices in ("256", "4096")
        ),
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
    for command, names in zip(commands, loaded, strict=True):
        assert not [name for name in HEAVY if name in names], command
