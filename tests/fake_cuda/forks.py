"""A process that has imported what programs need, and forks for each: imports take most of it."""

from __future__ import annotations

import importlib
import json
import os
import select
import subprocess
import sys
import traceback
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import psutil

from tests.e2e.runs import environment

# After the names of CUDA are pretended and Megatron-Core is prepared.
_MODULES = (
    "megatron_distill.train.assemble.run",
    "megatron_distill.train.assemble.capture",
    "megatron_distill.models.generation.model",
    "megatron_distill.ops.kernels.elementwise",
    "megatron_distill.ops.kernels.gradient",
    "megatron_distill.ops.kernels.statistics",
    "tokenizers.trainers",
    "transformers.convert_slow_tokenizer",
    "transformers.models.auto.tokenization_auto",
)


def serve() -> None:
    """Run a program for each line of standard input; answer with its exit status."""
    from megatron_distill.runtime.mcore_patches import prepare_megatron_core
    from tests.fake_cuda.cuda_names import pretend_cuda

    pretend_cuda()
    prepare_megatron_core(on_cuda=True)
    for name in _MODULES:
        importlib.import_module(name)
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            _work(json.loads(line))
        _, status = os.waitpid(child, 0)
        os.write(1, f"{os.waitstatus_to_exitcode(status)}\n".encode())


def _work(asked: dict[str, Any]) -> NoReturn:
    for number, path in ((1, asked["printed"]), (2, asked["errors"])):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    status = 1
    try:
        program = importlib.import_module(f"tests.fake_cuda.{asked['program']}")
        program.main(asked["rank"], asked["world"], asked["subject"], asked["overrides"])
        sys.stdout.flush()
        status = 0
    except BaseException:  # noqa: BLE001 - the process ends here, whatever it was
        traceback.print_exc()
    finally:
        os._exit(status)


@dataclass
class FakeDevice:
    """That process, for tests; `folder` has what the last program printed."""

    stub: Path
    folder: Path
    process: subprocess.Popen[str]

    @classmethod
    def start(cls, stub: Path, folder: Path) -> FakeDevice:
        """Start it with the stub loaded."""
        return cls(stub, folder, _started(stub, folder))

    def run(
        self, program: str, rank: int, world: int, subject: str, *overrides: str, seconds: float
    ) -> dict[str, Any]:
        """Run a program of `tests.fake_cuda` as this rank; return what it saw."""
        if self.process.poll() is not None:  # a program before has hung
            self.process = _started(self.stub, self.folder)
        printed, errors = self.folder / "printed", self.folder / "errors"
        asked = {
            "program": program, "rank": rank, "world": world, "subject": subject,
            "overrides": overrides, "printed": str(printed), "errors": str(errors),
        }  # fmt: skip
        self.process.stdin.write(json.dumps(asked) + "\n")
        self.process.stdin.flush()
        ready, _, _ = select.select([self.process.stdout], [], [], seconds)
        if not ready:
            self.end()
            raise AssertionError(f"{program} has not ended within {seconds:g} s")
        answer = self.process.stdout.readline().strip()
        log = (self.folder / "log").read_text()
        assert answer == "0", (errors.read_text() if errors.exists() else "")[-5000:] + log[-2000:]
        found: dict[str, Any] = json.loads(printed.read_text().splitlines()[-1])
        return found

    def end(self) -> None:
        """End the process, and a program that still runs."""
        with suppress(psutil.NoSuchProcess):
            for process in psutil.Process(self.process.pid).children(recursive=True):
                process.kill()
        self.process.kill()
        self.process.communicate()


def _started(stub: Path, folder: Path) -> subprocess.Popen[str]:
    with (folder / "log").open("w") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "tests.fake_cuda", str(stub)],
            env=environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log,
            text=True, cwd=Path(__file__).parents[2],
        )  # fmt: skip
