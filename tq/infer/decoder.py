"""One token after the other, straight from codes: a decoder for models with quantized layers on the CPU.

Every weight is read once a token, in the bits that it is stored in; the vector is rotated, never the weights. What each
product is given lies in the same memory for all tokens, so that all blocks are one call of compiled code.

Shapes: V vocabulary, C hidden, T tokens so far.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from torch import nn

from tq.infer.layers import GROUPS, QuantizedLinear, part
from tq.infer.path_product import PathProduct, alike
from tq.infer.product import BITS, Exact, Product, integers_run, plain
from tq.infer.trellis import TrellisLinear
from tq.kernels import blocks, token
from tq.train.model.gpt import GPT


class Decoder:
    """Greedy decoding of one sequence.

    Args:
        model: a GPT with SwiGLU whose linear layers are quantized, all of them to 2, 3 or 4 bits, or as paths through a
            trellis of 2 to 5 bits each, with blocks that divide their widths; its head likewise, or exact.
        length: most tokens, prompt included; None (default) means the model's.
        integers: products of 8-bit integers: faster, with an error below that of the weights; None (default) where
            the processor has them.
    Raises:
        ValueError: the model is another one.
    Example:
        >>> import torch
        >>> from tq import Codec
        >>> from tq.infer.decoder import Decoder
        >>> from tq.infer.weights import quantize
        >>> from tq.train.model import GPT, GPTConfig
        >>> model = GPT(GPTConfig(layers=1, hidden=64, heads=1, vocab=64, seq=32, ffn=128, activation="swiglu"))
        >>> codec = Codec(bits=4, block=64)
        >>> decoder = Decoder(quantize(model, codec, torch.randint(64, (4, 32)), head=codec))
        >>> len(list(decoder.generate([1, 2, 3], 5)))
        5
    """

    def __init__(self, model: GPT, length: int | None = None, integers: bool | None = None) -> None:
        config = model.config
        if config.activation != "swiglu" or config.qk_norm:
            raise ValueError(f"known is swiglu without qk_norm, got {config.activation}, qk_norm={config.qk_norm}")
        integers = integers_run() if integers is None else integers
        self.length, self.at, self.nbytes = length or config.seq, 0, 0
        self._held: list[list[Product | PathProduct]] = []
        self._cos, self._sin = model.cos.numpy(), model.sin.numpy()
        self._embed, self._eps = model.embed.weight.detach().numpy(), config.norm_eps
        self._stream = np.zeros(config.hidden, np.float32)
        self._blocks = self._of_blocks(model, integers)
        self._last = self._held[-1][3].places()[6]  # what the last block adds to the stream
        self._norm = model.final_norm.weight.detach().numpy()
        if isinstance(model.head, QuantizedLinear):
            self._head: Product | PathProduct | Exact = self._product("head", (model.head,), integers)
        else:
            self._head = Exact(model.head.weight.detach())
            self.nbytes += self._head.nbytes

    def _of_blocks(self, model: GPT, integers: bool) -> blocks.Blocks:
        config = model.config
        shape, rows, settings = (config.groups, self.length, config.head_size), [], set()
        for number, block in enumerate(model.blocks):
            products = [
                self._product(f"blocks.{number}", [part(block, name) for name in names], integers) for names in GROUPS
            ]
            settings |= {(product.settings, product.places()[1].shape) for product in products}
            norms = [block.get_parameter(f"{name}.weight").detach().numpy() for name in ("attention_norm", "mlp_norm")]
            caches = [np.zeros(shape, np.float32) for _ in range(2)]
            rows.append((norms, *caches, [product.places() for product in products]))
            self._held.append(products)
        if len(settings) > 1:
            raise ValueError("all layers of the blocks must have the same bits, blocks, rotations and type of scales")
        bits, *others = settings.pop()[0]
        paths = [one for products in self._held for one in products if isinstance(one, PathProduct)]
        any_of = tuple(sorted({each for one in paths for each in one.bits}))
        return blocks.Blocks(rows, (self._cos, self._sin), self._stream, (any_of or bits, *others, self._eps))

    def _product(self, name: str, parts: Sequence[nn.Module], integers: bool) -> Product | PathProduct:
        known = [each for each in parts if isinstance(each, QuantizedLinear)]
        paths = [each.code for each in known if isinstance(each, TrellisLinear)]
        readable = all(plain(each.codec) and (paths or each.codec.bits in BITS) for each in known)
        if len(known) < len(parts) or not readable:
            raise ValueError(f"{name} has layers that are not quantized to one of {BITS} bits by the default codebook")
        if 0 < len(paths) < len(known):
            raise ValueError(f"{name} must have codes of one kind, not some of single weights and some of paths")
        for each in known:
            same = alike(each.codec, known[0].codec) if paths else each.codec == known[0].codec
            if each.shape[1] % each.codec.block or not same:
                said = f"blocks of {each.codec.block} must divide {each.shape[1]} and have one seed"
                raise ValueError(f"{name}: {said}, and codes of single weights as many bits in all layers")
        made = PathProduct(paths, integers) if paths else Product(known, integers)
        self.nbytes += made.nbytes
        return made

    def step(self, number: int) -> np.ndarray:
        """Logits after one more token, fp32 [V], written over by the next step; number: of the token.

        Raises:
            ValueError: there is no room for it.
        """
        if self.at == self.length:
            raise ValueError(f"room for {self.length} tokens is used up")
        self._stream[:] = self._embed[number]
        self._blocks.run(self.at)
        token.add_and_norm(self._stream, self._last, self._norm, self._eps, self._head.x)
        self.at += 1
        return self._head.run()

    def generate(self, prompt: Sequence[int], tokens: int, end: int | None = None) -> Iterator[int]:
        """The likeliest tokens after a prompt, at most so many; ``end`` ends them and is not among them."""
        logits = None
        for number in prompt:
            logits = self.step(number)
        for _ in range(tokens):
            assert logits is not None
            found = int(logits.argmax())
            if found == end:
                return
            yield found
            if self.at == self.length:
                return
            logits = self.step(found)

    def forget(self, length: int = 0) -> None:
        """Go back to ``length`` tokens."""
        self.at = min(self.at, length)
