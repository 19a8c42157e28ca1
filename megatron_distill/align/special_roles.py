"""Which special tokens of two tokenizers have one meaning: an explicit table of spellings.

Nothing is guessed from similar spellings. A tokenizer's own declaration of its end-of-document,
begin and padding token completes the table.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Final, Protocol

from megatron_distill.errors import DataError

__all__ = [
    "SPELLINGS",
    "DeclaresSpecialTokens",
    "SpecialRole",
    "paired_special_tokens",
    "special_roles",
]


class SpecialRole(StrEnum):
    """The meaning of a special token; a tokenizer has at most one token of each."""

    END_OF_TEXT = "end of text"
    END_OF_TURN = "end of turn"
    BEGIN_OF_TEXT = "begin of text"
    PADDING = "padding"


# In the order of preference, for a tokenizer that has several of a role.
SPELLINGS: Final[Mapping[SpecialRole, tuple[str, ...]]] = {
    SpecialRole.END_OF_TEXT: (
        "<|endoftext|>",
        "<|end_of_text|>",
        "<eos>",
        "</s>",
        "<\uff5cend\u2581of\u2581sentence\uff5c>",
        "[EOS]",
    ),
    SpecialRole.END_OF_TURN: (
        "<|im_end|>",
        "<|eot_id|>",
        "<|eot|>",
        "<end_of_turn>",
        "<|end_of_turn|>",
        "<|END_OF_TURN_TOKEN|>",
        "<|end|>",
    ),
    SpecialRole.BEGIN_OF_TEXT: (
        "<|begin_of_text|>",
        "<|startoftext|>",
        "<bos>",
        "<s>",
        "<\uff5cbegin\u2581of\u2581sentence\uff5c>",
        "[BOS]",
    ),
    SpecialRole.PADDING: ("<|finetune_right_pad_id|>", "<|finetune_right_pad|>", "<|pad|>", "<pad>",
                   "[PAD]"),
}  # fmt: skip


class DeclaresSpecialTokens(Protocol):
    """Members of a tokenizer that name its special tokens; see `data.tokenizers.protocol`."""

    @property
    def name(self) -> str:
        """Its origin, for messages."""
        ...

    @property
    def special_ids(self) -> Mapping[str, int]:
        """Special tokens to their ids."""
        ...

    @property
    def eos_id(self) -> int:
        """The end-of-document token."""
        ...

    @property
    def bos_id(self) -> int | None:
        """The token before a text, None if absent."""
        ...

    @property
    def pad_id(self) -> int | None:
        """The padding token, None if absent."""
        ...


def special_roles(tokenizer: DeclaresSpecialTokens) -> dict[SpecialRole, int]:
    """The id of each role that a tokenizer has, one role per id.

    Of several spellings of a role the declared token comes first, then the order of the table. A
    declared token that is in no other role completes the table.
    """
    declared = {
        SpecialRole.END_OF_TEXT: tokenizer.eos_id,
        SpecialRole.BEGIN_OF_TEXT: tokenizer.bos_id,
        SpecialRole.PADDING: tokenizer.pad_id,
    }
    found: dict[SpecialRole, int] = {}
    for role, spellings in SPELLINGS.items():
        ids = [tokenizer.special_ids[text] for text in spellings if text in tokenizer.special_ids]
        if ids:
            own = declared.get(role)
            found[role] = own if own in ids else ids[0]
    for role, number in declared.items():
        if role not in found and number is not None and number not in found.values():
            found[role] = number
    return found


def paired_special_tokens(
    student: DeclaresSpecialTokens,
    teacher: DeclaresSpecialTokens,
    *,
    special_pairs: Sequence[tuple[str, str]] = (),
) -> dict[int, int]:
    """Student ids of special tokens to the teacher ids of their roles, one to one.

    special_pairs: spellings of a student's and a teacher's special token that are one as well; they
    come before the roles. Raises DataError for a spelling of no special token, or twice there.
    """
    found: dict[int, int] = {}
    for texts in special_pairs:
        ids = []
        for side, text in zip((student, teacher), texts, strict=True):
            if text not in side.special_ids:
                known = ", ".join(map(repr, side.special_ids)) or "none"
                raise DataError(
                    f"special pair {'='.join(texts)!r}: {text!r} is not a special token of "
                    f"{side.name}; it has {known}"
                )
            ids.append(side.special_ids[text])
        if ids[0] in found or ids[1] in found.values():
            raise DataError(f"special pair {'='.join(texts)!r}: one of the two is paired already")
        found[ids[0]] = ids[1]
    of_teacher = special_roles(teacher)
    for role, number in special_roles(student).items():
        partner = of_teacher.get(role)
        if partner is not None and number not in found and partner not in found.values():
            found[number] = partner
    return found
