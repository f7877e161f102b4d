"""Memory of a GPU by part, for a pipeline stage: weights, gradients, optimizer states, activations, working space.

Not counted: the CUDA context, fragmentation, communication buffers. Bytes a parameter: 2 for 16-bit weights, 2 or 4
for gradients, 12 for the fp32 master copy and both moments; ZeRO 1, 2, 3 split states, gradients, weights over the
data-parallel ranks [Rajbhandari et al. 2020, arXiv:1910.02054]. Activations are what the backward pass needs, operator
by operator; for GPT style they add up to Korthikanti's s b h (34 + 5 a s / h) bytes a layer [2022, arXiv:2205.05198].
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypedDict, Unpack

from tq.systems.arguments import boolean, instance, one_number
from tq.systems.layout import Bits, Compression, Layout
from tq.systems.shape import Transformer

WEIGHT_BYTES = 2.0
FUSED_LOSS_BYTES = 4.0  # a logit: Megatron's loss keeps it in fp32 alone [Korthikanti et al. 2022, section 4.3]
MASTER_BYTES, MOMENT_BYTES = 4.0, 4.0
VOCABULARY_PARALLEL_BYTES = 4.0  # a logit: DTensor's loss holds one fp32 block more than the one on a whole vocabulary
STAGES = ("worst", "first", "middle", "last")


class Software(TypedDict, total=False):
    """What memory depends on besides shape and layout.

    Attributes:
        gradient_bytes: bytes per accumulated gradient, 2 or 4 (default).
        flash: whether attention is fused and keeps no scores; False by default.
        loss_bytes: bytes per logit that the loss holds at its peak: 4 (default) where it is fused, 14 where logits,
            fp32 logits, log-softmax and gradient each have a block.
        dtensor: whether tensor parallelism keeps the gathered inputs of its products and splits an unfused loss, as
            PyTorch's DTensor does; False (default) means that they are gathered again, as in Megatron.
    """

    gradient_bytes: float
    flash: bool
    loss_bytes: float
    dtensor: bool


@dataclass(frozen=True)
class Memory:
    """Memory of one GPU by part, in bytes.

    Attributes:
        weights: 16-bit weights.
        gradients: accumulated gradients.
        states: fp32 master weights and both moments, and the residuals of error feedback.
        activations: what is kept from the forward to the backward pass.
        working: what one layer needs again where it is recomputed, and the logits.

    Example:
        >>> from tq.systems import Memory
        >>> Memory(weights=2.0, gradients=4.0, states=12.0, activations=10.0, working=1.0).total
        29.0
    """

    weights: float
    gradients: float
    states: float
    activations: float
    working: float

    @property
    def total(self) -> float:
        """Bytes of all parts together."""
        return self.weights + self.gradients + self.states + self.activations + self.working


def stage_parameters(model: Transformer, layout: Layout, stage: str) -> tuple[float, float]:
    """Parameters that a GPU of this stage holds before ZeRO: (all but routed experts, routed experts)."""
    share = layout.stage_layers(model) / model.layers
    dense = model.layers * (model.attention_parameters + model.norms * model.norm_parameters)
    dense += (model.layers - model.moe_layers) * model.mlp_parameters
    routed = 0.0
    if model.moe is not None:
        dense += model.moe_layers * (model.moe.shared * model.expert_parameters + model.hidden * model.moe.count)
        routed = float(model.moe_layers * model.moe.count * model.expert_parameters)
    ends = 0.0
    if layout.pp == 1:
        ends = model.embedding_parameters + model.head_parameters + model.norm_parameters
    elif stage == "first":
        ends = model.embedding_parameters
    elif stage == "last":
        ends = model.norm_parameters + model.hidden * model.vocab  # its own, or a copy of the tied embedding
    return (share * dense + ends) / layout.tp, share * routed / (layout.tp * layout.ep)


def _layer_bytes(model: Transformer, layout: Layout, flash: bool, dtensor: bool) -> tuple[float, float, float]:
    """Activations of a layer for one token, split by tensor parallelism: (outside, inside, attention scores)."""
    h, t = float(model.hidden), layout.tp
    masks = 0.0 if model.gated else 2 * h  # one byte an element, after attention and after the MLP
    # inputs of the norms; inputs of the QKV and of the MLP product, which is one and the same in a parallel block
    norms, products = 2 * model.norms * h + masks, 2 * model.norms * h
    attention = 2 * (model.q_width + 2 * model.kv_width) + 2 * model.q_width  # Q, K, V and the input of the projection
    per_width = 6.0 if model.gated else 4.0  # gate, up and their product; or the GELU's input and output
    mlp = per_width * model.width * (model.layers - model.moe_layers)
    if model.moe is not None:
        visited = model.moe.active + model.moe.shared
        # tokens are copied to their experts, and the results kept for the weighted sum
        mlp += model.moe_layers * (per_width * model.expert_width * visited + 4 * h * model.moe.active * t)
    # 2 bytes softmax, 2 bytes and a mask dropout; a fused attention keeps the log-sum-exp of a row
    scores = 4.0 * model.heads if flash else (2.0 if model.gated else 5.0) * model.heads * model.seq
    split = t if layout.sequence_parallel else 1
    outside = norms / split + products / (1 if dtensor else split)
    return outside, (attention + mlp / model.layers) / t, scores / t


def activation_bytes(
    model: Transformer, layout: Layout, flash: bool = False, codec: Bits | None = None, dtensor: bool = False
) -> tuple[float, float]:
    """(kept, working) bytes of one layer and micro-batch. codec: the 16-bit activations are kept as its codes. flash,
    dtensor: see ``Software``."""
    tokens = layout.micro_batch * model.seq / layout.cp
    outside, inside, scores = _layer_bytes(model, layout, flash, dtensor)
    whole = tokens * (outside + inside + scores)
    scores_again = 0.0 if flash else tokens * scores
    # The input of a layer is split only where the sequence is.
    kept_input = tokens * 2.0 * model.hidden / (layout.tp if layout.sequence_parallel else 1)
    kept, working = {
        "none": (whole, 0.0),
        "selective": (whole - scores_again, scores_again),
        "full": (kept_input, whole),
    }[layout.recompute]
    if codec is not None:
        # what the forward pass makes before it is encoded, and what is decoded again, is one layer at a time
        working = max(working, kept)
        kept *= codec.bytes_per_element / 2
    return kept, working


def _in_flight(layout: Layout, stage: str) -> float:
    """Micro-batches whose activations a stage holds under 1F1B; interleaved, (p - 1) / v chunks more on the first stage
    and fewer on the last [Korthikanti 2022; warm-up lengths of Narayanan 2021]."""
    chunks = (layout.pp - 1) / layout.interleave
    if layout.interleave == 1:
        held = 1.0 if stage == "last" else float(layout.pp)
    else:
        held = layout.pp - chunks if stage == "last" else layout.pp + chunks
    return min(float(layout.micro_batches), held)


def memory(
    model: Transformer, layout: Layout, *, compression: Compression | None = None, stage: str = "worst",
    **software: Unpack[Software],
) -> Memory:  # fmt: skip
    """Memory of one GPU by part, for a pipeline stage.

    The accounting follows Rajbhandari et al. 2020 (arXiv:1910.02054) and Korthikanti et al. 2022 (arXiv:2205.05198).
    The CUDA context, fragmentation and communication buffers are not counted.

    Args:
        model: shape of the model.
        layout: how the run is split over GPUs.
        compression: what is quantized; None (default) means nothing.
        stage: "first", "middle", "last", or "worst" (default): the first or the last, whichever needs more.
        **software: ``gradient_bytes`` (bytes per accumulated gradient, 4 by default), ``flash`` (fused attention,
            False), ``loss_bytes`` (bytes per logit in the loss, 4) and ``dtensor`` (PyTorch's DTensor instead of
            Megatron, False). ``tq.systems.efficiency.software_facts(name).memory`` holds those of a generation.

    Returns:
        A ``Memory`` in bytes.

    Raises:
        TypeError: if an argument has the wrong type, or a keyword is unknown.
        ValueError: if the layout cannot hold the model, or ``stage`` is unknown.

    Example:
        >>> from tq.systems import Layout, Transformer, memory
        >>> model = Transformer.preset("llama2-7b")
        >>> found = memory(model, Layout(dp=64, global_batch=64, zero=3, recompute="full"), flash=True)
        >>> round(found.total / 2**30, 1)  # GiB
        4.2
    """
    instance("model", model, Transformer)
    instance("layout", layout, Layout)
    layout.check(model)
    instance("compression", compression, Compression, none=True)
    for name, given in software.items():
        if name in ("gradient_bytes", "loss_bytes"):
            one_number(name, given)
        elif name in ("flash", "dtensor"):
            boolean(name, given)
        else:
            raise TypeError(f"memory() has no argument {name!r}; accepted are {', '.join(Software.__annotations__)}")
    if compression is not None:
        compression.check(layout)
    if stage not in STAGES:
        raise ValueError(f"stage must be one of {', '.join(STAGES)}; got {stage!r}")
    if stage == "worst":
        found = [_memory(model, layout, compression, each, **software) for each in ("first", "last")]
        return max(found, key=lambda m: m.total)
    return _memory(model, layout, compression, stage, **software)


def _memory(
    model: Transformer, layout: Layout, compression: Compression | None, stage: str, *, gradient_bytes: float = 4.0,
    flash: bool = False, loss_bytes: float = FUSED_LOSS_BYTES, dtensor: bool = False,
) -> Memory:  # fmt: skip
    chosen = compression or Compression()
    ranks = layout.dp * layout.cp
    dense, routed = stage_parameters(model, layout, stage)

    def held(of_a_number: float, from_stage: int) -> float:
        if layout.zero < from_stage:
            return of_a_number * (dense + routed)
        # experts are split over ep ranks already, so fewer ranks hold the same ones
        return of_a_number * (dense / ranks + routed * layout.ep / ranks)

    moment = MOMENT_BYTES if chosen.states is None else chosen.states.bytes_per_element
    if chosen.momentum is None:
        states = held(MASTER_BYTES + 2 * moment, 1)
    else:
        states = held(MASTER_BYTES + moment, 1) + moment * (dense + routed)
    states += 4.0 * (dense + routed) if chosen.feedback else 0.0
    kept, working = activation_bytes(model, layout, flash, chosen.activations, dtensor)
    layers = layout.stage_layers(model)
    tokens = layout.micro_batch * model.seq / layout.cp
    if layout.zero == 3 and ranks > 1:  # one layer's whole weights are gathered at a time
        working += WEIGHT_BYTES * (dense + routed) / layers
    if stage == "last" or layout.pp == 1:
        # the last norm's and the output product's input, and what the loss holds
        inputs = 2.0 * model.hidden * (1 / layout.tp + (1 if dtensor else 1 / layout.tp))
        held_by_loss = loss_bytes + (VOCABULARY_PARALLEL_BYTES if dtensor and layout.tp > 1 else 0.0)
        working += tokens * (inputs + held_by_loss * model.vocab / layout.tp)
    return Memory(
        weights=held(WEIGHT_BYTES, 3),
        gradients=held(gradient_bytes, 2),
        states=states,
        activations=kept * layers * _in_flight(layout, stage),
        working=working,
    )
