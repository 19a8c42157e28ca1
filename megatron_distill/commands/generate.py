"""Generate text with a trained student, a checkpoint or a Hugging Face folder."""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_distill.commands.command import (
    Command,
    keep_result,
    model_world,
    no_file,
    note,
    spelled,
    with_launch,
)
from megatron_distill.errors import FROM_THE_HUB, CheckpointError, ConfigError, counted
from megatron_distill.launching.option_numbers import number, whole_number
from megatron_distill.train.assemble.trained_config import (
    NO_RUN,
    STUDENT_ALONE,
    add_run_arguments,
    load_trained_run,
    load_weights,
    run_and_overrides,
    weights_on,
    weights_precision,
)

if TYPE_CHECKING:
    from megatron_distill.config import RunConfig
    from megatron_distill.data.chat.encode import EncodedPrompt
    from megatron_distill.data.tokenizers.open import Tokenizer
    from megatron_distill.models.generation import Sampling
    from megatron_distill.runtime.launch import Device, Launch


__all__ = [
    "COMMAND",
    "add_writer_arguments",
    "configuration",
    "sampling_of",
    "warn_of_draws",
    "writer_objection",
    "writer_world",
]


def add_writer_arguments(
    parser: argparse.ArgumentParser, *, tokens: int, temperature: float, top_p: float
) -> None:
    """Add the options of a model that writes, and of its draws, with these defaults."""
    add_run_arguments(parser, example="e.g. parallel.tensor=2")
    parser.add_argument("--hf", type=Path, metavar="DIR", help="Hugging Face folder, not a run")
    parser.add_argument(
        "--checkpoint", type=Path, metavar="CKPT", help="an imported checkpoint, not a run"
    )
    parser.add_argument(
        "--tokenizer", type=Path, metavar="DIR", help="of --checkpoint; left out: its own copy"
    )
    parser.add_argument(
        "--tokens",
        type=whole_number("200"),
        default=tokens,
        help="most tokens to write (default: %(default)s)",
    )
    parser.add_argument(
        "--temperature",
        type=number("0.7"),
        default=temperature,
        help="0: greedy (default: %(default)s)",
    )
    parser.add_argument(
        "--top-k", type=whole_number("50"), help="draw from that many likeliest tokens"
    )
    parser.add_argument(
        "--top-p", type=number("0.95"), default=top_p,
        help="draw from the likeliest tokens of this probability (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--min-p",
        type=number("0.05"),
        default=0.0,
        help="draw from tokens with this share of the largest",
    )
    parser.add_argument(
        "--seed", type=whole_number("1"), default=0, help="of the draws (default: %(default)s)"
    )
    parser.add_argument(
        "--stop",
        action="append",
        default=[],
        metavar="TEXT",
        help=r"end before it, as it is: a newline is $'\n' in bash; may be repeated",
    )


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    add_writer_arguments(parser, tokens=200, temperature=0.7, top_p=0.95)
    parser.add_argument("--prompt", default="def ", help="text to continue (default: %(default)r)")
    parser.add_argument(
        "--chat",
        action="store_true",
        help="the prompt is a user message in the tokenizer's chat template; write the response",
    )
    parser.add_argument("--system", metavar="TEXT", help="system message before it, with --chat")
    parser.add_argument("--text", type=Path, help="write the text to this file, not out")
    parser.add_argument(
        "--transformers", action="store_true", help="with --hf: let `transformers` write the text"
    )


def writer_objection(arguments: argparse.Namespace) -> str | None:
    """Return the error of the options of `add_writer_arguments`, before torch is loaded."""
    models = [name for name in ("hf", "checkpoint") if getattr(arguments, name) is not None]
    words = [*([arguments.run] if arguments.run else []), *arguments.words]
    if not models and not words:
        return f"{NO_RUN}, or --hf DIR"
    if len(models) > 1 or (models and any("=" not in word for word in words)):
        return "give one model: a run, --hf DIR or --checkpoint CKPT"
    if arguments.tokenizer is not None and not models:
        return "--tokenizer goes with --checkpoint or --hf"
    if "" in arguments.stop:
        return "a --stop text is empty; leave it out"
    return _wrong_number(arguments)


def _objection(arguments: argparse.Namespace) -> str | None:
    if arguments.system is not None and not arguments.chat:
        return "--system is a message of a chat; add --chat"
    if arguments.transformers and arguments.hf is None:
        return "--transformers reads a Hugging Face folder; add --hf DIR"
    if arguments.tokenizer is not None and arguments.transformers:
        return "--tokenizer goes with --checkpoint, or with --hf without --transformers"
    return writer_objection(arguments) or no_file(arguments.text)


