"""Measure the machine at hand for `plan`, or refine a device by the measured steps of a run."""

from __future__ import annotations

import argparse
import re
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal

from megatron_distill.commands.command import PROGRAM, Command, keep_result, no_file
from megatron_distill.errors import ConfigError, counted
from megatron_distill.launching.option_numbers import whole_number
from megatron_distill.log import get_logger

if TYPE_CHECKING:
    from collections.abc import Mapping

    from megatron_distill.config import RunConfig
    from megatron_distill.planning.device import DeviceProfile, Phase
    from megatron_distill.planning.refine import MeasuredSteps

__all__ = ["COMMAND"]

_LOGGER = get_logger(__name__)
_FAR: Final = 3.0  # a factor beyond it, or below its inverse, is more likely of another device
_KINDS: Final = {"cpu": "a CPU", "gpu": "a GPU"}


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--output", type=Path, metavar="FILE", help="the file (DEVICE.yaml, here)")
    parser.add_argument(
        "--run", type=Path, metavar="RUN", help="refine --device by this run's metrics.jsonl"
    )
    parser.add_argument("--device", metavar="NAME", help="with --run: the device of the run")
    parser.add_argument(
        "--document-length",
        type=whole_number("512"),
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
    from megatron_distill.planning.device import device_text

    if given.run is None:
        device = _measured(given.output)
    else:
        device = _refined(given.run, given.device, given.document_length)
    path = given.output or Path(f"{device.name}.yaml")
    keep_result(path, device_text(device))
    use = f"{PROGRAM} plan CONFIG --device {shlex.quote(str(path))}"
    sys.stdout.write(f"{path}: use it as `{use}`\n")
    return 0


def _measured(output: Path | None) -> DeviceProfile:
    import torch

    from megatron_distill.commands.calibration_steps import measured_machine
    from megatron_distill.planning.device import CALIBRATED

    kind: Literal["cpu", "gpu"] = "gpu" if torch.cuda.is_available() else "cpu"
    fault = None if output is not None else no_file(Path(f"{CALIBRATED[kind]}.yaml"))
    if fault is not None:
        raise ConfigError(f"{fault.partition(';')[0]}; give --output, a file elsewhere")
    device = measured_machine(kind)
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
    from megatron_distill.train.reports.engine_rates import check_fp8_rate
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
    check_fp8_rate(config, device)
    measured = read_steps(log)
    _require_same_kind(folder, config, measured, device, name)
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
    _warn_of_models(measured, folder, device)
    _warn_of_far(found.runs[0].factors, measured, folder, device)
    return found.model_copy(update={"name": f"{device.name}-refined"})


def _require_same_kind(
    folder: Path, config: RunConfig, measured: MeasuredSteps, device: DeviceProfile, name: str
) -> None:
    """Raise ConfigError where the run's files say that it ran on another kind of device."""
    runtime = config.runtime
    kind: str = device.kind
    reason = ""
    if measured.ran_on:
        for own, model in measured.ran_on:
            if own in _KINDS and own != device.kind:
                kind, reason = own, f"{model}, as its log names it"
    elif runtime.device != "auto":
        kind = "cpu" if runtime.device == "cpu" else "gpu"
        reason = f"runtime.device = {runtime.device!r}"
    elif runtime.backend == "nccl":
        kind, reason = "gpu", "runtime.backend = 'nccl'"
    elif measured.has_mfu:
        kind, reason = "gpu", "its log has `mfu`"
    if kind != device.kind:
        raise ConfigError(
            f"--device {name}: {device.title} is {_KINDS[device.kind]}, and --run {folder} ran on "
            f"{_KINDS[kind]} ({reason}); give the device of the run, as the file that `{PROGRAM} "
            "calibrate` writes there"
        )


def _warn_of_models(measured: MeasuredSteps, folder: Path, device: DeviceProfile) -> None:
    """Warn of a run on another model of GPU; the title of a CPU names none."""
    for kind, model in measured.ran_on:
        if kind == "gpu" and not _is_model(model, device.title):
            _LOGGER.warning(
                "--run %s ran on %s, and --device %s is %s: use the result for plans of the former "
                "alone, or give the device of the run",
                *(folder, model, device.name, device.title),
            )


def _is_model(name: str, title: str) -> bool:
    """Return whether a GPU, as CUDA names it, is the one of a title such as NVIDIA L40S 48 GB."""
    if name == title:
        return True
    words = re.split(r"[^A-Z0-9]+", name.upper())
    model = re.search(r"\b[A-Z]+\d+[A-Z]*\b", title.upper())
    sizes = [re.search(r"(\d+) ?GB", text) for text in (name, title)]
    differ = all(sizes) and len({size[1] for size in sizes if size}) > 1
    return model is not None and model[0] in words and not differ


def _warn_of_far(
    factors: Mapping[Phase, float], measured: MeasuredSteps, folder: Path, device: DeviceProfile
) -> None:
    """Warn of factors that a device's own runs hardly have."""
    far = [
        f"{phase} {factor:.2f}"
        for phase, factor in factors.items()
        if not 1 / _FAR <= factor <= _FAR
    ]
    if far:
        models = " and ".join(model for _, model in measured.ran_on)
        where = f"It ran on {models}" if models else "Its files do not say on which device it ran"
        _LOGGER.warning(
            "--run %s: factors beyond %g or below 1/%g: %s. %s: use the result only if that was %s "
            "(--device %s)",
            folder, _FAR, _FAR, ", ".join(far), where, device.title, device.name,
        )  # fmt: skip


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
