"""Experiment trackers as sinks for metrics: TensorBoard and Weights & Biases.

Both are optional dependencies and are imported when the sink is made.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from megatron_distill.errors import ConfigError
from megatron_distill.log import get_logger
from megatron_distill.train.metrics import Record, flat_scalars

__all__ = ["TensorBoardSink", "WandbSink", "require_installed"]

logger = get_logger(__name__)

_NO_TENSORBOARD = (
    "logging.tensorboard=true: the package tensorboard is not installed; run `pip install"
    " tensorboard` or set logging.tensorboard=false"
)
_NO_WANDB = (
    "logging.wandb: the package wandb is not installed; run `pip install wandb` or remove"
    " logging.wandb"
)


def require_installed(*, tensorboard: bool, wandb: bool) -> None:
    """Raise ConfigError unless the packages of the trackers that are asked for are there."""
    for is_wanted, package, message in (
        (tensorboard, "tensorboard", _NO_TENSORBOARD),
        (wandb, "wandb", _NO_WANDB),
    ):
        if is_wanted and find_spec(package) is None:
            raise ConfigError(message)


class TensorBoardSink:
    """Writes every number of a record as a scalar into TensorBoard event files.

    On resuming, scalars of steps after `resume_step` are marked as superseded.

    Raises ConfigError when tensorboard is not installed.
    """

    def __init__(self, folder: Path, *, resume_step: int) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ConfigError(_NO_TENSORBOARD) from error
        purge_step = resume_step + 1 if resume_step > 0 else None
        self._writer = SummaryWriter(str(folder), purge_step=purge_step, flush_secs=10)

    def write(self, record: Record) -> None:
        """Add the scalars of one record."""
        for name, number in flat_scalars(record):
            self._writer.add_scalar(name, number, global_step=record["step"])

    def close(self) -> None:
        """Write out the event file."""
        self._writer.close()


class WandbSink:
    """Writes every number of a record to a Weights & Biases run; offline needs no network.

    The run's id is kept in `output`, so that a resumed run goes on under the same id. A resumed
    offline run adds a folder under `output/wandb`: upload them in order, the later ones with
    `wandb sync --append`.

    Raises ConfigError when wandb is not installed, or when an online run cannot be started.
    """

    def __init__(
        self,
        output: Path,
        *,
        project: str,
        name: str | None,
        mode: Literal["offline", "online"],
        settings: Mapping[str, object],
        resume_step: int,
    ) -> None:
        try:
            import wandb
        except ImportError as error:
            raise ConfigError(_NO_WANDB) from error
        output.mkdir(parents=True, exist_ok=True)
        id_file = output / "wandb_run_id"
        resumed = resume_step > 0 and id_file.exists()
        run_id = id_file.read_text(encoding="ascii").strip() if resumed else None
        try:
            self._run = wandb.init(
                project=project,
                name=name,
                id=run_id,
                mode=mode,
                resume="allow" if resumed and mode == "online" else None,
                dir=str(output),
                config=dict(settings),
                settings=wandb.Settings(silent=True, console="off"),
            )
        except wandb.Error as error:
            raise ConfigError(
                f"logging.wandb.mode={mode}: cannot start a run of project {project!r}: {error};"
                " log in with `wandb login`, or set logging.wandb.mode=offline"
            ) from error
        id_file.write_text(self._run.id + "\n", encoding="ascii")
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")
        place = self._run.url if mode == "online" else self._run.dir
        logger.info("wandb run %s: %s", self._run.id, place)

    def write(self, record: Record) -> None:
        """Log the numbers of one record, with `step` as their x axis."""
        self._run.log({"step": record["step"], **dict(flat_scalars(record))})

    def close(self) -> None:
        """Finish the run."""
        self._run.finish()
