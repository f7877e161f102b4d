"""Runs beside llm-compressor's packages: quantizes a model with one of its methods, and compares as it then runs.

    python -m tq.lab.engines.compress MODEL TEXTS METHOD BITS GROUP OUT

BITS: a number, or {layer: number} in JSON, by our names. MODEL: as ``tq.infer.pretrained.keep`` writes; TEXTS:
safetensors with "calibration" and "held_out", tokens int64 [S, T], and "hidden", what the reference's head sees of the
held-out ones; OUT: npz of a ``Divergence``.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from llmcompressor import oneshot
from llmcompressor.modifiers.autoround import AutoRoundModifier
from llmcompressor.modifiers.gptq import GPTQModifier
from llmcompressor.modifiers.quantization import QuantizationModifier
from llmcompressor.modifiers.transform import AWQModifier, QuIPModifier, SpinQuantModifier
from safetensors.torch import load_file
from torch.utils.data import DataLoader
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from tq.infer.evaluate import Reference, divergence
from tq.infer.llama import their_name, to_llama
from tq.infer.pretrained import load

setattr(torch.Tensor, "pin_memory", lambda self, *_: self)  # noqa: B010  # AWQ pins, which needs an accelerator
METHODS = ("none", "nearest", "gptq", "awq", "spinquant", "quip", "autoround")


def recipe(method: str, bits: int | dict[str, int], group: int) -> list[Any]:
    """The modifiers of a method, asymmetric integers with a scale and a zero point for each group of a row.

    method: one of ``METHODS``; with " mse" after it, scales are searched for the least squared error, by the library's
        own observer, else they span the least to the largest weight; with " damped" after it, GPTQ's moments get 0.03
        of their mean on the diagonal, as those of paths through a trellis do, else the library's 0.01.
    bits: of all linear layers, or of each, by our names.
    """
    method, *more = method.split()
    observer = {"observer": "memoryless_mse"} if "mse" in more else {}
    widths = {"Linear": bits} if isinstance(bits, int) else {their_name(name): each for name, each in bits.items()}
    schemes = {
        f"group_{each}": QuantizationScheme(
            targets=[name for name, found in widths.items() if found == each],
            weights=QuantizationArgs(
                num_bits=each, type="int", symmetric=False, strategy="group", group_size=group, **observer
            ),
        )
        for each in sorted(set(widths.values()))
    }
    given: dict[str, Any] = {"config_groups": schemes, "ignore": ["lm_head"]}
    if method == "nearest":
        return [QuantizationModifier(**given)]
    if method == "awq":
        return [AWQModifier(), QuantizationModifier(**given)]
    if method == "autoround":
        return [AutoRoundModifier(**given, enable_torch_compile=False)]
    gptq = GPTQModifier(**given, actorder="static", dampening_frac=0.03 if "damped" in more else 0.01)
    if method == "gptq":
        return [gptq]
    if method == "quip":
        return [QuIPModifier(transform_type="random-hadamard"), gptq]
    return [SpinQuantModifier(rotations=["R1", "R2"], transform_type="random-hadamard"), gptq]


def main() -> None:
    source, texts, method, bits, group, out = sys.argv[1:]
    language, given = load(Path(source)), load_file(texts)
    reference = Reference(language.model.head, given["held_out"], given["hidden"])
    with TemporaryDirectory() as folder:  # it reads a model's settings from where it lies
        to_llama(language.model).save_pretrained(folder)
        theirs = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
        if method == "autoround":
            theirs = theirs.bfloat16()  # which is what it computes its gradients in
        if method != "none":
            quantize(theirs, given["calibration"], recipe(method, json.loads(bits), int(group)), language.tokenizer)
            theirs = theirs.float()
    found = divergence(reference, lambda ids: (theirs(ids, use_cache=False).logits, None))
    np.savez(out, kl=found.kl_ST, loss=found.loss_ST, reference=found.reference_ST, agree=found.agree)


def quantize(model: Any, ids_ST: torch.Tensor, modifiers: list[Any], tokenizer: Any) -> None:
    """The library's one-shot quantization, in place, on calibration texts."""
    each: Any = [{"input_ids": ids[None], "attention_mask": torch.ones_like(ids)[None]} for ids in ids_ST]
    processor = PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    oneshot(
        model=model, dataset=DataLoader(each, batch_size=None), recipe=modifiers, num_calibration_samples=len(each),
        processor=processor,
    )  # fmt: skip


if __name__ == "__main__":
    main()
