"""Llama-like models of GGUF files, as the book's GPT and a tokenizer. Nothing in a file is executed.

Refused: architectures other than "llama", tokenizers other than byte-level BPE, and files that do not hold what they
say: each by one ``ValueError``. Names: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tq.train.model.gpt import GPTConfig

_SPECIAL = 3  # the type of control tokens
_PARTS = {  # of a block: the file's names by the model's
    "attention_norm.weight": "attn_norm",
    "attention.query.weight": "attn_q",
    "attention.key.weight": "attn_k",
    "attention.value.weight": "attn_v",
    "attention.out.weight": "attn_output",
    "mlp_norm.weight": "ffn_norm",
    "mlp.gate.weight": "ffn_gate",
    "mlp.up.weight": "ffn_up",
    "mlp.down.weight": "ffn_down",
}
_ODD = {"smollm": True, "smollm2": True, "gpt-2": False}  # pre-tokenizers: whether digits stand alone


class GGUF:
    """An opened file.

    Args:
        path: of the file.
    Raises:
        ValueError: it is no GGUF file, truncated, or of something that is not known here.
        ImportError: the package ``gguf`` is missing.
    """

    def __init__(self, path: Path) -> None:
        try:
            from gguf import GGUFReader
        except ImportError as error:
            raise ImportError("GGUF files need gguf and tokenizers (pip install 'tq-book[infer]')") from error
        self.path = path
        try:
            self._reader = GGUFReader(path)
        except FileNotFoundError:
            raise
        except Exception as error:  # what its reader raises on damaged files is of many kinds
            raise ValueError(f"{path} is no whole GGUF file: {type(error).__name__}: {error}") from error
        self._tensors = {tensor.name: tensor for tensor in self._reader.tensors}
        known = self.value("general.architecture")
        if known != "llama":
            raise ValueError(f"{path} holds a model of architecture {known!r}; known is 'llama' alone")

    def value(self, key: str, default: Any = None) -> Any:
        """Metadata; ValueError where it is missing and there is no default."""
        field = self._reader.get_field(key)
        if field is None:
            if default is None:
                raise ValueError(f"{self.path} does not say {key}")
            return default
        return field.contents()

    def config(self) -> GPTConfig:
        """The shape of its model."""
        heads, vocab = int(self.value("llama.attention.head_count")), self._tensor("token_embd.weight").shape
        return GPTConfig(
            layers=int(self.value("llama.block_count")),
            hidden=int(self.value("llama.embedding_length")),
            heads=heads,
            vocab=int(vocab[-1]),
            seq=int(self.value("llama.context_length")),
            kv_heads=int(self.value("llama.attention.head_count_kv", heads)),
            ffn=int(self.value("llama.feed_forward_length")),
            activation="swiglu",
            tie_embeddings="output.weight" not in self._tensors,
            rope_theta=_short(self.value("llama.rope.freq_base", 10000.0)),
            norm_eps=_short(self.value("llama.attention.layer_norm_rms_epsilon")),
        )

    def state(self, config: GPTConfig) -> dict[str, Tensor]:
        """Its weights in fp32, by the names of ``GPT``; ValueError where one is missing, misshapen or not finite."""
        width, head = config.hidden, config.head_size
        shapes = {"attention.query.weight": config.heads * head, "attention.key.weight": config.groups * head}
        shapes |= {"attention.value.weight": config.groups * head, "attention.out.weight": width}
        shapes |= {name: config.ffn_width for name in ("mlp.gate.weight", "mlp.up.weight")} | {"mlp.down.weight": width}
        state = {"embed.weight": self.tensor("token_embd.weight", (config.vocab, width))}
        state["final_norm.weight"] = self.tensor("output_norm.weight", (width,))
        head_name = "token_embd.weight" if config.tie_embeddings else "output.weight"
        state["head.weight"] = self.tensor(head_name, (config.vocab, width))
        inner = {"attention.out.weight": config.heads * head, "mlp.down.weight": config.ffn_width}
        for layer in range(config.layers):
            for name, theirs in _PARTS.items():
                shape = (shapes[name], inner.get(name, width)) if name in shapes else (width,)
                value = self.tensor(f"blk.{layer}.{theirs}.weight", shape)
                if theirs in ("attn_q", "attn_k"):
                    value = _halves(value, head)
                state[f"blocks.{layer}.{name}"] = value
        return state

    def _tensor(self, name: str) -> Any:
        if name not in self._tensors:
            raise ValueError(f"{self.path} has no tensor {name}")
        return self._tensors[name]

    def tensor(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """A tensor as fp32 numbers."""
        from gguf.quants import dequantize

        found = self._tensor(name)
        if tuple(int(n) for n in reversed(found.shape)) != shape:
            said = tuple(int(n) for n in reversed(found.shape))
            raise ValueError(f"{self.path}: {name} must have shape {shape}, got {said}")
        try:
            value = torch.from_numpy(dequantize(found.data, found.tensor_type).copy()).float().view(shape)
        except (NotImplementedError, ValueError, RuntimeError) as error:
            raise ValueError(f"{self.path}: {name} cannot be read: {error}") from error
        if not bool(value.isfinite().all()):
            raise ValueError(f"{self.path}: {name} holds numbers that are not finite")
        return value

    def tokenizer(self, config: GPTConfig) -> Any:
        """Its ``tokenizers.Tokenizer``; ValueError where it is not the model's, or of another kind."""
        from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

        kind, split = self.value("tokenizer.ggml.model"), self.value("tokenizer.ggml.pre", "gpt-2")
        if kind != "gpt2" or split not in _ODD:
            raise ValueError(f"{self.path} has a tokenizer {kind!r}, {split!r}; known is 'gpt2' with {list(_ODD)}")
        tokens = self.value("tokenizer.ggml.tokens")
        if len(tokens) != config.vocab or len(set(tokens)) != len(tokens):
            raise ValueError(f"{self.path} has {len(set(tokens))} tokens for a model of {config.vocab}")
        merges = [tuple(merge.split(" ", 1)) for merge in self.value("tokenizer.ggml.merges")]
        types = self.value("tokenizer.ggml.token_type", [1] * len(tokens))
        try:
            made = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
        except Exception as error:  # a merge of something that is no token
            raise ValueError(f"{self.path} has a damaged tokenizer: {error}") from error
        bytewise = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
        digits = [pre_tokenizers.Digits(individual_digits=True)] if _ODD[split] else []
        made.pre_tokenizer = pre_tokenizers.Sequence([*digits, bytewise])
        made.decoder = decoders.ByteLevel()
        made.add_special_tokens(
            [AddedToken(t, special=True, normalized=False) for t, k in zip(tokens, types, strict=True) if k == _SPECIAL]
        )
        return made


def _short(value: float) -> float:
    """A number of six digits that was stored in fp32."""
    return float(f"{value:.6g}")


def _halves(weight: Tensor, head: int) -> Tensor:
    """GGUF keeps the two numbers that a rotary angle turns beside each other, the model half a head apart."""
    rows, columns = weight.shape
    return weight.view(rows // head, head // 2, 2, columns).transpose(1, 2).reshape(rows, columns)
