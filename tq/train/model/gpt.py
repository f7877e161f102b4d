"""GPT: a decoder-only transformer (RMSNorm, RoPE, causal SDPA), one model for every experiment of the book.

Refused: dropout, biases, learned positions, key-value caches and sampling tricks. The model is trained, measured and
taken apart here; it does not serve. Weights are drawn from a generator of the model's own, so a seed fixes the bits
and the global generators stay as they were.

Shapes: B batch, T positions, C hidden, H query heads, K key/value heads, D = C / H head size, F feed-forward, V vocab.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

ACTIVATIONS = ("gelu", "relu2", "swiglu")


@dataclass(frozen=True)
class GPTConfig:
    """Shape of a GPT.

    Attributes:
        layers: number of blocks.
        hidden: width C of the hidden states, ``heads`` times an even head size.
        heads: query heads H.
        vocab: tokens V in the vocabulary.
        seq: longest sequence, in tokens.
        kv_heads: key/value heads (grouped-query attention), a divisor of ``heads``; None (default) means ``heads``.
        ffn: width F of the feed-forward layer; None (default) means 4C, or for "swiglu" 8C/3 rounded up to a multiple
            of 64.
        activation: "gelu" (default; tanh form, as GPT-2), "relu2" (Primer, So et al. 2021) or "swiglu" (Shazeer 2020).
        tie_embeddings: whether the output head is the transposed input embedding; True by default.
        rope_theta: base of the rotary frequencies (Su et al. 2021); 10000 by default.
        qk_norm: whether queries and keys are RMS-normalised before the rotation, without learned gain; False by
            default.
        norm_eps: epsilon of every RMSNorm; 1e-6 by default.

    Raises:
        ValueError: if a field is out of range, or the fields do not fit together.

    Example:
        >>> from tq.train.model import GPTConfig
        >>> config = GPTConfig(layers=2, hidden=64, heads=4, vocab=256, seq=128)
        >>> config.head_size, config.ffn_width, config.num_parameters
        (16, 256, 115008)
    """

    layers: int
    hidden: int
    heads: int
    vocab: int
    seq: int
    kv_heads: int | None = None
    ffn: int | None = None
    activation: str = "gelu"
    tie_embeddings: bool = True
    rope_theta: float = 10000.0
    qk_norm: bool = False
    norm_eps: float = 1e-6

    def __post_init__(self) -> None:
        for name in ("layers", "hidden", "heads", "vocab", "seq", "kv_heads", "ffn"):
            value = getattr(self, name)
            if value is None and name in ("kv_heads", "ffn"):
                continue
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"{name} must be a positive integer, got {value!r}")
        if self.hidden % self.heads or (self.hidden // self.heads) % 2:
            raise ValueError(
                f"hidden must be heads times an even head size (RoPE turns pairs), got hidden={self.hidden}, "
                f"heads={self.heads}"
            )
        if self.kv_heads is not None and self.heads % self.kv_heads:
            raise ValueError(f"kv_heads must divide heads={self.heads}, got {self.kv_heads}")
        if self.activation not in ACTIVATIONS:
            raise ValueError(f"activation must be one of {', '.join(ACTIVATIONS)}, got {self.activation!r}")
        for name in ("rope_theta", "norm_eps"):
            value = getattr(self, name)
            if not (isinstance(value, (int, float)) and math.isfinite(value) and value > 0):
                raise ValueError(f"{name} must be a positive finite number, got {value!r}")

    @property
    def head_size(self) -> int:
        """Width D of one head."""
        return self.hidden // self.heads

    @property
    def groups(self) -> int:
        """Key/value heads actually used."""
        return self.heads if self.kv_heads is None else self.kv_heads

    @property
    def ffn_width(self) -> int:
        """Feed-forward width actually used."""
        if self.ffn is not None:
            return self.ffn
        return 64 * math.ceil(8 * self.hidden / 3 / 64) if self.activation == "swiglu" else 4 * self.hidden

    @property
    def num_parameters(self) -> int:
        """Trainable parameters; a tied embedding is counted once."""
        attention = self.hidden * self.head_size * (2 * self.heads + 2 * self.groups)
        mlp = self.hidden * self.ffn_width * (3 if self.activation == "swiglu" else 2)
        embeddings = self.vocab * self.hidden * (1 if self.tie_embeddings else 2)
        return self.layers * (attention + mlp + 2 * self.hidden) + embeddings + self.hidden

    def flops_per_token(self, seq: int | None = None) -> int:
        """Floating-point operations of one training step (forward and backward) per token.

        ``6 N + 12 L H D T`` (Chowdhery et al. 2022, PaLM, appendix B). N counts the parameters that multiply: an untied
        input embedding is a look-up and does not count. The causal mask's half of the attention is not subtracted, as
        is usual.

        Args:
            seq: length T of the sequences in tokens; None (default) means the configured one.

        Returns:
            FLOPs per token; a multiply-add counts as 2.
        """
        length = self.seq if seq is None else seq
        lookup = 0 if self.tie_embeddings else self.vocab * self.hidden
        return 6 * (self.num_parameters - lookup) + 12 * self.layers * self.hidden * length


#: Named shapes, as ``GPTConfig``: "tiny", "1m", "5m", "8m", "gpt2-124m", "gpt2-355m" and "gpt3-1.3b". The GPT-2 shapes
#: follow Radford et al. 2019, the largest Brown et al. 2020 ("XL"), with the vocabulary padded from 50257 to a multiple
#: of 128.
PRESETS = {
    "tiny": GPTConfig(layers=2, hidden=128, heads=4, vocab=256, seq=128),
    "1m": GPTConfig(layers=5, hidden=128, heads=4, vocab=256, seq=128),
    "5m": GPTConfig(layers=6, hidden=256, heads=4, vocab=256, seq=128),
    "8m": GPTConfig(layers=10, hidden=256, heads=4, vocab=256, seq=256),
    "gpt2-124m": GPTConfig(layers=12, hidden=768, heads=12, vocab=50304, seq=1024),
    "gpt2-355m": GPTConfig(layers=24, hidden=1024, heads=16, vocab=50304, seq=1024),
    "gpt3-1.3b": GPTConfig(layers=24, hidden=2048, heads=16, vocab=50304, seq=1024),
}


class RMSNorm(nn.Module):
    """``x / rms(x) * weight`` over the last dimension (Zhang & Sennrich 2019).

    Under autocast the result is cast here, once: left in float32, every projection that reads it would cast and keep
    a copy of its own for backward.
    """

    def __init__(self, width: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        y = F.rms_norm(x, self.weight.shape, self.weight, self.eps)
        device = x.device.type
        return y.to(torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else y


def rope_tables(seq: int, head_size: int, theta: float) -> tuple[Tensor, Tensor]:
    """Cosines and sines of the rotary angles ``t * theta**(-2i/D)``: two float32 tensors [seq, D/2]."""
    frequency = theta ** (-torch.arange(0, head_size, 2, dtype=torch.float64) / head_size)
    angle = torch.arange(seq, dtype=torch.float64)[:, None] * frequency
    return angle.cos().float(), angle.sin().float()


def apply_rope(x_BTHD: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the pairs (i, i + D/2) of every head by its position's angle; cos and sin are [T, D/2]."""
    cos, sin = cos[:, None, :], sin[:, None, :]  # [T, 1, D/2]
    a, b = x_BTHD.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1).type_as(x_BTHD)


