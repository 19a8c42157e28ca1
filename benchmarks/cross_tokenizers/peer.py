"""The step of TRL's GOLD trainer with its collator and loss, and its loss alone."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from benchmarks.cross_tokenizers.texts import LENGTH, Texts
from benchmarks.steps.subject import OPTIMIZER

__all__ = ["Peer", "build_peer"]

Run = Callable[[], float]

# Settings of `GOLDConfig`; each is one row of the tables.
VARIANTS: Final[Mapping[str, Mapping[str, Any]]] = {
    "GOLD": {"uld_use_hybrid_loss": True},
    "GOLD and CE": {"uld_use_hybrid_loss": True, "uld_crossentropy_weight": 1.0},
    "ULD": {},
}


@dataclass(frozen=True)
class Peer:
    """The trainer, its optimizer, one collated batch, and the loss of each row."""

    trainer: Any
    optimizer: torch.optim.Optimizer
    batch: Mapping[str, Any]
    losses: Mapping[str, Any]

    @property
    def steps(self) -> dict[str, Run]:
        """One optimizer step with each row's loss; returns the loss."""
        return {name: lambda loss=loss: self._step(loss) for name, loss in self.losses.items()}  # type: ignore[misc]

    def _step(self, loss: Any) -> float:
        trainer = self.trainer
        trainer.uld_loss_fn = loss
        trainer.model.train()
        value = trainer.training_step(trainer.model, self.batch)
        torch.nn.utils.clip_grad_norm_(trainer.model.parameters(), OPTIMIZER.clip_grad_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(value)

    @property
    def _sides(self) -> dict[str, Any]:
        """The loss's arguments other than logits."""
        from trl.experimental.gold.gold_trainer import build_teacher_inputs_from_texts

        batch = self.batch
        ids, labels, _, offsets = build_teacher_inputs_from_texts(
            self.trainer.teacher_tokenizer,
            batch["original_prompt_text"],
            batch["original_completion_text"],
        )
        return {
            "student_labels": batch["labels"],
            "teacher_labels": labels,
            "student_input_ids": batch["input_ids"],
            "teacher_input_ids": ids,
            "student_byte_offsets": batch["byte_offsets"],
            "teacher_byte_offsets": offsets,
        }

    def from_hidden(self, scale: float) -> dict[str, Run]:
        """The loss from hidden states, forward and backward, by row."""
        heads = [
            model.lm_head.weight.detach()
            for model in (self.trainer.model, self.trainer.teacher_model)
        ]
        sides = self._sides
        generator = torch.Generator().manual_seed(4)
        hidden, of_teacher = (
            torch.randn(*sides[name].shape, head.shape[1], generator=generator) * scale
            for name, head in zip(("student_labels", "teacher_labels"), heads, strict=True)
        )

        def run(loss: Any) -> float:
            leaf, head = hidden.detach().requires_grad_(), heads[0].clone().requires_grad_()
            with torch.no_grad():
                teacher = of_teacher @ heads[1].t()
            return _backward(loss(leaf @ head.t(), teacher, **sides))

        return {name: lambda loss=loss: run(loss) for name, loss in self.losses.items()}  # type: ignore[misc]

    def from_logits(self, scale: float) -> dict[str, Run]:
        """The loss from given logits, forward and backward, by row."""
        sides = self._sides
        generator = torch.Generator().manual_seed(5)
        models = self.trainer.model, self.trainer.teacher_model
        student, teacher = (
            torch.randn(*sides[name].shape, model.config.vocab_size, generator=generator) * scale
            for name, model in zip(("student_labels", "teacher_labels"), models, strict=True)
        )

        def run(loss: Any) -> float:
            return _backward(loss(student.detach().requires_grad_(), teacher, **sides))

        return {name: lambda loss=loss: run(loss) for name, loss in self.losses.items()}  # type: ignore[misc]

    @property
    def models(self) -> Mapping[str, Any]:
        """The models of `transformers` by role."""
        return {"student": self.trainer.model, "teacher": self.trainer.teacher_model}


def _backward(loss: Tensor) -> float:
    loss.backward()
    return float(loss.detach())


def build_peer(folder: Path, output: Path, chosen: Sequence[str] | None) -> Peer:
    """The trainer on both models, and the batch that its data loader makes of the texts.

    chosen: names in `VARIANTS`; None: all.
    """
    import transformers
    from datasets import Dataset
    from trl.experimental.gold import GOLDConfig, GOLDTrainer
    from trl.experimental.gold.gold_trainer import ULDLoss

    warnings.simplefilter("ignore")
    texts = Texts.read(folder)
    student, teacher = (
        transformers.AutoModelForCausalLM.from_pretrained(folder / name)
        for name in ("student", "teacher")
    )

    def config(**changes: Any) -> Any:
        return GOLDConfig(
            output_dir=str(output),
            use_uld_loss=True,
            teacher_tokenizer_name_or_path=str(folder / "teacher"),
            max_length=LENGTH,
            max_completion_length=LENGTH // 2,  # of generated texts alone
            lmbda=0.0,  # no generation: the texts are those of the data set
            per_device_train_batch_size=len(texts.prompts),
            gradient_accumulation_steps=1,
            learning_rate=OPTIMIZER.learning_rate,
            gradient_checkpointing=False,
            bf16=False,
            use_cpu=True,
            report_to=[],
            disable_tqdm=True,
            **changes,
        )

    # Before the trainer: each new configuration resets the state that the trainer's device is of.
    names = VARIANTS if chosen is None else chosen
    configs = {f"TRL, {name}": config(**VARIANTS[name]) for name in names}
    trainer = GOLDTrainer(
        model=student,
        teacher_model=teacher,
        args=config(),
        train_dataset=Dataset.from_dict({"prompt": texts.prompts, "completion": texts.completions}),
        processing_class=transformers.AutoTokenizer.from_pretrained(folder / "student"),
    )
    trainer.current_gradient_accumulation_steps = 1  # its loop sets this
    losses = {
        name: ULDLoss(
            one,
            student_tokenizer=trainer.processing_class,
            teacher_tokenizer=trainer.teacher_tokenizer,
            device=trainer.accelerator.device,
        )
        for name, one in configs.items()
    }
    batch = next(iter(trainer.get_train_dataloader()))
    return Peer(trainer, trainer.create_optimizer(), batch, losses)
