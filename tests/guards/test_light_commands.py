"""Commands that a user waits for at a prompt are quick: without torch and Megatron-Core."""

import argparse
import json
import re
import resource
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.guards.source_tree import ROOT
from tests.unit.commands.test_plan import RUN

# Each takes a second or more to import, or brings one that does.
HEAVY = ("torch", "megatron", "transformers", "triton", "datasets", "matplotlib", "numpy")
MOST_SECONDS = 5.0  # where Python compiles a module of its own so often in these seconds
TIMES, COMPILE_SECONDS = 10, 0.075
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
MODELS = {
    "llama": {
        "model_type": "llama", "attention_bias": False, "hidden_act": "silu", "hidden_size": 4096,
        "initializer_range": 0.02, "intermediate_size": 14336, "max_position_embeddings": 131072,
        "mlp_bias": False, "num_attention_heads": 32, "num_hidden_layers": 32,
        "num_key_value_heads": 8, "rms_norm_eps": 1e-05, "rope_theta": 500000.0,
        "rope_scaling": {
            "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192, "rope_type": "llama3",
        },
        "tie_word_embeddings": False, "torch_dtype": "bfloat16", "vocab_size": 128256,
    },
    "gemma3_text": {
        "model_type": "gemma3_text", "attention_bias": False, "attention_dropout": 0.0,
        "attn_logit_softcapping": None, "final_logit_softcapping": None, "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 1152, "initializer_range": 0.02,
        "intermediate_size": 6912, "max_position_embeddings": 32768, "num_attention_heads": 4,
        "num_hidden_layers": 26, "num_key_value_heads": 1, "query_pre_attn_scalar": 256,
        "rms_norm_eps": 1e-06, "rope_local_base_freq": 10000, "rope_scaling": None,
        "rope_theta": 1000000, "sliding_window": 512, "sliding_window_pattern": 6,
        "vocab_size": 262144,
    },
    "glm4_moe": {
        "model_type": "glm4_moe", "attention_bias": True, "attention_dropout": 0.0,
        "first_k_dense_replace": 1, "head_dim": 128, "hidden_act": "silu", "hidden_size": 4096,
        "initializer_range": 0.02, "intermediate_size": 10944, "max_position_embeddings": 131072,
        "moe_intermediate_size": 1408, "n_group": 1, "n_routed_experts": 128,
        "n_shared_experts": 1, "norm_topk_prob": True, "num_attention_heads": 96,
        "num_experts_per_tok": 8, "num_hidden_layers": 46, "num_key_value_heads": 8,
        "num_nextn_predict_layers": 1, "partial_rotary_factor": 0.5, "rms_norm_eps": 1e-05,
        "rope_scaling": None, "rope_theta": 1000000, "routed_scaling_factor": 1.0,
        "tie_word_embeddings": False, "topk_group": 1, "use_qk_norm": False, "vocab_size": 151552,
    },
}  # fmt: skip
FOLDERS = """
student: {hf: model, num_layers: 16}
teacher: {hf: model}
data: {sources: [{format: megatron, paths: a}], sequence_length: 1024, tokenizer: {path: model}}
train: {steps: 1000, global_batch_size: 4096, precision: bf16}
"""

# Shapes of Qwen3-30B-A3B and Qwen3-235B-A22B.
EXPERTS = """
student:
  architecture: {num_layers: 48, hidden_size: 2048, ffn_hidden_size: 6144, num_attention_heads: 32,
    num_kv_heads: 4, vocab_size: 151936, max_position_embeddings: 131072,
    moe: {num_experts: 128, top_k: 8, ffn_hidden_size: 768}}
teacher:
  architecture: {num_layers: 94, hidden_size: 4096, ffn_hidden_size: 12288, num_kv_heads: 4,
    num_attention_heads: 64, vocab_size: 151936, max_position_embeddings: 131072,
    moe: {num_experts: 128, top_k: 8, ffn_hidden_size: 1536}}
data: {sources: [{format: megatron, paths: a}], sequence_length: 8192, tokenizer: {path: model}}
train: {steps: 1000, global_batch_size: 1024, precision: bf16}
"""


def planned_folder(folder: Path, name: str) -> str:
    """A configuration of a student that has the first layers of a published model."""
    model = folder / name
    model.mkdir()
    (model / "config.json").write_text(json.dumps(MODELS[name]))
    path = folder / f"{name}.yaml"
    path.write_text(FOLDERS.replace("model", str(model)))
    return str(path)


def slowness() -> float:
    """How many times as long as there this machine computes now; a busy core is slower, too."""
    source = Path(argparse.__file__).read_text()
    began = time.process_time()
    for _ in range(TIMES):
        compile(source, "argparse.py", "exec")
    return max(1.0, (time.process_time() - began) / COMPILE_SECONDS)


def run_alone(words: Sequence[str]) -> tuple[str, float]:
    """Run Python in a child: what it prints, and the seconds that it computes, at any load.

    The seconds are those of the machine where `slowness` is one.
    """
    slow = slowness()
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        [sys.executable, *words],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return done.stdout, seconds / max(slow, slowness())


def test_plan_status_layout_and_help_load_no_heavy_package(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    config = run / "config.yaml"
    config.write_text(RUN)
    plans = {name: ["plan", planned_folder(tmp_path, name)] for name in MODELS}
    (run / "metrics.jsonl").write_text('{"step": 1, "step_seconds": 0.5}\n')
    on_h100 = ("--device", "h100-80gb")
    commands = [
        ["--help"],
        ["status", str(run)],
        ["train", str(config), "--print-layout", "2x4"],
        ["plan", str(config), "--devices", "8", *on_h100],
        *([*plan, "--devices", "8", *on_h100] for plan in plans.values()),
        *(
            [*plans["llama"], "data.sequence_length=8192", "--devices", devices, *on_h100]
            for devices in ("256", "4096")
        ),
    ]
    printed, seconds = run_alone(["-c", PROBE, json.dumps(commands)])
    for command, names in zip(commands, json.loads(printed), strict=True):
        assert not [name for name in HEAVY if name in names], command
    # All of them together, among them a plan for 256 devices.
    assert seconds < MOST_SECONDS


@pytest.mark.parametrize(("devices", "tried"), [("256", 6000), ("4096", 3000)])
@pytest.mark.slow
def test_a_plan_of_experts_tries_few_choices_and_computes_for_less_than_five_seconds(
    tmp_path: Path, devices: str, tried: int
) -> None:
    config = tmp_path / "experts.yaml"
    config.write_text(EXPERTS)
    words = ["plan", str(config), "--devices", devices, "--device", "h100-80gb"]
    printed, seconds = run_alone(["-m", "megatron_distill.cli", *words])
    (count,) = re.findall(r"^plan for [\d,]+ x .*, ([\d,]+) choices tried$", printed, re.MULTILINE)
    assert int(count.replace(",", "")) < tried
    assert seconds < MOST_SECONDS


def test_a_plan_for_4096_ranks_with_a_simulated_step_computes_for_less_than_five_seconds(
    tmp_path: Path,
) -> None:
    words = ["plan", planned_folder(tmp_path, "llama"), "data.sequence_length=8192"]
    words += ["--devices", "4096", "--device", "h100-80gb", "--simulate", str(tmp_path / "plan")]
    printed, seconds = run_alone(["-m", "megatron_distill.cli", *words])
    assert "Simulated: " in printed
    assert (tmp_path / "plan" / "timeline.png").is_file()
    assert seconds < MOST_SECONDS
