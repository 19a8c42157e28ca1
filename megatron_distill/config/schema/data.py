"""The section `data`."""

from typing import Literal

from pydantic import Field, field_validator

from megatron_distill.config.schema.section import SOURCE_NAME, Section, name_of_path

__all__ = [
    "ConversationConfig",
    "ConversationFormat",
    "DataConfig",
    "EncodingName",
    "PathlessFormat",
    "SourceConfig",
    "SourceFormat",
    "TokenizedFormat",
    "TokenizerConfig",
]

EncodingName = Literal[
    "gpt2",
    "r50k_base",
    "p50k_base",
    "p50k_edit",
    "cl100k_base",
    "o200k_base",
    "o200k_harmony",
]
# The rows of data/formats.py, by the rules that hold for them; a test compares the two.
ConversationFormat = Literal["jsonl", "parquet", "arrow"]
TokenizedFormat = Literal["megatron"]
PathlessFormat = Literal["python_stdlib"]
SourceFormat = Literal["text", ConversationFormat, TokenizedFormat, PathlessFormat]
Role = Literal["system", "developer", "user", "assistant", "tool", "ipython"]


class ConversationConfig(Section):
    """Where in a row its conversation is, and how it is rendered."""

    messages_key: str = Field(
        default="messages", min_length=1, description="Field or column with the list of messages."
    )
    role_key: str = Field(
        default="role", min_length=1, description="Field of a message: who speaks (`from`)."
    )
    content_key: str = Field(
        default="content", min_length=1, description="Field of a message: what is said (`value`)."
    )
    roles: dict[str, Role] = Field(
        default_factory=dict,
        description="Further names of roles; human, gpt, model, bot, function and the like are "
        "known.",
    )
    prompt_key: tuple[str, ...] = Field(
        default=(),
        strict=False,
        description="Columns of the prompt, in place of a list of messages: one or several, joined "
        "by an empty line where they are not empty.",
    )
    response_key: str = Field(
        default="response", min_length=1, description="Column of the response to `prompt_key`."
    )
    system_key: str | None = Field(
        default=None, min_length=1, description="Column of the system prompt to `prompt_key`."
    )
    tools_key: str = Field(
        default="tools",
        min_length=1,
        description="Field or column with the tools' JSON schemas, if a row has any.",
    )
    weight_key: str = Field(
        default="weight",
        min_length=1,
        description="Field of a message: how much it is trained, from 0 (as a prompt) to 1; "
        "rounded to a multiple of 1/64.",
    )
    leading_assistant: Literal["drop", "keep", "refuse"] = Field(
        default="drop",
        description="Responses before the first prompt, as ShareGPT has them: leave them out and "
        "count them, give them to the template, which may refuse them, or take the row for bad.",
    )
    chat_template: str = Field(
        default="tokenizer",
        min_length=1,
        description="`tokenizer`: the template of the tokenizer; `plain`: contents one after "
        "another, each response ended by the end-of-document token; else a Jinja file.",
    )
    separator: str = Field(
        default="\n", description="What `plain` writes after everything but a response."
    )
    template_options: dict[str, bool | int | float | str] = Field(
        default_factory=dict,
        description="Further variables of the template, as `enable_thinking` or `date_string`.",
    )

    @field_validator("prompt_key", mode="before")
    @classmethod
    def _one_column_is_a_list_of_one(cls, columns: object) -> object:
        return (columns,) if isinstance(columns, str) else columns


class SourceConfig(Section):
    """One corpus of the blend."""

    format: SourceFormat = Field(
        examples=["text"],
        description="`text` and `jsonl` (plain, .gz or .zst), `parquet`, `arrow` (files or saved "
        "datasets), `megatron` (.bin/.idx pairs), or `python_stdlib`: the source of the running "
        "Python's standard library.",
    )
    paths: tuple[str, ...] = Field(
        default=(),
        strict=False,
        description="Files or glob patterns, one or a list; prefixes (no .bin) for `megatron`; "
        "for `arrow` also folders of saved datasets; left out only for `python_stdlib`.",
    )
    weight: float = Field(
        default=1.0, gt=0, description="Share of this source, relative to the other weights."
    )
    text_key: str = Field(
        default="text",
        min_length=1,
        description="Field or column with the text, of `jsonl`, `parquet` and `arrow`.",
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
    conversation: ConversationConfig | None = Field(
        default=None,
        description="Rows of `jsonl`, `parquet` or `arrow` are conversations: `{}` or how; null: "
        "documents.",
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
        description="Folder for prepared conversations and for the index files of `megatron` "
        "sources; null: below `output`. Runs of the same data may share it.",
    )
    distill_on_prompt: bool = Field(
        default=False,
        description="The teacher's distribution counts on prompts of conversations too; the labels "
        "there are never trained.",
    )
    train_on: Literal["all_responses", "last_response"] = Field(
        default="all_responses", description="Which responses of a conversation are trained."
    )
    truncation: Literal["right", "left", "split", "drop", "error"] = Field(
        default="right",
        description="A conversation longer than the sequence: keep its beginning (each label then "
        "has its whole context), its end, all of it in pieces, nothing, or stop.",
    )
    packing_buffer: int = Field(
        default=4096,
        ge=1,
        description="Conversations that are put into sequences together: more fill them better.",
    )
    workers: int | None = Field(
        default=None,
        ge=0,
        le=256,
        description="Processes that prepare conversations; 0: none; null: by cores and size.",
    )
