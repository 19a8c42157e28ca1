"""The ranks of `benchmarks/published.py`: a published text drawn again, and a validation loss."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from benchmarks.published_models.draws import Coins, draw
from benchmarks.published_models.llama2c import BOS, Page, Run, read_page
from megatron_distill.runtime.launch import joined_world

_TIMEOUT_SECONDS: Final = 600
_BATCH_TOKENS: Final = 8192
# Of the controls: other temperatures, which the published text must not come from.
_CHANGES: Final = (0.98, 1.02)

Ids = NDArray[np.int32]


def main() -> None:
    """Score in this rank's share of the layout, and write what rank 0 found."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", required=True, type=Path)
    parser.add_argument("--page", required=True, type=Path)
    parser.add_argument("--shard", type=Path)
    parser.add_argument("--windows", type=int, required=True)
    parser.add_argument("--result", required=True, type=Path)
    arguments = parser.parse_args()
    with joined_world(
        device="cpu", backend="gloo", threads=None, timeout_seconds=_TIMEOUT_SECONDS
    ) as device:
        found = _measure(arguments, device.torch_device)
        if dist.get_rank() == 0:
            arguments.result.write_text(json.dumps(found), encoding="utf-8")


def _measure(arguments: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    # Imported late: these import Megatron-Core, which must be prepared first.
    from megatron_distill.data.tokenizers.open import load_tokenizer
    from megatron_distill.models.execution import Execution
    from megatron_distill.models.generation.model import CachedGPT
    from megatron_distill.models.gpt import build_gpt
    from megatron_distill.models.hugging_face.description import describe
    from megatron_distill.models.hugging_face.model import HuggingFaceWeights
    from megatron_distill.models.weights import fill
    from megatron_distill.runtime.groups import Layout, create_groups, seed_everything
    from megatron_distill.train.evaluation.scoring import ModelScorer

    layout = Layout(tensor=dist.get_world_size())
    groups = create_groups(layout, timeout_minutes=_TIMEOUT_SECONDS // 60)
    seed_everything(1, groups)
    description = describe(arguments.folder)
    shape = description.architecture
    chunks = build_gpt(shape, groups=groups, execution=Execution(torch.float32, device), seed=None)
    fill(chunks, HuggingFaceWeights(arguments.folder, description), groups=groups)
    tokenizer = load_tokenizer(arguments.folder)
    model = CachedGPT(chunks, shape, groups, device, vocab_size=tokenizer.vocab_size)
    scorer = ModelScorer(model, model.positions, _BATCH_TOKENS)
    page = read_page(arguments.page)
    found = _sampled(scorer, tokenizer, page)
    if arguments.shard is not None:
        found |= _loss(scorer, tokenizer, arguments.shard, arguments.windows)
    return found


def _sampled(scorer: Any, tokenizer: Any, page: Page) -> dict[str, Any]:
    """Draw the page's text again, and with the controls' temperatures."""
    run = page.sampled
    ids, margins = _draw(scorer, tokenizer.vocab_size, run, scale=1.0)
    changed: dict[str, int | None] = {}
    if dist.get_world_size() == 1:
        for scale in _CHANGES:
            others, _ = _draw(scorer, tokenizer.vocab_size, run, scale=scale)
            pairs = zip(ids, others, strict=False)
            same = next((place for place, (a, b) in enumerate(pairs) if a != b), None)
            changed[f"{scale * run.temperature:g}"] = same
    return {
        "sampled": tokenizer.decode(ids).strip(),
        "draws": len(ids),
        "closest_draw": min(margins),
        "first_other_token": changed,
    }


def _draw(scorer: Any, tokens: int, run: Run, *, scale: float) -> tuple[list[int], list[float]]:
    """Return the ids of a text up to the next begin-of-text token, and the draws' margins."""
    from megatron_distill.evaluation.requests import Request

    coins, ids = Coins(run.seed), [BOS]
    margins: list[float] = []
    answers = [np.array([token], np.int32) for token in range(tokens)]
    while len(ids) <= run.steps:
        context = np.array(ids, np.int32)
        scores = scorer.score([Request(context, answer) for answer in answers])
        logits = torch.tensor([score.log_prob for score in scores], dtype=torch.float64)
        probabilities = torch.softmax(logits / (run.temperature * scale), dim=0).float().numpy()
        token, margin = draw(probabilities, top_p=run.top_p, coin=coins.next())
        margins.append(margin)
        if token == BOS:
            break
        ids.append(token)
    return ids[1:], margins


def _loss(scorer: Any, tokenizer: Any, shard: Path, windows: int) -> dict[str, Any]:
    """Return the mean loss of windows at even distances over the shard's stories in a row."""
    from megatron_distill.evaluation.requests import Request

    stream = np.concatenate(list(_stories(tokenizer, shard)))
    length = scorer.positions
    most = (len(stream) - 1) // length
    if not most:
        raise SystemExit(f"{shard}: {len(stream):,} tokens are less than one window of {length}")
    places = np.linspace(0, most - 1, min(windows, most)).round().astype(int) * length
    requests = [
        Request(stream[place : place + 1], stream[place + 1 : place + 1 + length])
        for place in places
    ]
    nats = np.array([-score.log_prob / length for score in scorer.score(requests)])
    error = float(nats.std(ddof=1) / len(nats) ** 0.5) if len(nats) > 1 else float("inf")
    return {"loss": float(nats.mean()), "loss_stderr": error, "windows": len(nats)}


def _stories(tokenizer: Any, shard: Path) -> Iterator[Ids]:
    """Yield the ids of each story, a begin-of-text token first, as llama2.c writes them."""
    stories = [one["story"].strip() for one in json.loads(shard.read_text(encoding="utf-8"))]
    first = np.array([BOS], np.int32)
    for ids in tokenizer.encode_batch(stories):
        yield np.concatenate([first, ids])


if __name__ == "__main__":
    main()
