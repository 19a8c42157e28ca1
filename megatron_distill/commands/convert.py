"""Convert Hugging Face weights to checkpoints and back, and verify the result."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_distill.commands.command import Command, spelled, with_launch
from megatron_distill.errors import CheckpointError
from megatron_distill.launching.option_numbers import whole_number

if TYPE_CHECKING:
    from megatron_distill.runtime.launch import Launch


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    writing = argparse.ArgumentParser(add_help=False)
    writing.add_argument(
        "--dtype", help="float32, bfloat16 or float16; left out: as each tensor is stored"
    )
    writing.add_argument(
        "--overwrite", action="store_true", help="replace what is in the output folder"
    )

    into = actions.add_parser(
        "import", parents=[writing], help="a Hugging Face folder to a checkpoint"
    )
    into.add_argument("--hf", required=True, type=Path, metavar="DIR")
    into.add_argument("--output", required=True, type=Path, metavar="CKPT")

    out = actions.add_parser(
        "export", parents=[writing], help="a checkpoint to a Hugging Face folder"
    )
    out.add_argument("--checkpoint", required=True, metavar="CKPT")
    out.add_argument("--hf", required=True, type=Path, metavar="OUT")
    out.add_argument("--max-shard-size", default="5GB", help="largest file, e.g. 5GB or 500MB")
    out.add_argument("--family", help="model_type to export as; left out: the one that fits")
    out.add_argument("--tokenizer", type=Path, metavar="DIR", help="take the tokenizer from there")

    verify = actions.add_parser("verify", help="compare tensors, logits and greedy tokens")
    verify.add_argument("--hf", required=True, type=Path, metavar="DIR")
    other = verify.add_mutually_exclusive_group(required=True)
    other.add_argument("--checkpoint", metavar="CKPT")
    other.add_argument("--against", type=Path, metavar="DIR", help="another Hugging Face folder")
    verify.add_argument(
        "--tokens", type=whole_number("200"), default=64, help="length of the compared sequences"
    )
    verify.add_argument(
        "--sequences", type=whole_number("4"), default=4, help="number of sequences"
    )


def _run(arguments: argparse.Namespace) -> int:
    return with_launch(lambda launch: _convert(arguments, launch))


def _convert(arguments: argparse.Namespace, launch: Launch) -> None:
    from megatron_distill.runtime.launch import joined_world

    with joined_world(
        device="cpu", backend="gloo", threads=None, timeout_seconds=3600.0, launch=launch
    ):
        # Imported here: it loads Megatron-Core, which must be patched first.
        from megatron_distill.train.convert.convert import export_checkpoint, import_checkpoint

        if arguments.action == "verify":
            _verify(arguments)
        elif arguments.action == "import":
            written = import_checkpoint(
                arguments.hf,
                arguments.output,
                dtype=arguments.dtype,
                overwrite=arguments.overwrite,
            )
            _say(
                launch,
                written.line,
                f"a run starts from it with student.checkpoint={arguments.output}",
            )
        else:
            written = export_checkpoint(
                arguments.checkpoint,
                arguments.hf,
                dtype=arguments.dtype,
                max_shard_size=arguments.max_shard_size,
                family=arguments.family,
                tokenizer=arguments.tokenizer,
                overwrite=arguments.overwrite,
            )
            _say(
                launch,
                written.line,
                f"text from it: {spelled(arguments, 'generate')} --hf {arguments.hf}",
                f"compare it: {spelled(arguments, 'convert')} verify --hf {arguments.hf} "
                f"--checkpoint {arguments.checkpoint}",
            )


def _say(launch: Launch, *lines: str) -> None:
    if launch.rank == 0:
        sys.stdout.write("".join(f"{line}\n" for line in lines))


def _verify(arguments: argparse.Namespace) -> None:
    from megatron_distill.train.convert.verify import (
        Probe,
        compare_folders,
        compare_with_checkpoint,
        comparison_lines,
    )

    probe = Probe(sequences=arguments.sequences, length=arguments.tokens)
    if arguments.checkpoint is not None:
        comparison = compare_with_checkpoint(arguments.hf, arguments.checkpoint, probe)
    else:
        comparison = compare_folders(arguments.hf, arguments.against, probe)
    for line in comparison_lines(comparison):
        sys.stdout.write(f"{line}\n")
    if not comparison.is_same:
        other = arguments.checkpoint or arguments.against
        raise CheckpointError(f"{arguments.hf} and {other} are not the same model")


COMMAND = Command(
    description="""Convert Hugging Face weights to checkpoints, and back.

    megatron-distill convert import --hf DIR --output CKPT
    megatron-distill convert export --checkpoint CKPT --hf OUT --dtype bfloat16
    megatron-distill convert verify --hf DIR --checkpoint CKPT
    megatron-distill convert verify --hf DIR --against OUT

A checkpoint is a run's output folder, one of its checkpoints/step_* folders, or an imported one.
With --processes N the ranks share the work. `verify` rounds the checkpoint to the dtypes of the
files before it compares bits.""",
    add_arguments=_add_arguments,
    run=_run,
    in_ranks=True,
    has_actions=True,
    tidies_up=True,
    stopped="stopped; nothing was written",
)
