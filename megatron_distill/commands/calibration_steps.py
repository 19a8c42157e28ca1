"""A calibrated CPU refined by real steps: those of a small built-in run, as a user starts one.

The sum of its calls is not all of a layer, and threads or ranks share caches and memory. Measured
are a rank with one thread beside idle cores, whose losses have the rates of logits, one with all
cores, and a rank per core; the latter two in bf16 too. Their phases over the predicted ones are the
device's `step_factors`. A second run of an eighth of the products tells apart what a layer of any
size takes: `layer_us`. Where all cores work, both are made twice with others between, and the
quicker steps count: a virtual machine may be slow for many seconds. Where bf16 is slower than fp32,
as on a CPU without instructions for it, its steps would take longer than all else: they are
measured with a rank per core alone, with half the tokens.
"""

from __future__ import annotations

import json
import random
import tempfile
import time
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal, NamedTuple

from megatron_distill.commands.train import COMMAND
from megatron_distill.errors import TrainingError, counted
from megatron_distill.planning.device import ALIASED_COLUMNS

if TYPE_CHECKING:
    from megatron_distill.launching.forked_ranks import ForkedRanks
    from megatron_distill.planning.device import DeviceProfile, Precision
    from megatron_distill.planning.refine import Sample
    from megatron_distill.planning.run import Choice, PlannedRun

__all__ = ["measured_machine"]

_VOCABULARY: Final = 20_480
_VOCABULARIES: Final = (_VOCABULARY, ALIASED_COLUMNS)
# Of the second run: models of half the width, and half the tokens.
_SMALL: Final = (
    "student.architecture.hidden_size=160",
    "student.architecture.ffn_hidden_size=432",
    "teacher.architecture.hidden_size=224",
    "teacher.architecture.ffn_hidden_size=608",
    "data.sequence_length=192",
)
_MOST_RANKS: Final = 8
# Steps at most, and of the second run. The planned seconds of those that count are fewer where a
# machine is slow, but two of them always are: what disturbs one is seen in the other.
_STEPS: Final = 5
_SMALL_STEPS: Final = 9
_BF16_STEPS: Final = 4  # each of fewer seconds than in fp32, and made once
_COUNTED_SECONDS: Final = 2.0
_LEAST_COUNTED: Final = 2
_WARM: Final = 1  # step that allocates and fills caches; nothing is compiled on a CPU
_WORDS: Final = 400_000  # several times those that the steps read
_SECONDS: Final = 600.0  # of one run; only a hang takes that long
# The latter two are imported late in a run, and take a second there.
_OF_OPTIMIZERS: Final = "torch._dynamo"
_IMPORTS: Final = (
    "megatron_distill.train.assemble.run",
    "transformers.models.auto.tokenization_auto",
    _OF_OPTIMIZERS,
)
_LINES: Final = 12  # of the output of a run that failed
_RUN: Final = """\
student:
  architecture: {{num_layers: 3, hidden_size: 320, ffn_hidden_size: 864, num_attention_heads: 8,
    num_kv_heads: 4, vocab_size: {vocabulary}}}
teacher:
  architecture: {{num_layers: 5, hidden_size: 448, ffn_hidden_size: 1216, num_attention_heads: 8,
    num_kv_heads: 4, vocab_size: {vocabulary}}}
data:
  sources: [{{format: jsonl, paths: {folder}/texts.jsonl}}]
  tokenizer: {{path: {folder}/tokenizer-{vocabulary}}}
  sequence_length: 384
  isolate_documents: false
objective: {{terms: [{{divergence: forward_kl}}]}}
train: {{steps: {steps}, micro_batch_size: 2}}
checkpoint: {{save: false}}
logging: {{progress: false}}
runtime: {{device: cpu}}
"""


def measured_machine(kind: Literal["cpu", "gpu"]) -> DeviceProfile:
    """Measure this machine, a CPU also by real steps. Raises TrainingError: its steps fail."""
    started = time.monotonic()
    device = _measured(kind)
    return device.model_copy(update={"measured_in": round(time.monotonic() - started, 1)})