def _wrong_number(arguments: argparse.Namespace) -> str | None:
    """Return the error of an option out of its range, before torch is loaded; None: none."""
    top_k = arguments.top_k
    ranges = {
        "tokens": (arguments.tokens > 0, "1 or more"),
        "temperature": (
            0 <= arguments.temperature < math.inf,
            "0 (greedy) or a finite number",
        ),
        "top-k": (top_k is None or top_k > 0, "1 or more, or leave it out for all tokens"),
        "top-p": (0 < arguments.top_p <= 1, "a number above 0, at most 1"),
        "min-p": (0 <= arguments.min_p <= 1, "a number from 0 to 1"),
        "seed": (-(2**63) <= arguments.seed < 2**64, "a number of 64 bits"),
    }
    for option, (is_right, wanted) in ranges.items():
        if not is_right:
            value = getattr(arguments, option.replace("-", "_"))
            return f"--{option} {value}: give {wanted}"
    return None


def warn_of_draws(arguments: argparse.Namespace, launch: Launch) -> None:
    """Write the given options of a draw that a greedy choice does not use to standard error."""
    given = {"--top-k": arguments.top_k is not None, "--min-p": arguments.min_p > 0}
    idle = [option for option, is_given in given.items() if is_given]
    if idle and arguments.temperature == 0:
        note(launch, f"warning: {', '.join(idle)}: no effect with --temperature 0")


def _run(arguments: argparse.Namespace) -> int:
    return with_launch(lambda launch: _generate(arguments, launch))


def _generate(arguments: argparse.Namespace, launch: Launch) -> None:
    began = time.perf_counter()
    warn_of_draws(arguments, launch)
    text, tokens = (_write_by_transformers if arguments.transformers else _write)(arguments, launch)
    if launch.rank == 0 and text is not None:
        if arguments.text is None:
            sys.stdout.write(text + "\n")
        else:
            keep_result(arguments.text, text)
    source = arguments.hf or arguments.checkpoint or run_and_overrides(arguments)[0]
    choice = "greedy" if arguments.temperature == 0 else f"seed {arguments.seed}"
    place = "" if arguments.text is None else f"; the text is in {arguments.text}"
    seconds = time.perf_counter() - began
    note(launch, f"{source}: {tokens}, {choice}, in {seconds:.1f} s{place}")
    if arguments.hf is None and arguments.checkpoint is None:
        note(
            launch,
            f"held-out losses of it: {spelled(arguments, 'evaluate')} {source}",
            f"a Hugging Face folder of it: {spelled(arguments, 'convert')} export "
            f"--checkpoint {source} --hf DIR",
        )


def configuration(arguments: argparse.Namespace, world_size: int) -> RunConfig:
    """Return the settings of the model that writes.

    Raises ConfigError: they are wrong, or the layout does not fit so many ranks; CheckpointError:
    there are no weights.
    """
    kind = "hf" if arguments.hf is not None else "checkpoint"
    folder = arguments.hf or arguments.checkpoint
    if folder is not None:
        if kind == "hf" and not (folder / "config.json").is_file():
            raise CheckpointError(
                f"--hf {folder}: no config.json is there; give a Hugging Face folder "
                f"({FROM_THE_HUB})"
            )
        own = []
        if arguments.tokenizer is not None:
            _require_tokenizer(arguments.tokenizer)
            own.append(f"data.tokenizer.path={arguments.tokenizer}")
        words = [*([arguments.run] if arguments.run else []), *arguments.words]
        return load_weights({kind: str(folder)}, words, world_size=world_size, own=own)
    run, overrides = run_and_overrides(arguments)
    assert run is not None, "the check asks for one"
    return load_trained_run(run, overrides, world_size=world_size, own=STUDENT_ALONE)


@contextmanager
def writer_world(
    arguments: argparse.Namespace, launch: Launch
) -> Iterator[tuple[RunConfig, Device]]:
    """Yield the settings of the model that writes, with the precision of weights on this device.

    Every rank must call this; raises as `configuration`, on all ranks together.
    """
    read = partial(configuration, arguments, launch.size)
    with model_world(launch, read) as (config, device):
        if arguments.hf is not None or arguments.checkpoint is not None:
            config, said = weights_on(config, device.kind)
            note(launch, *said)
        yield config, device


def _require_tokenizer(path: Path) -> None:
    """Raise ConfigError where no tokenizer is: the configuration would name a key of its own."""
    from megatron_distill.data.tokenizers.open import holds_tokenizer

    path = path.expanduser()
    if not path.is_file() and not holds_tokenizer(path):
        raise ConfigError(
            f"--tokenizer {path}: no tokenizer is there; give a folder with a tokenizer.json, or a "
            ".model or .tiktoken file"
        )


