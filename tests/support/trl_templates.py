"""The chat templates that TRL's package carries, tokenizers with their special tokens, dialogues.

TRL keeps copies of the templates of released models, and for most of them a twin with generation
blocks, which it trains on in their place.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Mapping
from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Any

from megatron_distill.data.tokenizers.hugging_face import HuggingFaceTokenizer
from megatron_distill.data.tokenizers.open import train_bpe
from tests.support.chat_fixtures import TOOLS, tool_dialogue, turns

THOUGHT = "<think>\nhm\n</think>\n\n"


def calls(*cities: str) -> list[dict[str, Any]]:
    """A response that calls a tool for each city, and the tool's results."""
    wanted = [
        {
            "type": "function",
            "function": {"name": "weather", "arguments": {"city": city}},
            "id": f"call{city:_<5}",
        }
        for city in cities
    ]
    text = {"role": "assistant", "content": None, "tool_calls": wanted}
    results = [
        {"role": "tool", "content": f"sun in {place}", "tool_call_id": call["id"]}
        for place, call in enumerate(wanted)
    ]
    return [text, *results]


DIALOGUES: Mapping[str, tuple[list[dict[str, Any]], list[Any] | None]] = {
    "one turn": (turns("Hi", "Yo!"), None),
    "two turns": (turns("Hi", "Yo!", "2+2?", "4"), None),
    "system": (turns("Hi", "Yo!", "2+2?", "4", system="Be brief."), None),
    "thought": (turns("2+2?", f"{THOUGHT}4"), None),
    "thought last": (turns("Hi", "Yo!", "2+2?", f"{THOUGHT}4"), None),
    "thought first": (turns("Hi", f"{THOUGHT}Yo!", "2+2?", "4"), None),
    "call": (tool_dialogue(answer=None), TOOLS),
    "text and call": (tool_dialogue(answer="Wait."), TOOLS),
    "call and turn": (tool_dialogue(also=["Sure?", "Yes."]), TOOLS),
    "two calls": (turns("Hi") + calls("Paris", "Rome") + turns("Hi", "Yo!")[1:], TOOLS),
    "calls in a row": (
        turns("Hi") + calls("Paris") + calls("Rome") + turns("", "Yo!", "2+2?", "4")[1:],
        TOOLS,
    ),
}
CALLS = tuple(name for name in DIALOGUES if "call" in name)

# End-of-turn tokens by prefix of a template's name; the longest prefix applies.
STOPS: Mapping[str, tuple[str, ...]] = {
    "cohere": ("<|END_OF_TURN_TOKEN|>",),
    "deepseek": ("<｜end▁of▁sentence｜>",),
    # The distilled models' template ends a turn of one call with nothing else.
    "deepseek_r1_distill": ("<｜end▁of▁sentence｜>", "<｜tool▁call▁end｜>"),
    "diffusion_gemma": ("<turn|>", "<|tool_response>"),
    "gemma": ("<end_of_turn>",),
    "gemma4": ("<turn|>", "<|tool_response>"),
    "glm4": ("<|user|>", "<|observation|>"),
    "gptoss": ("<|return|>", "<|end|>", "<|call|>"),
    "idefics": ("<end_of_utterance>",),
    "lfm": ("<|im_end|>",),
    "llama": ("<|eot_id|>",),
    "llava": ("</s>",),
    "muse": ("<|eot|>",),
    "nemotron": ("<|im_end|>",),
    "phi": ("<|end|>", "<|endoftext|>"),
    "qwen": ("<|im_end|>",),
    "smolvlm": ("<end_of_utterance>",),
}
_SPECIAL = re.compile(
    r"<\|[A-Za-z_]+\|?>|<[A-Za-z_]+\|>|<｜[^｜]+｜>|<(?:start|end)_of_[a-z]+>|\[/?INST\]|\[gMASK\]"
)
_TAGS = ("<think>", "</think>", "<tool_call>", "</tool_call>")


def folder() -> Path | None:
    """Where TRL is installed, found without importing it."""
    spec = importlib.util.find_spec("trl")
    if spec is None or spec.origin is None:
        return None
    found = Path(spec.origin).parent / "chat_templates"
    return found if found.is_dir() else None


@cache
def sources() -> dict[str, str]:
    """Template and twin by name; a twin's ends in _training."""
    found = folder()
    paths = sorted(found.glob("*.jinja")) if found is not None else []
    return {path.stem: path.read_text(encoding="utf-8") for path in paths}


NAMES = [name for name in sources() if not name.endswith("_training")]
TWINS = [name for name in NAMES if f"{name}_training" in sources()]


def stops(name: str) -> tuple[str, ...]:
    return STOPS[max((start for start in STOPS if name.startswith(start)), key=len)]


@cache
def _words() -> Any:
    texts = ["the assistant says hello, what is the weather in Paris? It is sunny there."] * 8
    return train_bpe(texts, vocab_size=300).hugging_face


@cache
def tokenizer(name: str, *, has_tags: bool) -> HuggingFaceTokenizer:
    """A small BPE with a template and its special tokens; `has_tags`: those of thoughts as well."""
    source = sources()[name]
    hugging_face = deepcopy(_words())
    tags = [tag for tag in _TAGS if has_tags and tag in source]
    tokens = {*_SPECIAL.findall(source), *stops(name), *tags, "<|endoftext|>"}
    end = "<|endoftext|>" if name.startswith(("glm4", "phi", "gemma")) else stops(name)[0]
    hugging_face.add_special_tokens(
        {
            "bos_token": "<bos>",
            "eos_token": end,
            "additional_special_tokens": sorted(tokens - {end}),
        }
    )
    hugging_face.chat_template = source
    return HuggingFaceTokenizer(hugging_face, name=name)
