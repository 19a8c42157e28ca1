"""A published model's files: weights as llama2.c computes with them, pieces, draws, figures."""

import math
import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from transformers import LlamaForCausalLM

from benchmarks.published import TOLERANCE, differences
from benchmarks.published_models.draws import Coins, draw
from benchmarks.published_models.llama2c import Page, read_page, read_weights, write_folder
from megatron_distill.data.tokenizers.open import load_tokenizer

Array = NDArray[np.float64]
WIDTH, INNER, LAYERS, HEADS, GROUPS, PIECES, POSITIONS = 16, 12, 2, 4, 2, 263, 8
HEAD = WIDTH // HEADS
SIZES = {
    "embedding": (PIECES, WIDTH), "norm_1": (LAYERS, WIDTH), "query": (LAYERS, WIDTH, WIDTH),
    "key": (LAYERS, GROUPS * HEAD, WIDTH), "value": (LAYERS, GROUPS * HEAD, WIDTH),
    "output": (LAYERS, WIDTH, WIDTH), "norm_2": (LAYERS, WIDTH), "gate": (LAYERS, INNER, WIDTH),
    "down": (LAYERS, WIDTH, INNER), "up": (LAYERS, INNER, WIDTH), "norm": (WIDTH,),
    "rotations": (2, POSITIONS, HEAD // 2),
}  # fmt: skip
PAGE = f"""\
```
python train.py \\
    --max_seq_len={POSITIONS} \\
    --vocab_size={PIECES} \\
    --dim={WIDTH} \\
    --learning_rate=1e-3 \\
    --n_kv_heads={GROUPS} \\
```
It achieves validation loss of 1.25.

```
$ ./run a.bin -z b.bin -t 0.0
One
two.
```

```
$ ./run a.bin -z b.bin -t 0.8 -p 0.9 -s 7
Three.
```
"""


def page(folder: Path) -> Page:
    path = folder / "page.md"
    path.write_text(PAGE, encoding="utf-8")
    return read_page(path)


def files(folder: Path) -> tuple[Path, Path, dict[str, Array]]:
    """Random weights and some pieces, in llama2.c's formats, and the weights by name."""
    source = np.random.default_rng(5)
    found = {name: source.normal(size=sizes).astype("<f4") for name, sizes in SIZES.items()}
    weights, pieces = folder / "a.bin", folder / "b.bin"
    header = struct.pack("<7i", WIDTH, INNER, LAYERS, HEADS, GROUPS, PIECES, POSITIONS)
    weights.write_bytes(header + b"".join(one.tobytes() for one in found.values()))
    spelled = [b"<unk>", b"\n<s>\n", b"\n</s>\n", *(b"<0x%02X>" % byte for byte in range(256))]
    spelled += [b" a", b" ", b"a", b"b"]
    rows = [(-float(max(0, n - 259)), text) for n, text in enumerate(spelled)]
    content = b"".join(struct.pack("<fi", score, len(text)) + text for score, text in rows)
    pieces.write_bytes(struct.pack("<i", 7) + content)
    return weights, pieces, {name: one.astype(float) for name, one in found.items()}


def normed(x_nh: Array, weight_h: Array) -> Array:
    scaled: Array = weight_h * x_nh / np.sqrt((x_nh**2).mean(-1, keepdims=True) + 1e-5)
    return scaled


def rotated(x_nd: Array) -> Array:
    """Neighbours as in `run.c`: numbers 2i and 2i + 1 turn together."""
    found = x_nd.copy()
    for position, row in enumerate(x_nd):
        for first in range(0, HEAD, 2):
            turn = complex(row[first], row[first + 1]) * np.exp(
                1j * position / 10000 ** (first / HEAD)
            )
            found[position, first : first + 2] = turn.real, turn.imag
    return found


def reference_logits(ids: list[int], w: dict[str, Array]) -> Array:
    x = w["embedding"][ids]
    future = np.triu(np.full((len(ids), len(ids)), -math.inf), 1)
    for n in range(LAYERS):
        a = normed(x, w["norm_1"][n])
        heads = []
        for head in range(HEADS):
            own = slice(head * HEAD, (head + 1) * HEAD)
            group = head * GROUPS // HEADS
            shared = slice(group * HEAD, (group + 1) * HEAD)
            query, key = rotated(a @ w["query"][n][own].T), rotated(a @ w["key"][n][shared].T)
            scores = query @ key.T / math.sqrt(HEAD) + future
            shares = np.exp(scores - scores.max(-1, keepdims=True))
            shares /= shares.sum(-1, keepdims=True)
            heads.append(shares @ (a @ w["value"][n][shared].T))
        x = x + np.concatenate(heads, -1) @ w["output"][n].T
        a = normed(x, w["norm_2"][n])
        gate = a @ w["gate"][n].T
        x = x + (gate / (1 + np.exp(-gate)) * (a @ w["up"][n].T)) @ w["down"][n].T
    logits: Array = normed(x, w["norm"]) @ w["embedding"].T
    return logits


def test_the_folder_computes_as_llama2c_does_with_the_file(tmp_path: Path) -> None:
    weights, pieces, numbers = files(tmp_path)
    write_folder(tmp_path / "hf", weights, pieces, page(tmp_path))
    model = LlamaForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float64)
    ids = [1, 259, 262, 13, 3, 261]
    with torch.no_grad():
        found = model(torch.tensor([ids])).logits[0].numpy()
    np.testing.assert_allclose(found, reference_logits(ids, numbers), rtol=1e-5, atol=1e-5)