def _measured(kind: Literal["cpu", "gpu"]) -> DeviceProfile:
    if kind == "gpu":
        from megatron_distill.planning.calibration.machine import measure_machine

        return measure_machine(kind)
    from megatron_distill.launching.forked_ranks import ForkedRanks

    with tempfile.TemporaryDirectory() as name, ForkedRanks(import_training) as forked:
        # Both processes import at the same time, and nothing is measured before both are done.
        from megatron_distill.planning.calibration.machine import measure_machine

        import_module(_OF_OPTIMIZERS)
        _write_inputs(Path(name))
        forked.wait()
        return measure_machine(
            kind, forked=forked, steps=partial(_refined_by_steps, forked=forked, folder=Path(name))
        )


def import_training() -> None:
    """Import all that a run on a CPU needs."""
    # Imported here: it loads torch, and patches Megatron-Core before anything imports that.
    from megatron_distill.runtime.mcore_patches import prepare_megatron_core

    prepare_megatron_core(on_cuda=False)
    for module in _IMPORTS:
        import_module(module)


@dataclass(frozen=True)
class _Run:
    """A run of so many ranks, with the threads of each.

    changes: of its settings. sequences: of each rank in a step. most: steps. times: that it is made
    anew, each with a part of the steps that count.
    """

    ranks: int
    threads: int
    precision: Precision = "fp32"
    changes: tuple[str, ...] = ()
    sequences: int = 2
    most: int = _STEPS
    times: int = 1

    def steps(self, planned: float) -> int:
        """Return the steps each time, of so many planned seconds."""
        counted = max(_LEAST_COUNTED, round(_COUNTED_SECONDS / planned))
        return _WARM + ceil(min(self.most - _WARM, counted) / self.times)


class _Sharing(NamedTuple):
    """The runs in which so many ranks share the cores."""

    large: _Run
    small: _Run
    bf16: _Run | None


def _refined_by_steps(device: DeviceProfile, *, forked: ForkedRanks, folder: Path) -> DeviceProfile:
    """Return a CPU with the factors of small runs' steps, and its rates of logits."""
    from megatron_distill.planning.refine import (
        refined_by_steps,
        with_layer_seconds,
        with_logit_rate,
    )

    sharings = _sharings(device, folder)
    logs: dict[_Run, list[Path]] = {run: [] for one in sharings for run in one if run is not None}
    for number in range(max(run.times for run in logs)):
        for run, own in logs.items():
            if number < run.times:
                own.append(_log_of(run, number, forked, folder, device))
    samples = {run: _sample(run, own, folder) for run, own in logs.items()}
    for large, small, bf16 in sharings:
        of_sharing = {"shared_by": large.ranks, "threads": large.threads}
        device = with_layer_seconds(device, samples[large], samples[small], **of_sharing)
        if large is sharings[0].large:
            for run in (large, small):
                device = with_logit_rate(device, samples[run], **of_sharing)
        device = refined_by_steps(device, samples[large], **of_sharing)
        if bf16 is not None:
            if "bf16" not in device.logit_ns:
                device = with_logit_rate(device, samples[bf16], **of_sharing)
            device = refined_by_steps(device, samples[bf16], **of_sharing)
    return device


