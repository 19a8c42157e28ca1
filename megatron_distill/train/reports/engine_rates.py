"""What a job asks of Transformer Engine, against the rates of a device: FP8, or to go without."""

from __future__ import annotations

from megatron_distill.config import JobConfig, RunConfig, RuntimeConfig
from megatron_distill.errors import ConfigError
from megatron_distill.planning.device import DeviceProfile, device_names, load_device

__all__ = ["check_fp8_rate", "engine_note"]


def check_fp8_rate(job: JobConfig, device: DeviceProfile) -> None:
    """Raise ConfigError where a job has products in FP8, and a device has no rate of these."""
    if device.kind == "gpu" and "fp8" in device.peak_tflops:
        return
    for key, value in _fp8_settings(job).items():
        known = ", ".join(name for name in device_names() if _has_fp8(name))
        remedy = f"set {key}=null, or give a device that has it: {known}"
        if device.kind == "cpu":
            reason = f"FP8 needs a GPU, and device {device.name} is a CPU"
        else:
            reason = (
                f"device {device.name} has no rate `fp8` in `peak_tflops`; FP8 needs Transformer "
                "Engine and a GPU of compute capability 8.9 or higher"
            )
            if device.name not in device_names():
                remedy += "; or add the TFLOP/s of this GPU to its file"
        raise ConfigError(f"{key} = {value!r}: {reason}; {remedy}")


def engine_note(runtime: RuntimeConfig, device: DeviceProfile, *, option: str) -> str | None:
    """Return a sentence where a run is without Transformer Engine, and a device's rates are not.

    option: that names the device, up to its name. None: nothing to say, also where measured steps
    of such a run have refined the rates.
    """
    is_off = runtime.transformer_engine == "off"
    if not is_off or not device.transformer_engine or device.factors:
        return None
    text = (
        f"runtime.transformer_engine = 'off': the rates of {device.name} are meant for Transformer "
        "Engine, and times come out too short (13% on an H100)"
    )
    without = f"{device.name}-torch"
    if without in device_names():
        return f"{text}; plan with {option}{without}"
    return f"{text}; measure the machine with `megatron-distill calibrate`"


def _fp8_settings(job: JobConfig) -> dict[str, str]:
    """Return the keys of the models that compute in FP8, with their values."""
    found: dict[str, str] = {}
    if isinstance(job, RunConfig) and job.train.fp8 is not None:
        found["train.fp8"] = job.train.fp8
    for role, model in job.models.items():
        if role != "student" and model.fp8 is not None and model.store is None:
            found[f"{role}.fp8"] = model.fp8
    return found


def _has_fp8(name: str) -> bool:
    return "fp8" in load_device(name).peak_tflops
