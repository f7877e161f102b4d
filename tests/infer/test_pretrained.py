"""GGUF files: a small one that is made here and read back, damaged ones, and the pretrained one where it is there."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from tq.infer import pretrained
from tq.train.model import GPT, GPTConfig

gguf = pytest.importorskip("gguf", reason="needs gguf")
CONFIG = GPTConfig(
    layers=2, hidden=32, heads=4, vocab=260, seq=64, kv_heads=2, ffn=64, activation="swiglu", norm_eps=1e-5
)
HERE = pretrained.obstacle()


def beside(weight: Tensor, head: int) -> Tensor:
    """The order of a head's rows in GGUF files: numbers that one rotary angle turns beside each other."""
    rows, columns = weight.shape
    return weight.view(rows // head, 2, head // 2, columns).transpose(1, 2).reshape(rows, columns)


def written(
    path: Path, model: GPT, *, kind: str = "llama", tokens: int = 260, skip: str = "", nan: bool = False
) -> Path:
    config = model.config
    writer = gguf.GGUFWriter(path, kind)
    writer.add_block_count(config.layers)
    writer.add_context_length(config.seq)
    writer.add_embedding_length(config.hidden)
    writer.add_feed_forward_length(config.ffn_width)
    writer.add_head_count(config.heads)
    writer.add_head_count_kv(config.groups)
    writer.add_rope_freq_base(config.rope_theta)
    writer.add_layer_norm_rms_eps(config.norm_eps)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    letters = [chr(c) for c in range(33, 127)] + [chr(c) for c in range(256, 256 + tokens - 94 - 2)]
    writer.add_token_list([*letters, "<end>", "he"][:tokens])
    writer.add_token_types([1] * (tokens - 2) + [3, 1])
    writer.add_token_merges(["h e"])
    writer.add_eos_token_id(tokens - 2)
    state = model.state_dict()
    names = {"embed.weight": "token_embd.weight", "final_norm.weight": "output_norm.weight"}
    theirs = {
        "attention_norm": "attn_norm", "attention.query": "attn_q", "attention.key": "attn_k",
        "attention.value": "attn_v", "attention.out": "attn_output", "mlp_norm": "ffn_norm", "mlp.gate": "ffn_gate",
        "mlp.up": "ffn_up", "mlp.down": "ffn_down",
    }  # fmt: skip
    for layer in range(config.layers):
        names |= {f"blocks.{layer}.{ours}.weight": f"blk.{layer}.{their}.weight" for ours, their in theirs.items()}
    for ours, their in names.items():
        value = state[ours]
        if their.endswith(("attn_q.weight", "attn_k.weight")):
            value = beside(value, config.head_size)
        array = value.numpy().copy()
        if nan and their.endswith("ffn_up.weight"):
            array[0, 0] = np.nan
        if their != skip:
            writer.add_tensor(their, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TQ_CACHE", str(tmp_path / "cache"))


def test_a_file_gives_the_model_that_it_was_made_of(tmp_path: Path) -> None:
    model = GPT(CONFIG, seed=3)
    path = written(tmp_path / "small.gguf", model)
    for _ in range(2):  # converted, then from the cache
        language = pretrained.load(path)
        ids = torch.randint(260, (2, 20), generator=torch.Generator().manual_seed(0))
        assert torch.equal(language.model(ids)[0], model(ids)[0])
        assert language.model.config == CONFIG and language.end == 258 and language.name == "small.gguf"
        assert language.model.head.weight is language.model.embed.weight
        assert language.encode("he<end>").tolist() == [259, 258] and language.decode(torch.tensor([259])) == "he"
        path.touch()


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"kind": "gemma"}, "architecture 'gemma'"),
        ({"skip": "blk.1.ffn_up.weight"}, "has no tensor blk.1.ffn_up.weight"),
        ({"nan": True}, "not finite"),
        ({"tokens": 250}, "has 250 tokens for a model of 260"),
    ],
)
def test_files_that_do_not_fit(changed: dict, said: str, tmp_path: Path) -> None:
    path = written(tmp_path / "odd.gguf", GPT(CONFIG), **changed)
    with pytest.raises(ValueError, match=said):
        pretrained.load(path)
    assert not list(tmp_path.glob("cache/**/*.safetensors"))


def test_damaged_files(tmp_path: Path) -> None:
    path = written(tmp_path / "small.gguf", GPT(CONFIG))
    content = path.read_bytes()
    for bad in (b"", b"x" * 5000, content[:3], content[:40], content[: len(content) // 2], content[:-5000]):
        path.write_bytes(bad)
        with pytest.raises(ValueError, match=r"no whole GGUF|cannot be read|must have shape"):
            pretrained.load(path)
    with pytest.raises(FileNotFoundError):
        pretrained.load(tmp_path / "none.gguf")


def test_where_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(pretrained.SETTING, raising=False)
    monkeypatch.setattr(pretrained, "PACKAGE", "not-a-package")
    assert pretrained.find() is None and "tq.infer fetch" in str(pretrained.obstacle())
    with pytest.raises(FileNotFoundError, match="tq.infer fetch"):
        pretrained.load()


@pytest.mark.skipif(HERE is not None, reason=f"needs a pretrained model: {HERE}")
def test_the_pretrained_model_knows_its_capitals(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TQ_CACHE")
    language = pretrained.load()
    ids = language.encode("The capital of France is")
    with torch.no_grad():
        assert language.decode(language.model(ids[None])[0][0, -1].argmax()[None]) == " Paris"
    assert language.model.num_parameters == 134_515_008