def test_pieces_split_texts_as_their_sentencepiece_model_did(tmp_path: Path) -> None:
    weights, pieces, _ = files(tmp_path)
    write_folder(tmp_path / "hf", weights, pieces, page(tmp_path))
    tokenizer = load_tokenizer(tmp_path / "hf")
    (ids,) = tokenizer.encode_batch(["ab  a\nc"])
    assert ids.tolist() == [259, 262, 259, 3 + 10, 3 + ord("c")]
    assert (tokenizer.bos_id, tokenizer.eos_id) == (1, 2)
    assert tokenizer.decode(ids.tolist()).lstrip() == "ab a\nc"


def test_files_of_another_model_are_refused(tmp_path: Path) -> None:
    weights, pieces, _ = files(tmp_path)
    own, content = page(tmp_path), weights.read_bytes()
    weights.write_bytes(struct.pack("<i", 2 * WIDTH) + content[4:])
    with pytest.raises(SystemExit, match=f"dim is {2 * WIDTH}, on the page {WIDTH}"):
        read_weights(weights, own)
    weights.write_bytes(content[:-8])
    with pytest.raises(SystemExit, match="ends too early"):
        read_weights(weights, own)
    weights.write_bytes(content + bytes(8))
    with pytest.raises(SystemExit, match="2 numbers more than its header"):
        read_weights(weights, own)
    weights.write_bytes(content)
    pieces.write_bytes(pieces.read_bytes() + bytes(1))
    with pytest.raises(SystemExit, match=f"not a vocabulary of {PIECES} pieces"):
        write_folder(tmp_path / "hf", weights, pieces, own)


def test_a_page_gives_its_texts_its_loss_and_its_shape(tmp_path: Path) -> None:
    found = page(tmp_path)
    assert (found.greedy.text, found.greedy.temperature) == ("One\ntwo.", 0)
    sampled = found.sampled
    assert (sampled.temperature, sampled.top_p, sampled.seed) == (0.8, 0.9, 7)
    assert sampled.text == "Three."
    assert found.loss == 1.25
    assert found.shape["dim"] == WIDTH
    (tmp_path / "page.md").write_text(PAGE.replace("-s 7", ""), encoding="utf-8")
    with pytest.raises(SystemExit, match="-s SEED"):
        read_page(tmp_path / "page.md")


def test_coins_are_those_of_the_generator_in_c() -> None:
    coins = Coins(133742)  # of run.c's random_f32, times 2^24
    assert [round(coins.next() * 2**24) for _ in range(4)] == [11849731, 10446788, 9034627, 8935217]


def test_a_draw_is_from_the_likeliest_tokens() -> None:
    # In the order of probability: ids 2, 0, 3, of which the mass of 0.9 has all three, and 1.
    shares = np.array([0.3, 0.05, 0.5, 0.15], np.float32)
    found = [draw(shares, top_p=0.9, coin=coin) for coin in (0.0, 0.6, 0.99)]
    assert [one.token for one in found] == [2, 0, 3]
    assert found[1].margin == pytest.approx(0.6 * 0.95 - 0.5, abs=1e-6)
    assert draw(shares, top_p=0.7, coin=0.99).token == 0


def test_each_figure_that_differs_is_named(tmp_path: Path) -> None:
    own = page(tmp_path)
    equal = {
        "greedy": True, "sampled": "Three.", "first_other_token": {"0.784": 2},
        "loss": own.loss + 0.9 * TOLERANCE,
    }  # fmt: skip
    assert differences(equal, own) == []
    (greedy,) = differences({**equal, "greedy": False}, own)
    assert "greedy" in greedy
    (drawn,) = differences({**equal, "sampled": "Thirty"}, own)
    assert "character 2: 'irty' instead of 'ree.'" in drawn
    (control,) = differences({**equal, "first_other_token": {"0.784": None}}, own)
    assert "also drawn at temperature 0.784" in control
    (loss,) = differences({**equal, "loss": own.loss + 1.1 * TOLERANCE}, own)
    assert "1.2610 nats per token, 1.25 on the page" in loss
