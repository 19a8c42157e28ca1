"""Measure the machine at hand for `plan`, or refine a device by the measured steps of a run."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_distill.commands.command import PROGRAM, Command, no_file
from megatron_distill.errors import ConfigError, counted

if TYPE_CHECKING:
    from megatron_distill.config import RunConfig
    from megatron_distill.planning.device import DeviceProfile

__all__ = ["COMMAND"]


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--output", type=Path, metavar="FILE", help="the file (DEVICE.yaml, here)")
    parser.add_argument(
        "--run", type=Path, metavar="RUN", help="refine --device by this run's metrics.jsonl"
    )
    parser.add_argument("--device", metavar="NAME", help="with --run: the device of the run")
    parser.add_argument(
        "--document-length",
        type=int,
        metavar="TOKENS",
        help="with --run: as for `plan` (one document per sample)",
    )


def _check(given: argparse.Namespace) -> str | None:
    if (given.run is None) != (given.device is None):
        return "--run and --device go together: the run, and the device that it ran on"
    length = given.document_length
    if length is not None and (given.run is None or length < 1):
        return f"--document-length {length}: must be 1 or more, and goes with --run"
    fault = no_file(given.output)
    return None if fault is None else f"--output {fault}"


def _run(given: argparse.Namespace) -> int:
    from megatron_distill.planning.device import write_device

    if given.run is None:
        device = _measured()
    else:
        device = _refined(given.run, given.device, given.document_length)
    path = given.output or Path(f"{device.name}.yaml")
    write_device(device, path)
    sys.stdout.write(f"{path}: use it as `{PROGRAM} plan CONFIG --device {path}`\n")
    return 0


def _measured() -> DeviceProfile:
    import torch

    from megatron_distill.commands.calibration_steps import measured_machine

    device = measured_machine("gpu" if torch.cuda.is_available() else "cpu")
    sys.stdout.write(f"measured in {device.measured_in:.0f} s\n")
    return device


def _refined(folder: Path, name: str, document_length: int | None) -> DeviceProfile:
    from megatron_distill.config import check_layout, load_config, teacher_ranks
    from megatron_distill.planning.device import load_device

    device = load_device(name)
    log, settings = folder / "metrics.jsonl", folder / "config.yaml"
    for path in (log, settings):
        if not path.is_file():
            raise ConfigError(f"--run {folder}: there is no {path.name}; give a run's folder")
    from megatron_distill.models.flops import step_flops_per_token
    from megatron_distill.planning.refine import read_steps, refined
    from megatron_distill.train.reports.planned_run import (
        configured_choice,
        open_shapes,
        planned_run,
        unplanned,
        with_documents,
    )

    config = load_config(settings, [])
    problem = unplanned(config)
    if problem is not None:
        raise ConfigError(f"--run {folder}: {problem.reason}; give another run")
    measured = read_steps(log)
    run = planned_run(config, open_shapes(config, rows=_vocabularies(config, folder)))
    run = with_documents(run, config.data, document_length)
    flops = step_flops_per_token(
        run.student,
        None if run.several else run.teacher,  # as the speed in the log counts them
        sequence_length=run.sequence_length,
        teacher_length=run.teacher_length,
    )
    ranks = measured.devices(flops.total)
    teachers = teacher_ranks(config, ranks_per_node=min(ranks, device.node.devices))
    check_layout(config, ranks, teachers=teachers)
    own = sum(count for _, count in teachers)
    choice = configured_choice(config, run, ranks=ranks, teachers=own)
    threads = config.runtime.threads
    found = refined(device, run, choice, measured, shared_by=ranks, threads=threads)
    steps, devices = counted(measured.count, "step"), counted(ranks, "device")
    lines = [f"{steps} of {measured.step:.3f} s on {devices}; factors:"]
    lines += [f"  {phase} {factor:.2f}" for phase, factor in found.runs[0].factors.items()]
    sys.stdout.write("\n".join(lines) + "\n")
    return found.model_copy(update={"name": f"{device.name}-refined"})


def _vocabularies(config: RunConfig, folder: Path) -> dict[str, int]:
    """Return the sizes of the vocabularies that are those of a tokenizer, by role.

    The run's folder has a copy of its tokenizer.
    """
    from megatron_distill.train.reports.planned_run import tokenizer_paths

    paths = tokenizer_paths(config.models)
    if not paths:
        return {}
    # Imported here: it loads transformers, and most runs need no tokenizer for this.
    from megatron_distill.data.tokenizers.open import load_tokenizer
    from megatron_distill.models.hugging_face.assets import ASSETS_FOLDER

    return {
        role: load_tokenizer(path or folder / ASSETS_FOLDER, named="--run").vocab_size
        for role, path in paths.items()
    }


COMMAND = Command(
    description="""Measure the machine at hand for `plan`, in about a minute.

    megatron-distill calibrate --output this-cpu.yaml
    megatron-distill calibrate --run runs/first --device this-cpu.yaml

With --run, phases of a step that the run measured correct the predictions for that device.""",
    add_arguments=_add_arguments,
    run=_run,
    check=_check,
)
