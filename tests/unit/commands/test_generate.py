"""Text on a terminal while it is written, and a tokenizer that is not there."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_distill.cli import main
from megatron_distill.commands.generate import _Terminal
from megatron_distill.data.tokenizers.open import train_bpe


def test_each_call_shows_certain_text_and_the_end_shows_the_rest(
    capsys: pytest.CaptureFixture[str],
) -> None:
    # Of single bytes, so that the accented letter is two ids.
    tokenizer = train_bpe(["a"], vocab_size=260)
    ids = [int(one) for one in tokenizer.encode_batch(["b\u00e9\n\nc"])[0]]
    accented = len(ids) - 4, len(ids) - 3
    terminal = _Terminal(tokenizer, (), ("\n\nQ",), "the prompt: ")
    shown = [capsys.readouterr().out]
    with terminal:
        for token in ids:
            terminal.show(0, [token])
            shown.append(capsys.readouterr().out)
    shown.append(capsys.readouterr().out)
    assert "".join(shown) == "the prompt: b\u00e9\n\nc\n"
    assert shown[0] == "the prompt: "
    first, second = (shown[place] for place in accented)
    assert (first, second) == ("", "\u00e9"), "no half of a character is shown"
    assert shown[-4:] == ["", "", "\n\nc", "\n"], "a stop string may begin"


def test_an_interruption_ends_the_line(capsys: pytest.CaptureFixture[str]) -> None:
    terminal = _Terminal(train_bpe(["a"], vocab_size=260), (), (), "def ")

    def interrupted() -> None:
        with terminal:
            terminal.show(0, [100])
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert capsys.readouterr().out.endswith("\n")


@pytest.mark.parametrize("kind", ["--checkpoint", "--hf"])
def test_a_tokenizer_that_is_not_there_is_named_by_its_option(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text("{}")
    other = tmp_path / "other"
    status = main(["generate", kind, str(tmp_path), "--tokenizer", str(other), "--prompt", "a"])
    assert status == 1
    message = " ".join(capsys.readouterr().err.split())
    assert f"--tokenizer {other}: no tokenizer is there; give a folder with" in message
