"""Models of systems: pure, no torch at import. Shapes, memory, iteration time, network; checked on published runs."""

from tq.systems.efficiency import Efficiency
from tq.systems.hardware import Cluster
from tq.systems.iteration import Prediction, predict
from tq.systems.layout import Bits, Compression, Layout
from tq.systems.memory import Memory, memory
from tq.systems.parallel import best, layouts
from tq.systems.shape import Experts, Transformer

__all__ = [
    "Bits", "Cluster", "Compression", "Efficiency", "Experts", "Layout", "Memory", "Prediction", "Transformer",
    "best", "layouts", "memory", "predict",
]  # fmt: skip
