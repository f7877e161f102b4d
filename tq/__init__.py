"""TurboQuant for LLM training: a block codec for tensors, and what a training job builds on it.

``import tq`` needs torch and NumPy only, and loads them with the first name that is used. Kernels (Numba, Triton) load
inside the call that uses them.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tq.quant.codec import Code, Codec

__version__ = "0.1.0"
__all__ = ["Code", "Codec", "__version__"]


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module 'tq' has no attribute {name!r}")
    from tq.quant import codec

    return getattr(codec, name)


def __dir__() -> list[str]:
    return __all__
