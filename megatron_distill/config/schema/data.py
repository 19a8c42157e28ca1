"""The section `data`."""

from typing import Literal, get_args

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
# The rows of data/formats.py, grouped by the rules for them; a test compares the two.
ConversationFormat = Literal["jsonl", "parquet", "arrow"]
TokenizedFormat = Literal["megatron"]
PathlessFormat = Literal["python_stdlib"]
SourceFormat = Literal["text", ConversationFormat, TokenizedFormat, PathlessFormat]
MessageRole = Literal["system", "developer", "user", "assistant", "tool", "ipython"]


class ConversationConfig(Section):
    """Columns of a conversation in a row, and its rendering."""

    messages_key: str = Field(
        default="messages", min_length=1, description="Field or column of the list of messages."
    )
    role_key: str = Field(
        default="role",
        min_length=1,
        description="Field of the role in a message (ShareGPT: `from`).",
    )
    content_key: str = Field(
        default="content",
        min_length=1,
        description="Field of the content in a message (ShareGPT: `value`).",
    )
    roles: dict[str, MessageRole] = Field(
        default_factory=dict,
        description="Additional names of roles, mapped to known ones. human, gpt, model, bot and "
        "function are known.",
    )
    prompt_key: tuple[str, ...] = Field(
        default=(),
        strict=False,
        description="Columns of the prompt, instead of a list of messages. Several columns are "
        "joined by an empty line; empty ones are skipped.",
    )
    response_key: str = Field(
        default="response", min_length=1, description="Column of the response, with `prompt_key`."
    )
    system_key: str | None = Field(
        default=None, min_length=1, description="Column of the system prompt, with `prompt_key`."
    )
    tools_key: str = Field(
        default="tools",
        min_length=1,
        description="Field or column of the tools' JSON schemas; a row may lack it.",
    )
    weight_key: str = Field(
        default="weight",
        min_length=1,
        description="Field of the loss weight in a message, from 0 (not trained) to 1; rounded to"
        " a multiple of 1/64.",
    )
    leading_assistant: Literal["drop", "keep", "refuse"] = Field(
        default="drop",
        description="Responses before the first prompt (common in ShareGPT): `drop` removes and "
        "counts them, `keep` passes them to the template, `refuse` treats the row as bad.",
    )
    chat_template: str = Field(
        default="tokenizer",
        min_length=1,
        description="`tokenizer`: the tokenizer's template; `plain`: contents in sequence, with "
        "an end-of-document token after each response; otherwise a Jinja file.",
    )
    separator: str = Field(
        default="\n", description="Text that `plain` writes after every message except responses."
    )
    template_options: dict[str, bool | int | float | str] = Field(
        default_factory=dict,
        description="Additional variables of the template, such as `enable_thinking` or "
        "`date_string`.",
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
        "datasets), or `megatron` (.bin/.idx pairs). `python_stdlib` is the source of the running "
        "Python's standard library.",
    )
    paths: tuple[str, ...] = Field(
        default=(),
        strict=False,
        description="Files or glob patterns, one or a list. `megatron`: prefixes without .bin; "
        "`arrow`: also folders of saved datasets; `python_stdlib`: none.",
    )
    weight: float = Field(
        default=1.0,
        gt=0,
        description="Share of this source in the blend, relative to the other weights.",
    )
    text_key: str = Field(
        default="text",
        min_length=1,
        description="Field or column of the text, for `jsonl`, `parquet` and `arrow`.",
    )
    documents: Literal["file", "line"] = Field(
        default="file", description="Unit of a document in a `text` source."
    )
    name: str | None = Field(
        default=None,
        pattern=SOURCE_NAME,
        examples=["wiki"],
        description="Name of this source in the log; null: the first path's file name without "
        "endings, for a pattern its folder, else the format.",
    )
    teacher: str | None = Field(
        default=None,
        min_length=1,
        examples=["math"],
        description="With `teachers`: the teacher of this source's samples, for terms that name "
        "none.",
    )
    teacher_field: str | None = Field(
        default=None,
        min_length=1,
        examples=["domain"],
        description="With `teachers`: field or column with the name of each row's teacher, for "
        "`jsonl`, `parquet` and `arrow`. Rows of one teacher are packed together.",
    )
    conversation: ConversationConfig | None = Field(
        default=None,
        description="Read the rows of `jsonl`, `parquet` or `arrow` as conversations; `{}` for "
        "the defaults. null: rows are documents.",
    )

    @field_validator("paths", mode="before")
    @classmethod
    def _one_path_is_a_list_of_one(cls, paths: object) -> object:
        return (paths,) if isinstance(paths, str) else paths

    @property
    def is_tokenized(self) -> bool:
        """Whether its files hold token ids instead of text."""
        return self.format in get_args(TokenizedFormat)

    @property
    def log_name(self) -> str:
        """`name`, or a name derived from the first path."""
        return self.name or (name_of_path(self.paths[0]) if self.paths else self.format)


