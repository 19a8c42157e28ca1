"""A trained teacher's distributions on held-out text, exact; started by benchmarks/store.py."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np
import torch

from megatron_distill.config import RunConfig
from megatron_distill.runtime.launch import Launch, joined_world
from megatron_distill.train.assemble.trained_config import load_trained_run


def distributions(
    config: RunConfig,
) -> tuple[list[torch.Tensor], list[torch.Tensor], list[torch.Tensor]]:
    """Return log-probabilities [N, G], log-sum-exps and labels of the held-out micro-batches."""
    with joined_world(**config.runtime.of_world(), launch=Launch.from_environment()) as device:
        from megatron_distill.models.execution import Execution
        from megatron_distill.models.gpt import vocab_shard
        from megatron_distill.train.assemble.data import RunSamples
        from megatron_distill.train.assemble.models import job_groups, resolve_model
        from megatron_distill.train.assemble.sources import data_options, open_tokenizer
        from megatron_distill.train.teachers.live import OnlineTeacher
        from megatron_distill.train.validation import read_held_out

        options = data_options(config.data, Path(config.output))
        with job_groups(config.parallel, config.runtime, seed=config.seed, trains=False) as groups:
            tokenizer, vocabulary = open_tokenizer(config, options)
            source = resolve_model(config, "student", vocabulary)
            teacher = OnlineTeacher.of_source(
                source,
                Execution(torch.float32, device.torch_device),
                seed=config.seed,
                sequence_length=config.data.sequence_length,
                shard=vocab_shard(source.architecture, groups, tokens=vocabulary.size),
                groups=groups,
            )
            samples = RunSamples(
                data=config.data,
                options=options,
                tokenizer=tokenizer,
                seed=config.seed,
                held_out=config.validation.samples,
            )
            host = torch.device("cpu")
            held_out = read_held_out(
                samples.loader(config.train, groups, host, held_out=True),
                samples=config.validation.samples,
                global_batch_size=config.train.global_batch_size,
                names=samples.names(held_out=True),
            )
            batches = [batch for step in held_out for batch in step.micro_batches]
            parts, sums, labels = [], [], []
            for batch in batches:
                (signal,) = teacher.signals([batch])
                assert signal is not None, "one stage, so that the head is here"
                state = signal.logit_source()
                trained = batch.ce_mask_bs.reshape(-1)
                logits_NV = state.hidden[trained].double() @ state.weight.double().T
                logits_NV = logits_NV[:, : vocabulary.size]
                parts.append(logits_NV.log_softmax(1))
                sums.append(logits_NV.logsumexp(1))
                labels.append(batch.labels_bs.reshape(-1)[trained])
    return parts, sums, labels


def main() -> None:
    """Write log-probabilities of every trained held-out position, most probable first."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run", required=True)
    parser.add_argument("--samples", type=int, required=True)
    parser.add_argument("--arrays", type=Path, required=True)
    parser.add_argument("--result", type=Path, required=True)
    given = parser.parse_args()
    overrides = [f"validation.samples={given.samples}"]
    config = load_trained_run(given.run, overrides, world_size=1)
    parts, sums, labels = distributions(config)
    log_probs_NV, labels_N = torch.cat(parts), torch.cat(labels)
    label_log_probs = log_probs_NV.gather(1, labels_N[:, None])
    descending, ids = log_probs_NV.sort(dim=1, descending=True, stable=True)
    np.savez(
        given.arrays,
        log_probs=descending.numpy(),
        ids=ids.numpy().astype(np.int32),
        log_sum_exp=torch.cat(sums).numpy(),
    )
    entropy_N = -(log_probs_NV.exp() * log_probs_NV).sum(1)
    figures = {
        "positions": len(labels_N),
        "vocab_size": log_probs_NV.shape[1],
        "cross_entropy": -float(label_log_probs.mean()),
        "entropy": float(entropy_N.mean()),
        "top_1": float(descending[:, 0].exp().mean()),
    }
    given.result.write_text(json.dumps(figures), encoding="utf-8")


if __name__ == "__main__":
    main()
