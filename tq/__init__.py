"""TurboQuant for LLM training: a block codec for tensors, and what a training job builds on it.

``import tq`` needs torch and NumPy only. Kernels (Numba, Triton) load inside the call that uses them.
"""

from tq.quant.codec import Code, Codec

__version__ = "0.1.0"
__all__ = ["Code", "Codec", "__version__"]
