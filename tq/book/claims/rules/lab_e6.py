"""Rules over adapters and what fits beside them."""

from __future__ import annotations

import torch

from tq.book.claims.formulas import NF4_DQ, Figure, Formula, Free, RangeFormula
from tq.book.claims.ledger import Claim, Rule
from tq.systems import hardware, lora


def _adapters(rank: int, width: int = 4096) -> Figure:
    """Parameters of an adapter on a square product, and of the product."""
    return float(lora.adapter_parameters(width, width, rank)), float(width * width)


def _start() -> float:
    """Largest difference that a fresh adapter makes to the output of a product, A random and B zero."""
    torch_rng = torch.Generator().manual_seed(0)
    weight, a, x = (torch.randn(*shape, generator=torch_rng) for shape in ((64, 48), (4, 48), (16, 48)))
    b = torch.zeros(64, 4)
    return float((x @ (weight + b @ a).T - x @ weight.T).abs().max())


def _merged(rank: int = 16, width: int = 4096) -> dict[str, Figure]:
    """Multiply-adds per token of a merged product beyond the product's own: it has the same shape."""
    merged = torch.empty(width, width, device="meta") + torch.empty(width, rank, device="meta") @ torch.empty(
        rank, width, device="meta"
    )
    return {"more multiply-adds per token": float(merged.numel() - width * width)}


TUNED = 405e9  # parameters of the base
SHARE = 0.3  # of the peak, about what published runs realize in the median


def _hours(tokens: float) -> float:
    """Of adapters on eight H100: forward and back through frozen weights, 4 operations per parameter and token."""
    return 4 * TUNED * tokens / (8 * hardware.gpu("h100-80gb").peak_flops * SHARE) / 3600


RULES: dict[str, Rule] = {
    "S4-070": Formula(
        "r (d + k) and d k for d = k = 4,096 and r = 16, the rank that its procedure names",
        lambda: {"at rank 16": _adapters(16)},
        "A 4,096 by 4,096 matrix has 16.8 million weights, and its rank-16 adapter {0:,.0f} (computed). The document "
        "lost width and rank; its procedure names rank 16.",
        "An undamaged copy with another width.", "parameters", claimed=Claim.ends, within=0.2, confidence="medium",
    ),
    "S4-071": Formula(
        "d k / (r (d + k)), d = k = 4,096", lambda: {"at rank 16": lora.adapter_factor(4096, 4096, 16)},
        "A rank-16 adapter on a 4,096 by 4,096 matrix has {0:.0f} times fewer parameters (computed), not about a "
        "hundred. The document's own 17M over 130K give 131.",
        "An undamaged copy with another width or rank.", "x", confidence="medium",
    ),
    "S4-073": Formula(
        "multiply-adds of W + B A beyond those of W, a 4,096 by 4,096 product", _merged,
        "A merged product has the shape of the original, so it takes {0:.0f} more multiply-adds; kept apart a rank-16 "
        "adapter adds {1:.1%} (computed). Latency was not timed, and a 4-bit base must be rounded anew.",
        "Latencies of a merged and an original model that differ.", "multiply-adds",
        conditions=lambda: {"kept apart, share of the product": 1 / lora.adapter_factor(4096, 4096, 16)},
        confidence="medium",
    ),
    "S4-112": Free(
        "hours = 4 * 405e9 * tokens / (8 * 989.5 TFLOP/s * 0.3), from 1 hour to a day", over=(1e5, 1e9), usual=1e7,
        name="tokens", of=_hours, claimed=(1.0, 24.0), within=0.0, unit="hours", confidence="low",
        conditions=lambda: {"GB of the 4-bit base": TUNED * NF4_DQ / 8 / 1e9 + 100e6 * 16 / 1e9},
        says="Adapters on a 4-bit 405B model are computed to take {0:.1f} hours for 10 million tokens on eight H100 at "
        "30% of the peak, hours up to {high:.2g} tokens. Base and adapters hold {1:.0f} of 640 GB.",
        would_change="The tokens of the task, and a timed step on a 4-bit base.",
    ),
    "S4-134": Formula(
        "largest |x (W + B A)^T - x W^T| with B = 0 and A random", lambda: {"difference": _start()},
        "With B at zero and A random, a product with an adapter gives the output of the product alone, bit by bit: "
        "difference {0:g} (computed).",
        "An adapter whose two factors both start off zero.",
    ),
    "S4-075": RangeFormula(
        "16 bytes per parameter / (80 GB * GPUs)",
        lambda: {"7B on 8": 7 * 16 / 640, "70B on 64": 70 * 16 / (64 * 80), "70B on 8": 70 * 16 / 640},
        "The states of 7B are computed to take {0:.0%} of eight 80 GB cards, and those of 70B {1:.0%} of 64. 70B does "
        "not fit on eight; activations are not counted.",
        "Activations that take more than the states leave.", "of the memory", claimed=(0.0, 1.0), within=0.0,
        see="impact-memory",
    ),
}  # fmt: skip
