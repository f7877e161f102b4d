"""The book's GPT with SwiGLU as the LlamaForCausalLM of ``transformers``, which it equals: for ``generate``."""

from __future__ import annotations

from typing import Any

import torch

from tq.train.model.gpt import GPT

_OUTER = {"embed": "model.embed_tokens", "final_norm": "model.norm", "head": "lm_head"}
_INNER = {
    "attention_norm": "input_layernorm",
    "attention.query": "self_attn.q_proj",
    "attention.key": "self_attn.k_proj",
    "attention.value": "self_attn.v_proj",
    "attention.out": "self_attn.o_proj",
    "mlp_norm": "post_attention_layernorm",
    "mlp.gate": "mlp.gate_proj",
    "mlp.up": "mlp.up_proj",
    "mlp.down": "mlp.down_proj",
}


def to_llama(model: GPT) -> Any:
    """A ``LlamaForCausalLM`` with the same weights, which it shares, in eval mode.

    Args:
        model: a GPT with activation "swiglu", without quantized layers and without normalised queries and keys.
    Raises:
        ValueError: it is another one.
        ImportError: ``transformers`` is missing.
    """
    try:
        from transformers import LlamaConfig, LlamaForCausalLM
    except ImportError as error:
        raise ImportError("transformers is not installed (pip install 'tq-book[infer]')") from error
    config = model.config
    if config.activation != "swiglu" or config.qk_norm:
        raise ValueError(f"a Llama has swiglu and no qk_norm, got {config.activation}, qk_norm={config.qk_norm}")
    state = model.state_dict()
    if any(not name.endswith(".weight") for name in state):
        raise ValueError("the model has quantized layers: decode it first (tq.infer.weights.decoded)")
    told = LlamaConfig(
        vocab_size=config.vocab, hidden_size=config.hidden, intermediate_size=config.ffn_width,
        num_hidden_layers=config.layers, num_attention_heads=config.heads, num_key_value_heads=config.groups,
        max_position_embeddings=config.seq, rms_norm_eps=config.norm_eps, tie_word_embeddings=config.tie_embeddings,
        rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta}, pad_token_id=None,
        bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    with torch.device("meta"):
        made = LlamaForCausalLM(told)
    theirs = {f"{their_name(name.removesuffix('.weight'))}.weight": value for name, value in state.items()}
    made.load_state_dict(theirs, assign=True, strict=True)
    made.tie_weights()
    made.model.rotary_emb = type(made.model.rotary_emb)(told)  # its tables are no weights
    return made.eval().requires_grad_(False)


def their_name(ours: str) -> str:
    """Their name of a layer."""
    first, _, rest = ours.partition(".")
    if first == "blocks":
        number, _, inner = rest.partition(".")
        return f"model.layers.{number}.{_INNER[inner]}"
    return _OUTER[first]
