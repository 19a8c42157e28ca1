"""Write texts for the prompts of a file, as data to train on."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from megatron_distill.commands.command import Command, note, with_launch
from megatron_distill.commands.generate import (
    add_writer_arguments,
    sampling_of,
    warn_of_draws,
    writer_objection,
    writer_world,
)
from megatron_distill.errors import counted
from megatron_distill.launching.option_numbers import whole_number
from megatron_distill.launching.records import other_content
from megatron_distill.runtime.folder_lock import LOCK_FILE, refuse_holder
from megatron_distill.runtime.termination import TerminationRequest

if TYPE_CHECKING:
    from megatron_distill.config import RunConfig
    from megatron_distill.data.tokenizers.open import Tokenizer
    from megatron_distill.rollouts.check import LogProbCheck
    from megatron_distill.rollouts.folder import Totals
    from megatron_distill.rollouts.prompts import PromptTokens
    from megatron_distill.rollouts.write import RolloutWork
    from megatron_distill.runtime.launch import Device, Launch

__all__ = ["COMMAND"]

T = TypeVar("T")

_ROWS = 256  # of a part, for each data and context rank


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    add_writer_arguments(parser, tokens=512, temperature=1.0, top_p=1.0)
    parser.add_argument(
        "--prompts", type=Path, required=True, metavar="FILE",
        help="JSON Lines, Parquet or Arrow: rows with `messages`, or with a text at --key",
    )  # fmt: skip
    parser.add_argument(
        "--output", type=Path, required=True, metavar="DIR", help="folder for the texts"
    )
    parser.add_argument(
        "--key", default="prompt", help="of the text in a row (default: %(default)s)"
    )
    parser.add_argument(
        "--chat", action="store_true", help="the text is a user message, and not a beginning"
    )
    parser.add_argument(
        "--system", metavar="TEXT", help="system message, where a conversation has none"
    )
    parser.add_argument(
        "--samples",
        type=whole_number("4"),
        default=1,
        help="texts of each prompt (default: %(default)s)",
    )
    parser.add_argument(
        "--limit", type=whole_number("500"), metavar="ROWS", help="only the first rows"
    )
    parser.add_argument(
        "--part-rows", type=whole_number("256"), metavar="ROWS",
        help="prompts of a part, which is saved whole (default: 256 for each data and context "
        "rank, or those of the parts in --output)",
    )  # fmt: skip
    parser.add_argument(
        "--check-texts", type=whole_number("8"), default=8, metavar="TEXTS",
        help="compare log-probabilities of so many texts with the forward pass of training, at "
        "the end (default: %(default)s; 0: none)",
    )  # fmt: skip
    parser.add_argument(
        "--drop-truncated", action="store_true", help="leave out texts that end at --tokens"
    )


def _objection(arguments: argparse.Namespace) -> str | None:
    for option in ("samples", "limit", "part_rows"):
        value = getattr(arguments, option)
        if value is not None and value < 1:
            return f"--{option.replace('_', '-')} {value}: give 1 or more"
    if arguments.check_texts < 0:
        return f"--check-texts {arguments.check_texts}: give 0 (none) or more"
    if arguments.tokens < 1:
        return f"--tokens {arguments.tokens}: give 1 or more"
    if arguments.samples > 1 and arguments.temperature == 0:
        return "--samples: greedy texts of one prompt are all the same; set --temperature"
    return other_content(arguments.output) or writer_objection(arguments)


def _run(arguments: argparse.Namespace) -> int:
    # From here on a signal takes effect after some tokens.
    with TerminationRequest(note="stopping; the next start writes this part anew") as termination:
        termination.expect_from_torchrun()
        return with_launch(lambda launch: _write(arguments, launch, termination))


def _write(arguments: argparse.Namespace, launch: Launch, termination: TerminationRequest) -> None:
    from megatron_distill.runtime.lone_failure import tell_unfinished

    warn_of_draws(arguments, launch)
    with launch.together("folder"):
        if launch.rank == 0:
            refuse_holder(arguments.output / LOCK_FILE, f"--output {arguments.output}")
    with writer_world(arguments, launch) as (config, device):
        found = _rollouts(arguments, config, device, termination)
    if found is None:
        tell_unfinished()
        note(launch, f"{arguments.output}: stopped; the same command goes on")
    else:
        note(launch, *_summary(arguments, *found))


def _rollouts(
    arguments: argparse.Namespace,
    config: RunConfig,
    device: Device,
    termination: TerminationRequest,
) -> tuple[Totals, LogProbCheck | None] | None:
    """Write the missing parts; return the sums of all and a check, None after a request to stop.

    Every rank must call this.
    """
    import torch.distributed as dist

    from megatron_distill.launching.grace import measured_looks
    from megatron_distill.rollouts.folder import RolloutFolder
    from megatron_distill.rollouts.write import FirstRank, write_parts
    from megatron_distill.runtime.collectives import from_first_rank, on_first_rank, together
    from megatron_distill.train.assemble.trained_run import text_writer
    from megatron_distill.train.evaluation.forward_log_probs import forward_log_probs

    with text_writer(config, device, tokenizer_everywhere=True) as found, ExitStack() as held:
        # It reads the whole file.
        looked = on_first_rank(
            partial(_look, arguments, config, found.tokenizer), device=device.torch_device
        )
        work = from_first_rank(lambda: _known(looked)[0])
        first: FirstRank | None = None
        with together():
            if dist.get_rank() == 0:
                _, tokens, digest = _known(looked)
                settings = {"prompts": digest, "rows": work.rows, "positions": found.positions}
                settings |= {**tokens.identity, **_settings(arguments, config)}
                settings["part_rows"] = work.part_rows
                folder = held.enter_context(closing(RolloutFolder(arguments.output, settings)))
                first = FirstRank(work, tokens, folder, positions=found.positions)
        look = measured_looks(lambda: termination.received)
        weights = found.digest()
        with together():
            if first is not None:
                first.folder.require(weights=weights)
        is_whole = write_parts(
            work,
            build=found.build,
            log_probs=forward_log_probs,
            first=first,
            stop_requested=look,
        )
        look()  # the log-probabilities are compared behind the last look
        return from_first_rank(lambda: _known(first).finish()) if is_whole else None


def _look(
    arguments: argparse.Namespace, config: RunConfig, tokenizer: Tokenizer | None
) -> tuple[RolloutWork, PromptTokens, str]:
    """Return the work, the encoding of its prompts and their digest; raises as `PromptFile`."""
    from megatron_distill.rollouts.prompts import PromptFile, PromptTokens
    from megatron_distill.rollouts.write import RolloutWork

    prompts = PromptFile(arguments.prompts, arguments.key, arguments.chat, arguments.system)
    tokens = PromptTokens.of(_known(tokenizer), prompts.first(), add_bos=config.data.add_bos)
    work = RolloutWork(
        prompts=prompts,
        rows=prompts.count(arguments.limit),
        samples=arguments.samples,
        most_tokens=arguments.tokens,
        sampling=sampling_of(arguments),
        strings=tuple(arguments.stop),
        part_rows=arguments.part_rows or _part_rows(arguments.output, config),
        keeps_truncated=not arguments.drop_truncated,
        checked_texts=arguments.check_texts,
    )
    return work, tokens, prompts.digest()


def _part_rows(output: Path, config: RunConfig) -> int:
    """Return the rows of a part where none are named: in another layout those of the first one."""
    import torch.distributed as dist

    from megatron_distill.rollouts.folder import settings_of_parts

    ranks = dist.get_world_size() // (config.parallel.tensor * config.parallel.pipeline)
    return int(settings_of_parts(output).get("part_rows", _ROWS * ranks))


def _known(found: T | None) -> T:
    assert found is not None, "the first rank has it"
    return found


def _settings(arguments: argparse.Namespace, config: RunConfig) -> dict[str, Any]:
    """Return what determines the texts, besides the prompts and the weights."""
    named = ["key", "chat", "system", "samples", "tokens", "temperature", "top_k"]
    named += ["top_p", "min_p", "seed", "stop", "drop_truncated"]
    found = {name: getattr(arguments, name) for name in named}
    return {**found, "precision": config.train.precision}


def _summary(
    arguments: argparse.Namespace, totals: Totals, check: LogProbCheck | None
) -> Sequence[str]:
    folder = arguments.output
    texts, tokens = counted(totals.texts, "text"), counted(totals.tokens, "token")
    lines = [f"{folder}: {texts}, {tokens}"]
    if totals.tokens:
        lines[0] += f", {-totals.log_prob / totals.tokens:.3f} nats per token"
    if check is not None:
        compared = f"{counted(check.tokens, 'token')} of {counted(check.texts, 'text')}"
        lines.append(
            f"log-probabilities of {compared} and those of the forward pass of training differ by "
            f"{check.mean_difference:.1e} nats per token, at most {check.max_difference:.1e}"
        )
    elif arguments.check_texts and totals.tokens:
        lines.append("log-probabilities were not compared: no start ended after writing texts")
    if totals.left_out:
        lines.append(f"{counted(totals.left_out, 'prompt')} left out, see the warnings")
    if totals.truncated:
        what = "left out" if arguments.drop_truncated else "kept; --drop-truncated leaves them out"
        cut = counted(totals.truncated, "text")
        lines.append(f"{cut} reached --tokens or the model's last position without an end: {what}")
    files = f"{{format: jsonl, paths: {folder}/part-*.jsonl}}"
    lines.append(
        f"to train on them: 'data.sources=[{files}]', for conversations with `conversation: {{}}`"
    )
    return lines


COMMAND = Command(
    description="""Texts of a student, a checkpoint or a Hugging Face folder for a file of prompts.

    megatron-distill rollout --hf models/teacher --prompts prompts.jsonl --output rollouts/teacher
    megatron-distill rollout runs/first --prompts questions.parquet --key question --chat \\
        --output rollouts/first --samples 4 --temperature 0.8
    megatron-distill rollout runs/first parallel.tensor=2 --processes 2 --prompts ... --output ...

The folder gets JSON Lines that `train` reads. An interrupted command goes on with the same words,
in any layout. See docs/generation.md.""",
    add_arguments=_add_arguments,
    run=_run,
    check=_objection,
    in_ranks=True,
)
