"""One way of preparing or reading data, timed in a separate process; started by data.py."""

from __future__ import annotations

import argparse
import json
import logging
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.data_corpus import SEQUENCE_LENGTH
from benchmarks.harness.anonymous_memory import AnonymousPeak

_LOOK_SECONDS = 0.05
_GLOBAL_BATCH = 8
_SEED = 7


@dataclass(frozen=True)
class Asked:
    """Input of a subject."""

    file: Path
    tokenizer: Path
    folder: Path  # for caches
    cores: int
    tokens: int  # tokens to read from a stream


def main() -> None:
    """Run the requested subject, and write its figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--subject", choices=list(SUBJECTS), required=True)
    parser.add_argument("--file", type=Path, required=True)
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--cores", type=int, required=True)
    parser.add_argument("--tokens", type=int, required=True)
    parser.add_argument("--result", type=Path, required=True)
    words = vars(parser.parse_args())
    subject, result = words.pop("subject"), words.pop("result")
    asked = Asked(**words)
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: asked.cores])
    os.environ["HF_HUB_OFFLINE"] = "1"
    work = SUBJECTS[subject](asked)  # its imports are not timed
    with AnonymousPeak(_LOOK_SECONDS, with_children=True) as peak:
        found = work()
    result.write_text(json.dumps({**found, "peak": peak.bytes}), encoding="utf-8")


Work = Callable[[], dict[str, float]]


def _ours(asked: Asked, *, chat: bool) -> Callable[[], Any]:
    """Return a function that opens our loader of a file."""
    from megatron_distill.data.chat.conversations import ConversationSpec
    from megatron_distill.data.chat.source import ConversationOptions
    from megatron_distill.data.formats import SourceSpec
    from megatron_distill.data.loader import StepLoader
    from megatron_distill.data.sources import DataOptions, open_training
    from megatron_distill.data.tokenizers.open import load_tokenizer

    tokenizer = load_tokenizer(asked.tokenizer)
    workers = asked.cores if asked.cores > 1 else 0
    options = DataOptions(
        sequence_length=SEQUENCE_LENGTH,
        conversations=ConversationOptions(cache=asked.folder, workers=workers),
    )
    spec = SourceSpec(
        "jsonl", (str(asked.file),), conversation=ConversationSpec() if chat else None
    )

    def opened() -> StepLoader:
        source = open_training([spec], tokenizer=tokenizer, options=options, seed=_SEED)
        return StepLoader(
            source,
            sequence_length=SEQUENCE_LENGTH,
            global_batch_size=_GLOBAL_BATCH,
            micro_batch_size=_GLOBAL_BATCH,
        )

    return opened


def _batches(loader: Any) -> Iterator[int]:
    """Take steps from our loader; yields the number of tokens in each, without padding."""
    step = 0
    while True:
        step += 1
        (batch,) = loader.take(step).micro_batches
        yield int((batch.document_ids_bS >= 0).sum())


def _prepare_ours(asked: Asked) -> Work:
    opened = _ours(asked, chat=True)

    def work() -> dict[str, float]:
        start = time.perf_counter()
        loader = opened()
        seconds = time.perf_counter() - start
        loader.close()
        (manifest,) = asked.folder.glob("conversations-*/manifest.json")
        return {"seconds": seconds, "tokens": json.loads(manifest.read_text())["tokens"]}

    return work


def _stream_ours(asked: Asked, *, chat: bool) -> Work:
    opened = _ours(asked, chat=chat)

    def work() -> dict[str, float]:
        start = time.perf_counter()
        loader = opened()
        batches = _batches(loader)
        found = _read(batches, start, asked.tokens)
        loader.close()
        return found

    return work


def _read(batches: Iterator[int], start: float, wanted: int) -> dict[str, float]:
    first = next(batches)
    begun = time.perf_counter()
    tokens = 0
    for count in batches:
        tokens += count
        if tokens >= wanted:
            break
    return {
        "first_seconds": begun - start,
        "first_tokens": first,
        "seconds": time.perf_counter() - begun,
        "tokens": tokens,
    }


def _trl(asked: Asked, *, streaming: bool) -> Callable[[], tuple[Any, float]]:
    """Return a function that makes TRL's trainer over a file and times its data."""
    import transformers
    from datasets import disable_progress_bars, load_dataset
    from trl import SFTConfig, SFTTrainer

    disable_progress_bars()
    logging.getLogger("transformers").setLevel(logging.ERROR)
    tokenizer = transformers.AutoTokenizer.from_pretrained(asked.tokenizer)
    shape = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 1, "num_key_value_heads": 1, "vocab_size": len(tokenizer)}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**shape, **heads))
    settings = SFTConfig(
        output_dir=str(asked.folder / "trl"),
        max_length=SEQUENCE_LENGTH,
        packing=True,
        assistant_only_loss=not streaming,
        dataset_num_proc=asked.cores if asked.cores > 1 and not streaming else None,
        per_device_train_batch_size=_GLOBAL_BATCH,
        max_steps=10_000 if streaming else -1,
        use_cpu=True,
        bf16=False,
        report_to=[],
        disable_tqdm=True,
    )
    seconds = 0.0

    class TimedTrainer(SFTTrainer):
        """Times the preparation of the data alone, not the rest of the trainer's construction."""

        def _prepare_dataset(self, *arguments: Any, **named: Any) -> Any:
            nonlocal seconds
            start = time.perf_counter()
            prepared = super()._prepare_dataset(*arguments, **named)
            seconds += time.perf_counter() - start
            return prepared

    def made() -> tuple[Any, float]:
        start = time.perf_counter()
        rows = load_dataset(
            "json",
            data_files=str(asked.file),
            split="train",
            streaming=streaming,
            cache_dir=str(asked.folder / "datasets"),
        )
        loading = time.perf_counter() - start
        trainer = TimedTrainer(
            model=model, args=settings, train_dataset=rows, processing_class=tokenizer
        )
        return trainer, loading + seconds

    return made


def _prepare_trl(asked: Asked) -> Work:
    made = _trl(asked, streaming=False)

    def work() -> dict[str, float]:
        trainer, seconds = made()
        lengths = trainer.train_dataset.with_format("arrow")["input_ids"]
        return {"seconds": seconds, "tokens": sum(len(row) for row in lengths)}

    return work


def _stream_trl(asked: Asked, *, streaming: bool) -> Work:
    made = _trl(asked, streaming=streaming)

    def work() -> dict[str, float]:
        trainer, seconds = made()
        start = time.perf_counter() - seconds
        batches = (batch["input_ids"].numel() for batch in trainer.get_train_dataloader())
        return _read(batches, start, asked.tokens)

    return work


SUBJECTS: dict[str, Callable[[Asked], Work]] = {
    "prepare": _prepare_ours,
    "prepare-trl": _prepare_trl,
    "load": lambda asked: _stream_ours(asked, chat=True),
    "load-trl": lambda asked: _stream_trl(asked, streaming=False),
    "stream": lambda asked: _stream_ours(asked, chat=False),
    "stream-trl": lambda asked: _stream_trl(asked, streaming=True),
}


if __name__ == "__main__":
    main()