def _write(arguments: argparse.Namespace, launch: Launch) -> tuple[str | None, str]:
    """Return the text, None where it is on the terminal already, and its length in words.

    Every rank must call this.
    """
    with writer_world(arguments, launch) as (config, device):
        from megatron_distill.models.generation import Stops, WriteRow
        from megatron_distill.train.assemble.trained_run import text_writer

        is_split = bool(arguments.stop)
        with text_writer(config, device, tokenizer_everywhere=is_split) as found:
            tokenizer = found.tokenizer
            prompt = _shared_prompt(
                arguments, tokenizer if launch.rank == 0 else None, config.data.add_bos
            )
            if len(prompt.ids) >= found.positions:
                raise ConfigError(
                    f"--prompt has {counted(len(prompt.ids), 'token')}, and the model has "
                    f"{counted(found.positions, 'position')}: none is left; "
                    "shorten --prompt or --system"
                )
            sampling = sampling_of(arguments)
            stops = Stops(ids=prompt.stop_ids, strings=tuple(arguments.stop))
            model = found.build()
            streams = launch.rank == 0 and arguments.text is None and sys.stdout.isatty()
            terminal = None
            if streams:
                assert tokenizer is not None
                before = "" if arguments.chat else tokenizer.decode(prompt.text_ids)
                terminal = _Terminal(tokenizer, prompt.ids, tuple(arguments.stop), before)
            with nullcontext() if terminal is None else terminal:
                (written,) = model.write(
                    [WriteRow(prompt.ids, 0, arguments.tokens)],
                    sampling=sampling,
                    stops=stops,
                    on_tokens=None if terminal is None else terminal.show,
                )
            count = counted(len(written.ids), "token")
            if written.ended == "length" and len(written.ids) < arguments.tokens:
                count += f" up to the last of the model's {found.positions} positions"
            if terminal is not None:
                return None, count
            if tokenizer is None or launch.rank:
                return "", count
            text = written.text or ""
            return text if arguments.chat else tokenizer.decode(prompt.text_ids) + text, count


class _Terminal:
    """Shows text as it is written, whole characters only; a block that ends with the line."""

    def __init__(
        self, tokenizer: Tokenizer, ids: Sequence[int], stops: tuple[str, ...], before: str
    ) -> None:
        from megatron_distill.models.generation.text import TextStream

        self._stream = TextStream(tokenizer.decode, stops, ids)
        self._out(before)

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        """Show the rest, and end the line, also after an interruption."""
        self._stream.finish()
        self._out(self._stream.new_text() + "\n")

    def show(self, _: int, ids: Sequence[int]) -> None:
        """Show the text of the next ids."""
        for token in ids:
            self._stream.push(token)
        self._out(self._stream.new_text())

    def _out(self, text: str) -> None:
        if text:
            sys.stdout.write(text)
            sys.stdout.flush()


def _shared_prompt(
    arguments: argparse.Namespace, tokenizer: Tokenizer | None, add_bos: bool | None
) -> EncodedPrompt:
    """Return the prompt on all ranks; only the first rank has the tokenizer.

    Collective: the whole world, one broadcast of the token ids.
    """
    import torch.distributed as dist

    from megatron_distill.data.chat.encode import chat_prompt, plain_prompt
    from megatron_distill.runtime.collectives import together

    shared: list[EncodedPrompt | None] = [None]
    with together():
        if tokenizer is not None and arguments.chat:
            shared = [chat_prompt(tokenizer, arguments.prompt, system=arguments.system)]
        elif tokenizer is not None:
            shared = [plain_prompt(tokenizer, arguments.prompt, add_bos=add_bos)]
    dist.broadcast_object_list(shared, src=0)
    assert shared[0] is not None
    return shared[0]


def _write_by_transformers(arguments: argparse.Namespace, launch: Launch) -> tuple[str, str]:
    import torch

    from megatron_distill.evaluation.generate import write_text
    from megatron_distill.models.hugging_face.assets import weights_dtype
    from megatron_distill.runtime.launch import PRECISIONS

    if arguments.run or arguments.words or launch.size > 1:
        raise ConfigError("--transformers runs in one process and takes no key=value")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    # That of our own text, to compare with.
    precision, reason = weights_precision(device, weights_dtype(arguments.hf), None)
    if reason is not None:
        note(launch, f"{arguments.hf}: read in {precision} ({reason})")
    text = write_text(
        arguments.hf,
        arguments.prompt,
        sampling_of(arguments),
        tokens=arguments.tokens,
        chat=arguments.chat,
        system=arguments.system,
        stops=tuple(arguments.stop),
        device=device,
        dtype=PRECISIONS[precision],
    )
    return text, counted(len(text), "character")


def sampling_of(arguments: argparse.Namespace) -> Sampling:
    """Return the draws that the options of `add_writer_arguments` describe."""
    from megatron_distill.models.generation import Sampling

    return Sampling(
        temperature=arguments.temperature,
        top_k=arguments.top_k,
        top_p=arguments.top_p,
        min_p=arguments.min_p,
        seed=arguments.seed,
    )


COMMAND = Command(
    description="""Text from a trained student, a checkpoint or a Hugging Face folder.

    megatron-distill generate runs/first --prompt "def main("
    megatron-distill generate runs/first --chat --prompt "Is it sunny?" --system "Be brief."
    megatron-distill generate runs/first parallel.tensor=2 --processes 2
    megatron-distill generate --hf models/first --prompt "def main(" --stop $'\\n\\n'
    megatron-distill generate --checkpoint checkpoints/first --tokenizer tokenizers/first

On a terminal the text appears as it is written. With --hf --transformers it is written by
`transformers`. See docs/generation.md.""",
    add_arguments=_add_arguments,
    run=_run,
    check=_objection,
    in_ranks=True,
)