class CausalAttention(nn.Module):
    """softmax(q k^T / sqrt(D)) v under a causal mask. A module of its own so that hooks can name q, k and v."""

    def forward(self, q_BHTD: Tensor, k_BKTD: Tensor, v_BKTD: Tensor) -> Tensor:
        grouped = q_BHTD.shape[1] != k_BKTD.shape[1]
        return F.scaled_dot_product_attention(q_BHTD, k_BKTD, v_BKTD, is_causal=True, enable_gqa=grouped)


class Attention(nn.Module):
    """Multi-head causal self-attention with rotary positions.

    Three projections, not one fused: a fused one keeps its whole output alive for backward through the view of v.
    """

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.head_size, self.qk_norm, self.eps = config.head_size, config.qk_norm, config.norm_eps
        self.query = nn.Linear(config.hidden, config.heads * config.head_size, bias=False)
        self.key = nn.Linear(config.hidden, config.groups * config.head_size, bias=False)
        self.value = nn.Linear(config.hidden, config.groups * config.head_size, bias=False)
        self.core = CausalAttention()
        self.out = nn.Linear(config.heads * config.head_size, config.hidden, bias=False)

    def forward(self, x_BTC: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        split = (*x_BTC.shape[:2], -1, self.head_size)
        q_BTHD, k_BTKD = self.query(x_BTC).view(split), self.key(x_BTC).view(split)
        v_BTKD = self.value(x_BTC).view(split)
        if self.qk_norm:
            q_BTHD, k_BTKD = (F.rms_norm(t, (self.head_size,), eps=self.eps) for t in (q_BTHD, k_BTKD))
        q_BTHD, k_BTKD = apply_rope(q_BTHD, cos, sin), apply_rope(k_BTKD, cos, sin)
        y_BHTD = self.core(q_BTHD.transpose(1, 2), k_BTKD.transpose(1, 2), v_BTKD.transpose(1, 2))
        return self.out(y_BHTD.transpose(1, 2).flatten(2))


class ReLU2(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x).square()


class MLP(nn.Module):
    """Feed-forward layer C -> F -> C; "swiglu" multiplies a second, gated branch."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        gated = config.activation == "swiglu"
        self.up = nn.Linear(config.hidden, config.ffn_width, bias=False)
        self.gate = nn.Linear(config.hidden, config.ffn_width, bias=False) if gated else None
        self.nonlinearity = {"gelu": nn.GELU("tanh"), "relu2": ReLU2(), "swiglu": nn.SiLU()}[config.activation]
        self.down = nn.Linear(config.ffn_width, config.hidden, bias=False)

    def forward(self, x_BTC: Tensor) -> Tensor:
        if self.gate is None:
            return self.down(self.nonlinearity(self.up(x_BTC)))
        return self.down(self.nonlinearity(self.gate(x_BTC)) * self.up(x_BTC))


class Block(nn.Module):
    def __init__(self, config: GPTConfig):
        super().__init__()
        self.attention_norm = RMSNorm(config.hidden, config.norm_eps)
        self.attention = Attention(config)
        self.mlp_norm = RMSNorm(config.hidden, config.norm_eps)
        self.mlp = MLP(config)

    def forward(self, x_BTC: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x_BTC = x_BTC + self.attention(self.attention_norm(x_BTC), cos, sin)
        return x_BTC + self.mlp(self.mlp_norm(x_BTC))


class GPT(nn.Module):
    """The book's model, a decoder-only transformer: RMSNorm, rotary positions, causal attention, no biases or dropout.

    Initialisation follows GPT-2: normal with standard deviation 0.02, the two projections that write into the
    residual stream divided by ``sqrt(2 * layers)``, norms at one.

    Args:
        config: shape of the model.
        seed: seed of the weights; 0 by default. They are drawn on the CPU, so a seed gives the same bits on every
            device, and the global generators stay as they are.

    Example:
        >>> import torch
        >>> from tq.train.model import GPT, GPTConfig
        >>> model = GPT(GPTConfig(layers=1, hidden=16, heads=2, vocab=256, seq=32), seed=0)
        >>> logits, loss = model(torch.zeros(2, 8, dtype=torch.int64))
        >>> tuple(logits.shape), loss
        ((2, 8, 256), None)
    """

    cos: Tensor
    sin: Tensor

    def __init__(self, config: GPTConfig, seed: int = 0):
        super().__init__()
        self.config = config
        with torch.device("meta"):  # no module may draw from the global generator
            self.embed = nn.Embedding(config.vocab, config.hidden)
            self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
            self.final_norm = RMSNorm(config.hidden, config.norm_eps)
            self.head = nn.Linear(config.hidden, config.vocab, bias=False)
        self.to_empty(device="cpu")
        if config.tie_embeddings:
            self.head.weight = self.embed.weight
        cos, sin = rope_tables(config.seq, config.head_size, config.rope_theta)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        self._initialise(torch.Generator("cpu").manual_seed(seed))

    @torch.no_grad()
    def _initialise(self, generator: torch.Generator) -> None:
        for name, parameter in self.named_parameters():
            if parameter.ndim < 2:
                parameter.fill_(1.0)
                continue
            residual = name.endswith(("attention.out.weight", "mlp.down.weight"))
            parameter.normal_(0.0, 0.02 / math.sqrt(2 * self.config.layers if residual else 1), generator=generator)

    def forward(self, ids: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """Logits [B, T, V] of the next token after each position and, given targets, the mean loss.

        Args:
            ids: integer tokens [B, T], T at most ``config.seq``.
            targets: int64 tokens [B, T], where -100 marks a position that does not count; None (default) means no loss.

        Returns:
            ``(logits, loss)``; the loss is the cross-entropy in nats per token (float32), None without targets.

        Raises:
            ValueError: if ``ids`` have another shape.
        """
        if ids.ndim != 2 or ids.shape[1] > self.config.seq:
            raise ValueError(f"ids must be [batch, positions <= {self.config.seq}], got shape {tuple(ids.shape)}")
        length = ids.shape[1]
        cos, sin = self.cos[:length], self.sin[:length]
        x_BTC = self.embed(ids)
        for block in self.blocks:
            x_BTC = block(x_BTC, cos, sin)
        logits_BTV = self.head(self.final_norm(x_BTC))
        if targets is None:
            return logits_BTV, None
        loss = F.cross_entropy(logits_BTV.float().flatten(0, 1), targets.flatten())
        return logits_BTV, loss

    @property
    def num_parameters(self) -> int:
        """Trainable parameters; a tied embedding is counted once."""
        return self.config.num_parameters

    def flops_per_token(self, seq: int | None = None) -> int:
        """FLOPs of one training step per token for sequences of ``seq`` tokens, as ``GPTConfig.flops_per_token``."""
        return self.config.flops_per_token(seq)
