"""Shape of a decoder-only transformer: parameters and floating-point operations. No other architectures, no MLA.

GPT style (``gated=False``): biases, LayerNorm, learned positions, dropout, the output layer shares the embedding.
Llama style (``gated=True``): no biases, RMSNorm, rotary positions, no dropout, an output layer of its own. ``tied``,
``positions`` and ``biases`` say otherwise for a model in between.

A multiply-add is 2 FLOPs. Attention is counted in full, not halved for causality, as published throughputs are.
Sources: Narayanan et al. 2021 (arXiv:2104.04473), equations 2 and 3; Korthikanti et al. 2022 (arXiv:2205.05198).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from tq.systems.arguments import boolean, one_of, positive_int


@dataclass(frozen=True)
class Experts:
    """Mixture of experts that takes the place of a transformer's MLP.

    Attributes:
        count: routed experts per layer, at least 2.
        active: routed experts that one token visits, at most ``count``.
        ffn: width of one expert; None (default) means the width of the model's MLP.
        shared: experts that every token visits besides the routed ones; 0 by default.
        dense_layers: layers of the model that keep a plain MLP; 0 by default.

    Raises:
        TypeError: if a field is no int.
        ValueError: if a field is out of range, or ``active`` is above ``count``.

    Example:
        >>> from tq.systems import Experts, Transformer
        >>> experts = Experts(count=8, active=2)
        >>> model = Transformer(32, 4096, 32, 32000, 4096, ffn=14336, kv_heads=8, gated=True, experts=experts)
        >>> round(model.parameters / 1e9, 1), round(model.active_parameters / 1e9, 1)
        (46.7, 12.9)
    """

    count: int
    active: int
    ffn: int | None = None
    shared: int = 0
    dense_layers: int = 0

    def __post_init__(self) -> None:
        positive_int("experts.count", self.count, 2)
        positive_int("experts.active", self.active)
        if self.ffn is not None:
            positive_int("experts.ffn", self.ffn)
        positive_int("experts.shared", self.shared, 0)
        positive_int("experts.dense_layers", self.dense_layers, 0)
        if self.active > self.count:
            raise ValueError(f"experts.active must be at most experts.count={self.count}, got {self.active}")


@dataclass(frozen=True)
class Transformer:
    """Shape of a decoder-only transformer: its parameters and floating-point operations.

    The formulas are those of Narayanan et al. 2021 (arXiv:2104.04473) and Korthikanti et al. 2022 (arXiv:2205.05198).

    Attributes:
        layers: number of transformer layers.
        hidden: width of the hidden states.
        heads: query heads; must divide ``hidden`` unless ``head_dim`` is given.
        vocab: tokens in the vocabulary.
        seq: sequence length in tokens.
        kv_heads: key and value heads, a divisor of ``heads``; None (default) means ``heads``.
        ffn: width of the MLP; None (default) means 4 ``hidden``, or 8/3 ``hidden`` with ``gated``.
        gated: Llama style (True) or GPT style (False, default); it decides what is None below.
        experts: ``Experts``, or the tuple (count, active); None (default) means a dense MLP.
        head_dim: width of one head; None (default) means ``hidden / heads``.
        tied: whether the output layer shares the embedding; None (default) means yes in GPT style only.
        positions: whether positions are learned parameters; None (default) means yes in GPT style only.
        biases: whether products and norms have biases; None (default) means yes in GPT style only.
        parallel_block: whether attention and MLP read one normalised input, as in PaLM (arXiv:2204.02311).

    Raises:
        TypeError: if a field has the wrong type.
        ValueError: if a size is below 1, or the sizes do not divide as they must.

    Example:
        >>> from tq.systems import Transformer
        >>> model = Transformer.preset("llama2-7b")
        >>> round(model.parameters / 1e9, 2)
        6.74
        >>> round(model.model_flops(sequences=1) / 1e12)  # TFLOP of one training step
        189
    """

    layers: int
    hidden: int
    heads: int
    vocab: int
    seq: int
    kv_heads: int | None = None
    ffn: int | None = None
    gated: bool = False
    experts: Experts | tuple[int, int] | None = None
    head_dim: int | None = None
    tied: bool | None = None
    positions: bool | None = None
    biases: bool | None = None
    parallel_block: bool = False

    def __post_init__(self) -> None:
        for name in ("layers", "hidden", "heads", "vocab", "seq"):
            positive_int(name, getattr(self, name))
        for name in ("kv_heads", "ffn", "head_dim"):
            if getattr(self, name) is not None:
                positive_int(name, getattr(self, name))
        boolean("gated", self.gated)
        boolean("parallel_block", self.parallel_block)
        for name in ("tied", "positions", "biases"):
            if getattr(self, name) is not None:
                boolean(name, getattr(self, name))
        if self.head_dim is None and self.hidden % self.heads:
            raise ValueError(f"heads must divide hidden={self.hidden}, got {self.heads}; or give head_dim")
        if self.heads % self.kv:
            raise ValueError(f"kv_heads must divide heads={self.heads}, got {self.kv_heads}")
        if self.experts is not None:
            if isinstance(self.experts, tuple):
                object.__setattr__(self, "experts", Experts(*self.experts))
            elif not isinstance(self.experts, Experts):
                raise TypeError(f"experts must be None, Experts(...) or (count, active), got {self.experts!r}")
            if self.moe is not None and self.moe.dense_layers >= self.layers:
                raise ValueError(
                    f"experts.dense_layers must be below layers={self.layers}, got {self.moe.dense_layers}"
                )

    # --- shape with defaults filled in ---

    @property
    def moe(self) -> Experts | None:
        """The experts, or None for a dense model."""
        return self.experts if isinstance(self.experts, Experts) else None

    @property
    def kv(self) -> int:
        """Key and value heads."""
        return self.heads if self.kv_heads is None else self.kv_heads

    @property
    def dim(self) -> int:
        """Width of one head."""
        return self.hidden // self.heads if self.head_dim is None else self.head_dim

    @property
    def q_width(self) -> int:
        """Width of the queries: heads times the width of one."""
        return self.heads * self.dim

    @property
    def kv_width(self) -> int:
        """Width of the keys; the values are as wide."""
        return self.kv * self.dim

    @property
    def width(self) -> int:
        """Width of the MLP."""
        if self.ffn is not None:
            return self.ffn
        return -(-8 * self.hidden // 3) if self.gated else 4 * self.hidden

    @property
    def expert_width(self) -> int:
        """Width of one expert."""
        return self.moe.ffn if self.moe is not None and self.moe.ffn is not None else self.width

    @property
    def moe_layers(self) -> int:
        """Layers with experts."""
        return 0 if self.moe is None else self.layers - self.moe.dense_layers

    @property
    def norms(self) -> int:
        """Normalisations per layer: 2, or 1 in a parallel block."""
        return 1 if self.parallel_block else 2

    @property
    def is_tied(self) -> bool:
        """Whether the output layer shares the embedding."""
        return (not self.gated) if self.tied is None else self.tied

    @property
    def has_positions(self) -> bool:
        """Whether positions are learned parameters."""
        return (not self.gated) if self.positions is None else self.positions

    @property
    def has_biases(self) -> bool:
        """Whether products and norms have biases."""
        return (not self.gated) if self.biases is None else self.biases

    # --- parameters ---

    @property
    def attention_parameters(self) -> int:
        """Parameters of one layer's attention."""
        weights = 2 * self.hidden * (self.q_width + self.kv_width)
        return weights + (self.q_width + 2 * self.kv_width + self.hidden if self.has_biases else 0)

    def _mlp(self, width: int) -> int:
        weights = (3 if self.gated else 2) * self.hidden * width
        return weights + ((2 if self.gated else 1) * width + self.hidden if self.has_biases else 0)

    @property
    def mlp_parameters(self) -> int:
        """Parameters of the MLP of one dense layer."""
        return self._mlp(self.width)

    @property
    def expert_parameters(self) -> int:
        """Parameters of one expert."""
        return self._mlp(self.expert_width)

    @property
    def norm_parameters(self) -> int:
        """Parameters of one normalisation; a layer has ``norms`` of them and the model one more."""
        return (2 if self.has_biases else 1) * self.hidden

    @cached_property
    def parameters(self) -> int:
        """Parameters of the model, embeddings included."""
        return self._total(routed=None)

    @cached_property
    def active_parameters(self) -> int:
        """Parameters that one token uses, embeddings included; below ``parameters`` with experts."""
        return self._total(routed=self.moe.active if self.moe else 0)

    def _total(self, routed: int | None) -> int:
        layer = self.attention_parameters + self.norms * self.norm_parameters
        total = self.layers * layer + (self.layers - self.moe_layers) * self.mlp_parameters + self.norm_parameters
        if self.moe is not None:
            visited = self.moe.shared + (self.moe.count if routed is None else routed)
            total += self.moe_layers * (visited * self.expert_parameters + self.hidden * self.moe.count)
        return total + self.embedding_parameters + self.head_parameters

    @property
    def embedding_parameters(self) -> int:
        """Parameters of the token embedding and of learned positions."""
        return self.hidden * (self.vocab + (self.seq if self.has_positions else 0))

    @property
    def head_parameters(self) -> int:
        """Parameters of the output layer; 0 where it shares the embedding."""
        return 0 if self.is_tied else self.hidden * self.vocab

    # --- FLOPs of the forward pass, of one token ---

    @property
    def layer_flops(self) -> float:
        """FLOPs per token of the weight products of an average layer, forward, without attention scores."""
        attention = 4.0 * self.hidden * (self.q_width + self.kv_width)
        factor = (6.0 if self.gated else 4.0) * self.hidden
        dense = factor * self.width * (self.layers - self.moe_layers)
        if self.moe is not None:
            routed = (
                factor * self.expert_width * (self.moe.active + self.moe.shared) + 2.0 * self.hidden * self.moe.count
            )
            dense += routed * self.moe_layers
        return attention + dense / self.layers

    @property
    def score_flops(self) -> float:
        """FLOPs per token of one layer's attention scores: queries by keys and scores by values, forward."""
        return 4.0 * self.seq * self.q_width

    @property
    def head_flops(self) -> float:
        """FLOPs per token of the output layer, forward."""
        return 2.0 * self.hidden * self.vocab

    def model_flops(self, sequences: float) -> float:
        """FLOPs of one training step, forward and backward, with nothing recomputed.

        This is equation 3 of Narayanan et al. 2021, 72 B s l h^2 (...), for any shape.

        Args:
            sequences: sequences in the step, of ``seq`` tokens each.

        Returns:
            Floating-point operations; a multiply-add counts as 2.
        """
        forward = self.layers * (self.layer_flops + self.score_flops) + self.head_flops
        return 3.0 * sequences * self.seq * forward

    def hardware_flops(self, sequences: float, recompute: str) -> float:
        """FLOPs of one training step, with those that activation recomputation repeats.

        Args:
            sequences: sequences in the step, of ``seq`` tokens each.
            recompute: "none", "selective" (attention scores) or "full" (the forward pass of every layer).

        Returns:
            Floating-point operations; a multiply-add counts as 2.
        """
        again = {"none": 0.0, "selective": self.score_flops, "full": self.layer_flops + self.score_flops}[recompute]
        return self.model_flops(sequences) + sequences * self.seq * self.layers * again

    @classmethod
    def preset(cls, name: str, **changes: object) -> Transformer:
        """A published model by its name in ``tq.systems.shape.PRESETS``.

        Args:
            name: "gpt2-124m", "llama2-70b", "mixtral-8x7b", ...; an unknown name lists all.
            **changes: fields to change, such as ``seq=8192``.

        Returns:
            The ``Transformer``.

        Raises:
            ValueError: if there is no such model.
        """
        one_of("name", name, list(PRESETS))
        return cls(**{**PRESETS[name], **changes})  # type: ignore[arg-type]


