"""Text from a trained student.

    python launch/generate.py runs/first --prompt "def main("
    torchrun --nproc-per-node 2 launch/generate.py runs/first parallel.tensor=2 --prompt "def main("
    python launch/generate.py --hf models/first --prompt "def main("

Runs in one process, or under torchrun in the layout that `parallel` names. With --hf the text is
written by `transformers` from an exported folder.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from megatron_distill import log
from megatron_distill.errors import ConfigError
from megatron_distill.evaluation.generate import Sampling, generate
from megatron_distill.runtime.launch import Launch, joined_world
from megatron_distill.train.assemble.trained_config import (
    NO_RUN,
    add_run_arguments,
    load_trained_run,
    run_and_overrides,
)


def main() -> int:
    """Run the command and return its exit status."""
    arguments = _parse()
    log.configure(int(os.environ.get("RANK", "0")))
    launch = Launch.from_environment()
    return launch.status_of(lambda: _generate(arguments, launch))


def _generate(arguments: argparse.Namespace, launch: Launch) -> None:
    text = _write(arguments, launch)
    if launch.rank != 0:
        return
    if arguments.text is None:
        sys.stdout.write(text + "\n")
    else:
        arguments.text.write_text(text, encoding="utf-8")


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_run_arguments(parser, example="e.g. parallel.tensor=2")
    parser.add_argument("--hf", type=Path, metavar="DIR", help="Hugging Face folder, not a run")
    parser.add_argument("--prompt", default="def ", help="text to continue")
    parser.add_argument("--tokens", type=int, default=200, help="most tokens to write")
    parser.add_argument("--temperature", type=float, default=0.7, help="0: greedy")
    parser.add_argument("--top-p", type=float, default=0.95)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--text", type=Path, help="write the text to this file, not out")
    arguments = parser.parse_intermixed_args()
    if arguments.hf is None and run_and_overrides(arguments)[0] is None:
        parser.error(f"{NO_RUN}, or --hf DIR")
    return arguments


def _write(arguments: argparse.Namespace, launch: Launch) -> str:
    """Return prompt and continuation on the first rank; every rank takes part."""
    if arguments.hf is not None:
        return _write_by_transformers(arguments, launch)
    run, overrides = run_and_overrides(arguments)
    assert run is not None, "the parser asks for one"
    with launch.together("configuration"):
        config = load_trained_run(
            run, ["teacher=null", "objective.terms=[]", *overrides], world_size=launch.size
        )
    with joined_world(**config.runtime.model_dump(), launch=launch) as device:
        from megatron_distill.train.assemble.trained_run import writer

        with writer(config, device) as (next_token, tokenizer):
            said: list[tuple[list[int], int] | None] = [None]
            if tokenizer is not None:
                said = [(tokenizer.encode_batch([arguments.prompt])[0].tolist(), tokenizer.eos_id)]
            dist.broadcast_object_list(said, src=0)
            assert said[0] is not None
            prompt, eos_id = said[0]
            if not prompt:
                raise ConfigError("--prompt is empty: give at least one character")
            sampling = _sampling(arguments, eos_id=eos_id)
            (written,) = generate(
                next_token,
                torch.tensor([prompt]),
                sampling=sampling,
                max_context=config.data.sequence_length,
            )
            return tokenizer.decode([*prompt, *written]) if tokenizer is not None else ""


def _write_by_transformers(arguments: argparse.Namespace, launch: Launch) -> str:
    from megatron_distill.evaluation.generate import write_text

    if arguments.run or arguments.words or launch.size > 1:
        raise ConfigError(
            "--hf runs in one process and takes neither a run nor key=value; leave them out"
        )
    return write_text(arguments.hf, arguments.prompt, _sampling(arguments, eos_id=None))


def _sampling(arguments: argparse.Namespace, *, eos_id: int | None) -> Sampling:
    return Sampling(
        max_new_tokens=arguments.tokens,
        temperature=arguments.temperature,
        top_p=arguments.top_p,
        seed=arguments.seed,
        eos_id=eos_id,
    )


if __name__ == "__main__":
    sys.exit(main())
