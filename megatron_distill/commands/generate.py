"""Generate text with a trained student."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_distill.commands.command import Command, note, spelled, with_launch
from megatron_distill.errors import ConfigError
from megatron_distill.train.assemble.trained_config import (
    NO_RUN,
    add_run_arguments,
    load_trained_run,
    run_and_overrides,
)

if TYPE_CHECKING:
    from megatron_distill.data.chat.encode import Prompt
    from megatron_distill.data.tokenizers.open import Tokenizer
    from megatron_distill.evaluation.generate import Sampling
    from megatron_distill.runtime.launch import Launch


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    add_run_arguments(parser, example="e.g. parallel.tensor=2")
    parser.add_argument("--hf", type=Path, metavar="DIR", help="Hugging Face folder, not a run")
    parser.add_argument("--prompt", default="def ", help="text to continue")
    parser.add_argument(
        "--chat",
        action="store_true",
        help="the prompt is a user message in the tokenizer's chat template; write the response",
    )
    parser.add_argument("--system", metavar="TEXT", help="system message before it, with --chat")
    parser.add_argument("--tokens", type=int, default=200, help="most tokens to write")
    parser.add_argument("--temperature", type=float, default=0.7, help="0: greedy")
    parser.add_argument("--top-p", type=float, default=0.95)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--text", type=Path, help="write the text to this file, not out")


def _objection(arguments: argparse.Namespace) -> str | None:
    if arguments.hf is None and run_and_overrides(arguments)[0] is None:
        return f"{NO_RUN}, or --hf DIR"
    if arguments.system is not None and not arguments.chat:
        return "--system is a message of a chat; add --chat"
    return None


def _run(arguments: argparse.Namespace) -> int:
    return with_launch(lambda launch: _generate(arguments, launch))


def _generate(arguments: argparse.Namespace, launch: Launch) -> None:
    began = time.perf_counter()
    by_transformers = arguments.hf is not None
    text = (_write_by_transformers if by_transformers else _write)(arguments, launch)
    if launch.rank == 0:
        if arguments.text is None:
            sys.stdout.write(text + "\n")
        else:
            arguments.text.write_text(text, encoding="utf-8")
    source = arguments.hf or run_and_overrides(arguments)[0]
    choice = "greedy" if arguments.temperature == 0 else f"seed {arguments.seed}"
    place = "" if arguments.text is None else f"; the text is in {arguments.text}"
    seconds = time.perf_counter() - began
    note(launch, f"{source}: {len(text):,} characters, {choice}, in {seconds:.1f} s{place}")
    if not by_transformers:
        note(
            launch,
            f"held-out losses of it: {spelled(arguments, 'evaluate')} {source}",
            f"a Hugging Face folder of it: {spelled(arguments, 'convert')} export "
            f"--checkpoint {source} --hf DIR",
        )


def _write(arguments: argparse.Namespace, launch: Launch) -> str:
    """Return the text on the first rank; every rank must call this."""
    from megatron_distill.runtime.launch import joined_world

    run, overrides = run_and_overrides(arguments)
    assert run is not None, "the check asks for one"
    with launch.together("configuration"):
        config = load_trained_run(
            run, ["teacher=null", "objective.terms=[]", *overrides], world_size=launch.size
        )
    with joined_world(
        **config.runtime.model_dump(),
        splits_layers=config.parallel.splits_layers,
        launch=launch,
    ) as device:
        import torch

        from megatron_distill.evaluation.generate import generate
        from megatron_distill.train.assemble.trained_run import writer

        with writer(config, device) as (next_token, tokenizer):
            prompt = _shared_prompt(arguments, tokenizer)
            context = config.data.sequence_length
            if arguments.chat and len(prompt.ids) >= context:
                raise ConfigError(
                    f"--chat: the messages have {len(prompt.ids)} tokens, and the run has "
                    f"data.sequence_length = {context}; shorten --prompt or --system"
                )
            (written,) = generate(
                next_token,
                torch.tensor([prompt.ids]),
                sampling=_sampling(arguments, stop_ids=prompt.stop_ids),
                max_context=context,
            )
            shown = written if arguments.chat else [*prompt.ids, *written]
            return tokenizer.decode(shown) if tokenizer is not None else ""


def _shared_prompt(arguments: argparse.Namespace, tokenizer: Tokenizer | None) -> Prompt:
    """Return the prompt on all ranks; only the first rank has the tokenizer.

    Collective: the whole world, one broadcast of the token ids.
    """
    import torch.distributed as dist

    from megatron_distill.data.chat.encode import chat_prompt, plain_prompt
    from megatron_distill.runtime.collectives import together

    shared: list[Prompt | None] = [None]
    with together():
        if tokenizer is not None and arguments.chat:
            shared = [chat_prompt(tokenizer, arguments.prompt, system=arguments.system)]
        elif tokenizer is not None:
            shared = [plain_prompt(tokenizer, arguments.prompt)]
    dist.broadcast_object_list(shared, src=0)
    assert shared[0] is not None
    return shared[0]


def _write_by_transformers(arguments: argparse.Namespace, launch: Launch) -> str:
    from megatron_distill.evaluation.generate import write_text

    if arguments.run or arguments.words or launch.size > 1:
        raise ConfigError(
            "--hf runs in one process and takes neither a run nor key=value; leave them out"
        )
    return write_text(
        arguments.hf,
        arguments.prompt,
        _sampling(arguments),
        chat=arguments.chat,
        system=arguments.system,
    )


def _sampling(arguments: argparse.Namespace, *, stop_ids: tuple[int, ...] = ()) -> Sampling:
    from megatron_distill.evaluation.generate import Sampling

    return Sampling(
        max_new_tokens=arguments.tokens,
        temperature=arguments.temperature,
        top_p=arguments.top_p,
        seed=arguments.seed,
        stop_ids=stop_ids,
    )


COMMAND = Command(
    description="""Text from a trained student.

    megatron-distill generate runs/first --prompt "def main("
    megatron-distill generate runs/first --chat --prompt "Is it sunny?" --system "Be brief."
    megatron-distill generate runs/first parallel.tensor=2 --processes 2
    megatron-distill generate --hf models/first --prompt "def main("

With --hf the text is written by `transformers` from an exported folder.""",
    add_arguments=_add_arguments,
    run=_run,
    check=_objection,
    in_ranks=True,
)