def _sharings(device: DeviceProfile, folder: Path) -> list[_Sharing]:
    """Return one rank beside idle cores, one with all of them, and a rank per core."""
    cores = device.cores or 1
    most = min(cores, _MOST_RANKS)
    sharings = sorted({(1, 1), (1, cores), (most, cores // most)})
    emulates_bf16 = device.peak_tflops["bf16"] < device.peak_tflops["fp32"]
    found = []
    for ranks, threads in sharings:
        is_first, is_last = (ranks, threads) == sharings[0], (ranks, threads) == sharings[-1]
        uses_all_cores = is_last or not is_first
        times = 2 if uses_all_cores else 1
        # The first small run has rows of logits that are aliased.
        small = (*_SMALL, *(_with(ALIASED_COLUMNS, folder) if is_first else ()))
        bf16 = None
        if is_last and emulates_bf16:
            # Without instructions it is slow, and a step of half the tokens is long enough.
            bf16 = _Run(ranks, threads, "bf16", sequences=1, most=_WARM + _LEAST_COUNTED)
        elif uses_all_cores and not emulates_bf16:
            bf16 = _Run(ranks, threads, "bf16", most=_BF16_STEPS)
        found.append(
            _Sharing(
                _Run(ranks, threads, times=times),
                _Run(ranks, threads, changes=small, most=_SMALL_STEPS, times=times),
                bf16,
            )
        )
    return found


def _with(vocabulary: int, folder: Path) -> tuple[str, ...]:
    """Return the settings of a run with another tokenizer."""
    return (
        f"data.tokenizer.path={folder}/tokenizer-{vocabulary}",
        *(f"{role}.architecture.vocab_size={vocabulary}" for role in ("student", "teacher")),
    )


def _write_inputs(folder: Path) -> None:
    """Write the configuration, random texts, and tokenizers with a word for each number."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace
    from transformers import PreTrainedTokenizerFast

    words = ["<eos>", *(f"w{number}" for number in range(1, max(_VOCABULARIES)))]
    for size in _VOCABULARIES:
        numbered = {word: number for number, word in enumerate(words[:size])}
        plain = Tokenizer(WordLevel(numbered, "<eos>"))
        plain.pre_tokenizer = Whitespace()
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=plain, eos_token="<eos>")
        tokenizer.save_pretrained(folder / f"tokenizer-{size}")
    chosen = random.Random(1).choices(words[1:_VOCABULARY], k=_WORDS)
    texts = (" ".join(chosen[start : start + 1000]) for start in range(0, _WORDS, 1000))
    lines = "".join(json.dumps({"text": text}) + "\n" for text in texts)
    (folder / "texts.jsonl").write_text(lines, encoding="utf-8")
    settings = _RUN.format(vocabulary=_VOCABULARY, folder=folder, steps=_STEPS)
    (folder / "run.yaml").write_text(settings, encoding="utf-8")


def _train(
    forked: ForkedRanks, folder: Path, words: list[str], *, ranks: int, threads: int
) -> None:
    output = folder / "output.txt"
    output.unlink(missing_ok=True)
    status = forked.run(
        _run_training,
        [f"{folder}/run.yaml", *words],
        ranks=ranks,
        threads=threads,
        output=output,
        seconds=_SECONDS,
    )
    if status:
        end = "\n".join(output.read_text(encoding="utf-8").splitlines()[-_LINES:])
        raise TrainingError(
            f"calibrate: its run of {counted(ranks, 'rank')} ended with status {status}; correct "
            f"the cause that its output names, and calibrate again:\n{end}"
        )


def _run_training(words: list[str]) -> int:
    return COMMAND.script(None)(words)


def _log_of(
    run: _Run, number: int, forked: ForkedRanks, folder: Path, device: DeviceProfile
) -> Path:
    """Train, and return the log of the steps; number: of earlier times. device: without factors."""
    from megatron_distill.planning.parameters import stage_numbers
    from megatron_distill.planning.step_time import step_time

    words = _words(run)
    planned, choice = _planned(run, folder)
    numbers = stage_numbers(planned.student, choice.layout, choice.layers)
    shared = device.shared_by(run.ranks, threads=run.threads)
    seconds = step_time(planned, choice, shared, numbers).total
    kind = "small" if run.changes else "large"
    output = folder / f"{run.ranks}-{run.threads}-{run.precision}-{kind}-{number}"
    words += [f"output={output}", f"train.steps={run.steps(seconds)}"]
    _train(forked, folder, words, ranks=run.ranks, threads=run.threads)
    return output / "metrics.jsonl"


def _words(run: _Run) -> list[str]:
    """Return the settings of a run in which it differs from the file."""
    return [
        f"train.precision={run.precision}",
        f"train.micro_batch_size={run.sequences}",
        f"train.global_batch_size={run.sequences * run.ranks}",
        f"runtime.threads={run.threads}",
        *run.changes,
    ]


def _planned(run: _Run, folder: Path) -> tuple[PlannedRun, Choice]:
    from megatron_distill.config import load_config
    from megatron_distill.train.reports.planned_run import (
        configured_choice,
        open_shapes,
        planned_run,
    )

    config = load_config(folder / "run.yaml", _words(run))
    planned = planned_run(config, open_shapes(config))
    return planned, configured_choice(config, planned, ranks=run.ranks, teachers=0)


def _sample(run: _Run, logs: list[Path], folder: Path) -> Sample:
    from megatron_distill.planning.refine import Sample, lower_quartile, read_steps

    return Sample(*_planned(run, folder), read_steps(*logs, warm=_WARM, middle=lower_quartile))