class TokenizerConfig(Section):
    """The tokenizer: files, a name, or trained on the sources; empty: that of a model."""

    path: str | None = Field(
        default=None,
        min_length=1,
        description="Hugging Face folder with `tokenizer.json`, SentencePiece `.model` file, "
        "`.tiktoken` rank file, or a folder with one of these files.",
    )
    encoding: EncodingName | None = Field(
        default=None,
        description="Name of a tiktoken encoding; its rank file must be in tiktoken's cache.",
    )
    train_vocab_size: int | None = Field(
        default=None,
        ge=260,
        description="Train a byte-level BPE of this size on the sources and save it in "
        "`output/tokenizer`. It includes 256 bytes and the special tokens.",
    )
    train_bytes: int = Field(
        default=4_000_000, ge=1, description="Bytes of text to train that tokenizer on."
    )


class DataConfig(Section):
    """The data, its tokenizer and its packing into sequences."""

    sources: tuple[SourceConfig, ...] = Field(
        default=(),
        strict=False,
        examples=[[{"format": "python_stdlib"}]],
        description="The corpora, blended by weight. May be empty with `teacher.store`: the "
        "samples of the store are then the training data.",
    )
    tokenizer: TokenizerConfig = Field(
        default_factory=TokenizerConfig,
        examples=[{"path": "tokenizers/llama3"}],
        description="The tokenizer; if empty, that of `student.hf`, `teacher.hf` or "
        "`teacher.store`.",
    )
    sequence_length: int = Field(
        ge=2, examples=[4096], description="Tokens in one packed sequence."
    )
    isolate_documents: bool = Field(
        default=True,
        description="Block attention across documents and restart positions at each document.",
    )
    add_bos: bool | None = Field(
        default=None,
        description="Begin each document with its tokenizer's begin-of-text token. null: where the "
        "tokenizer's own files add it to a text (Llama, Gemma); `false`: never. Templates decide "
        "for conversations, and `megatron` sources have the tokens that were written.",
    )
    validation_fraction: float = Field(
        default=0.02,
        ge=0,
        lt=1,
        description="Share of the documents that is held out of training, selected by hash; of a "
        "`megatron` source the last ones of the file.",
    )
    validation_sources: tuple[SourceConfig, ...] = Field(
        default=(),
        strict=False,
        description="Corpora for validation, instead of `validation_fraction`.",
    )
    shuffle_buffer: int = Field(
        default=256, ge=1, description="Documents per shuffled block; 1: no shuffling of documents."
    )
    shuffle_samples: int = Field(
        default=1024,
        ge=1,
        description="Packed samples per shuffled window, which spreads long documents over "
        "batches; 1: no shuffling of samples. Two windows are in memory.",
    )
    on_error: Literal["raise", "skip"] = Field(
        default="raise",
        description="Bad records: `raise` stops the run, `skip` counts and reports them.",
    )
    cache: str | None = Field(
        default=None,
        min_length=1,
        description="Folder for prepared conversations, aligned documents, vocabulary maps and "
        "index files of `megatron` sources. Runs on the same data may share it. null: within "
        "`output`, but index files are rebuilt at each start.",
    )
    document_cache_gib: float = Field(
        default=16.0,
        ge=0,
        description="Two tokenizers: largest size in GiB of the documents in both tokens in "
        "`data.cache`, about 10 bytes per token. Further epochs and runs then tokenise only new "
        "texts. Documents beyond it are encoded in each epoch; 0: no cache.",
    )
    distill_on_prompt: bool = Field(
        default=False,
        description="Include the prompts of conversations in distillation; the cross-entropy "
        "never includes them.",
    )
    train_on: Literal["all_responses", "last_response"] = Field(
        default="all_responses", description="Responses of a conversation that are trained."
    )
    truncation: Literal["right", "left", "split", "drop", "error"] = Field(
        default="right",
        description="Conversations longer than the sequence: keep the beginning (`right`), keep "
        "the end (`left`), cut into pieces (`split`), leave out (`drop`), or stop (`error`).",
    )
    packing_buffer: int = Field(
        default=4096,
        ge=1,
        description="Conversations that are packed into sequences together; a larger buffer "
        "leaves less padding.",
    )
    workers: int | None = Field(
        default=None,
        ge=0,
        le=256,
        description="Processes that prepare conversations, and that tokenise and align the texts "
        "of two tokenizers, for all sources together; 0: none. null, conversations: one per 16 MiB,"
        " at most one per core and 16, none below 32 MiB. null, texts: 2 with 8 cores or more, else"
        " 0.",
    )
    max_unaligned: float = Field(
        default=0.01,
        ge=0,
        le=1,
        description="Two tokenizers: largest share of documents or conversations without a chunk "
        "of both, counted over at least 100; likewise of documents that a store lacks. They are "
        "left out; those that a store in the student's tokens lacks, of terms without alignment "
        "alone. More of them stop the run.",
    )