def _gpt(layers: int, hidden: int, heads: int, vocab: int, seq: int, **more: object) -> dict[str, object]:
    return {"layers": layers, "hidden": hidden, "heads": heads, "vocab": vocab, "seq": seq, **more}


def _llama(layers: int, hidden: int, heads: int, vocab: int, seq: int, ffn: int, **more: object) -> dict[str, object]:
    return {**_gpt(layers, hidden, heads, vocab, seq), "ffn": ffn, "gated": True, **more}


def _neox(layers: int, hidden: int, heads: int, vocab: int = 50304) -> dict[str, object]:
    return _gpt(layers, hidden, heads, vocab, 2048, tied=False, positions=False)


#: Shapes as their papers and configuration files print them.
PRESETS: dict[str, dict[str, object]] = {
    "gpt2-124m": _gpt(12, 768, 12, 50257, 1024),
    "gpt2-355m": _gpt(24, 1024, 16, 50257, 1024),
    "gpt2-774m": _gpt(36, 1280, 20, 50257, 1024),
    "gpt2-1.5b": _gpt(48, 1600, 25, 50257, 1024),
    "gpt3-175b": _gpt(96, 12288, 96, 50257, 2048),
    "megatron-22b": _gpt(48, 6144, 64, 51200, 2048),
    "megatron-175b": _gpt(96, 12288, 96, 51200, 2048),
    "megatron-530b": _gpt(105, 20480, 128, 51200, 2048),
    "megatron-1t": _gpt(128, 25600, 160, 51200, 2048),
    "bloom-176b": _gpt(70, 14336, 112, 250880, 2048, positions=False),
    "palm-540b": _gpt(
        118, 18432, 48, 256000, 2048, kv_heads=1, head_dim=256, ffn=73728, gated=True, tied=True, positions=False,
        parallel_block=True,
    ),
    "pythia-70m": _neox(6, 512, 8),
    "pythia-160m": _neox(12, 768, 12),
    "pythia-410m": _neox(24, 1024, 16),
    "pythia-1b": _neox(16, 2048, 8),
    "pythia-2.8b": _neox(32, 2560, 32),
    "pythia-6.9b": _neox(32, 4096, 32, 50432),
    "pythia-12b": _neox(36, 5120, 40, 50688),
    "llama-7b": _llama(32, 4096, 32, 32000, 2048, 11008),
    "llama-13b": _llama(40, 5120, 40, 32000, 2048, 13824),
    "llama-33b": _llama(60, 6656, 52, 32000, 2048, 17920),
    "llama-65b": _llama(80, 8192, 64, 32000, 2048, 22016),
    "llama2-7b": _llama(32, 4096, 32, 32000, 4096, 11008),
    "llama2-13b": _llama(40, 5120, 40, 32000, 4096, 13824),
    "llama2-70b": _llama(80, 8192, 64, 32000, 4096, 28672, kv_heads=8),
    "llama-70b": _llama(80, 8192, 64, 32000, 4096, 28672, kv_heads=8),
    "llama3-8b": _llama(32, 4096, 32, 128256, 8192, 14336, kv_heads=8),
    "llama3-70b": _llama(80, 8192, 64, 128256, 8192, 28672, kv_heads=8),
    "llama3-405b": _llama(126, 16384, 128, 128256, 8192, 53248, kv_heads=8),
    "smollm3-3b": _llama(36, 2048, 16, 128256, 4096, 11008, kv_heads=4, tied=True),
    "mixtral-8x7b": _llama(32, 4096, 32, 32000, 4096, 14336, kv_heads=8, experts=(8, 2)),
    "mixtral-8x22b": _llama(56, 6144, 48, 32768, 4096, 16384, kv_heads=8, experts=(8, 2)),
}
