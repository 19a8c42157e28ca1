"""The section `data`."""

from typing import Literal

from pydantic import Field, field_validator

from megatron_distill.config.schema.base import Section
from megatron_distill.config.schema.source_name import SOURCE_NAME, name_of_path

__all__ = ["DataConfig", "EncodingName", "SourceConfig", "SourceFormat", "TokenizerConfig"]

EncodingName = Literal[
    "gpt2",
    "r50k_base",
    "p50k_base",
    "p50k_edit",
    "cl100k_base",
    "o200k_base",
    "o200k_harmony",
]
SourceFormat = Literal["text", "jsonl", "megatron", "python_stdlib"]


class SourceConfig(Section):
    """One corpus of the blend."""

    format: SourceFormat = Field(
        examples=["text"],
        description="`text` and `jsonl` (plain, .gz or .zst), `megatron` (.bin/.idx pairs), or "
        "`python_stdlib`: the source of the running Python's standard library.",
    )
    paths: tuple[str, ...] = Field(
        default=(),
        strict=False,
        description="Files or glob patterns, one or a list; prefixes (no .bin) for `megatron`; "
        "left out only for `python_stdlib`.",
    )
    weight: float = Field(
        default=1.0, gt=0, description="Share of this source, relative to the other weights."
    )
    text_key: str = Field(
        default="text", min_length=1, description="Field of a `jsonl` record with the text."
    )
    documents: Literal["file", "line"] = Field(
        default="file", description="What one document is in a `text` source."
    )
    name: str | None = Field(
        default=None,
        pattern=SOURCE_NAME,
        examples=["wiki"],
        description="What the log calls this source; left out: the first path's file without its "
        "endings, for a pattern its folder, else the format.",
    )

    @field_validator("paths", mode="before")
    @classmethod
    def _one_path_is_a_list_of_one(cls, paths: object) -> object:
        return (paths,) if isinstance(paths, str) else paths

    @property
    def log_name(self) -> str:
        """`name`, or what the first path calls itself."""
        return self.name or (name_of_path(self.paths[0]) if self.paths else self.format)


class TokenizerConfig(Section):
    """The tokenizer: its files, a name, or trained on the sources; none: that of a model."""

    path: str | None = Field(
        default=None,
        min_length=1,
        description="Hugging Face folder holding `tokenizer.json`, or a SentencePiece `.model` or "
        "`.tiktoken` rank file, or the folder of one.",
    )
    encoding: EncodingName | None = Field(
        default=None,
        description="Name of a tiktoken encoding whose ranks lie in tiktoken's cache already.",
    )
    train_vocab_size: int | None = Field(
        default=None,
        ge=260,
        description="Train a byte-level BPE of this size on the sources and keep it in "
        "`output/tokenizer` (256 bytes and the special tokens always fit).",
    )
    train_bytes: int = Field(
        default=4_000_000, ge=1, description="Bytes of text that such a tokenizer is trained on."
    )


class DataConfig(Section):
    """Where tokens come from and how they are packed."""

    sources: tuple[SourceConfig, ...] = Field(
        default=(),
        strict=False,
        examples=[[{"format": "python_stdlib"}]],
        description="The corpora, blended by weight; with `teacher.store` they may be left out, "
        "and the samples of the store are trained on.",
    )
    tokenizer: TokenizerConfig = Field(
        default_factory=TokenizerConfig,
        examples=[{"path": "tokenizers/llama3"}],
        description="The tokenizer; left out: that of `student.hf`, `teacher.hf` or "
        "`teacher.store`.",
    )
    sequence_length: int = Field(
        ge=2, examples=[4096], description="Tokens in one packed sequence."
    )
    isolate_documents: bool = Field(
        default=True,
        description="No attention across documents, and positions restart with each of them.",
    )
    validation_fraction: float = Field(
        default=0.02,
        ge=0,
        lt=1,
        description="Share of the documents, chosen by hash, that is held out of training.",
    )
    validation_sources: tuple[SourceConfig, ...] = Field(
        default=(),
        strict=False,
        description="Held-out corpora of their own, in place of `validation_fraction`.",
    )
    shuffle_buffer: int = Field(
        default=256, ge=1, description="Documents in one shuffled block; 1 keeps their order."
    )
    shuffle_samples: int = Field(
        default=1024,
        ge=1,
        description="Packed samples of a source in one shuffled window, so that a long document "
        "does not fill a batch; 1 keeps their order. Two windows are in memory.",
    )
    on_error: Literal["raise", "skip"] = Field(
        default="raise", description="A bad record: stop, or count it, report it and go on."
    )
    cache: str | None = Field(
        default=None,
        min_length=1,
        description="Folder for the index files of `megatron` sources; null: below `output`.",
    )
