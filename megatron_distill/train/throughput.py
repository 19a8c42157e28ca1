"""Tokens per second and how much of the hardware's arithmetic they use."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megatron_distill.train.flops import mfu


@dataclass(frozen=True)
class Throughput:
    """Turns the seconds of a step into figures; constants of a run."""

    tokens_per_step: int
    flops_per_token: float
    num_devices: int
    device_name: str
    precision: Literal["bf16", "fp32"]

    def figures(self, seconds: float) -> dict[str, float]:
        """Return tokens/s, model TFLOP/s per device and, where the device's peak is known, MFU."""
        tokens_per_second = self.tokens_per_step / seconds
        figures = {
            "tokens_per_second": tokens_per_second,
            "tflops_per_device": self.flops_per_token * tokens_per_second / self.num_devices / 1e12,
        }
        utilisation = mfu(
            self.flops_per_token,
            tokens_per_second=tokens_per_second,
            num_devices=self.num_devices,
            device_name=self.device_name,
            precision=self.precision,
        )
        return figures if utilisation is None else {**figures, "mfu": utilisation}
