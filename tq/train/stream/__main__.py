"""Train a GPT of any depth in a fixed memory, from files; says first whether it fits, how long it takes and what it
writes.

examples:
  python -m tq.train.stream --preset 8m --memory 700MB --place scratch --steps 100
  python -m tq.train.stream --preset gpt2-124m --layers 96 --memory 3GB --accumulate 8 --place run --state 4,8 --dry-run
  python -m tq.train.stream --preset 8m --memory 700MB --place run --steps 100 --save model.safetensors
"""

from __future__ import annotations

import argparse
import re
import shutil
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from tq.systems.tiers import steps_of_a_drive
from tq.train.model.corpus import Corpus, load
from tq.train.model.gpt import PRESETS
from tq.train.model.loop import TrainConfig
from tq.train.stream.export import save
from tq.train.stream.forecast import Run, disk_bytes, load_program, memory_need
from tq.train.stream.layout import Model
from tq.train.stream.options import CLIPS, check
from tq.train.stream.trainer import StreamedTrainer
from tq.train.stream.trial import Forecast, forecast

KEPT_BACK = 0.12
_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "KI": 2**10, "MI": 2**20, "GI": 2**30, "TI": 2**40}


def bytes_of(text: str) -> int:
    """The bytes of "400MB", "1.5GiB" or "1000000"."""
    found = re.fullmatch(r"\s*([0-9.]+)\s*([KMGT]?i?)B?\s*", text, re.IGNORECASE)
    try:
        size = float(found[1]) * _UNITS[found[2].upper()] if found else 0.0
    except (ValueError, KeyError):
        size = 0.0
    if size < 1:
        raise argparse.ArgumentTypeError(f"must be a size such as 400MB or 1.5GiB, got {text!r}")
    return int(size)


def bits_of(text: str) -> tuple[int, int] | None:
    """The pair of "4,8"; None for "fp32"."""
    if text == "fp32":
        return None
    try:
        m, v = (int(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be 'fp32' or two numbers of bits such as 4,8, got {text!r}") from None
    return m, v


def kept(text: str) -> str | int:
    """"memory", "place", or a number of bits."""
    return int(text) if text.isdigit() else text


def parser() -> argparse.ArgumentParser:
    """Of the command line."""
    found = argparse.ArgumentParser(
        "python -m tq.train.stream", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = found.add_argument
    add("--preset", choices=sorted(PRESETS), required=True, help="shape of the model")
    add("--layers", type=int, help="another number of layers than the preset's")
    add("--memory", type=bytes_of, required=True, help="that the process may write to, e.g. 400MB; it is enforced")
    add("--place", type=Path, help="folder of the files; without one everything stays in memory")
    add("--scratch", action="store_true", help="half the disk space, and a run that ends with its process")
    add("--steps", type=int, default=100, help="length of the run (default 100)")
    add("--batch", type=int, default=8, help="sequences per step (default 8)")
    add("--accumulate", type=int, default=1, help="parts that go through a layer one after the other (default 1)")
    add("--seq", type=int, help="tokens per sequence (default: the preset's longest)")
    add("--lr", type=float, default=1e-3, help="peak learning rate (default 1e-3)")
    add("--grad-clip", type=float, default=1.0, help="largest norm of the gradient; 0 does not clip (default 1)")
    add("--clip", choices=CLIPS, default="global", help="which norm clips (default: that of this step, exactly)")
    add("--state", type=bits_of, default=None, help="bits of both moments, e.g. 4,8 (default fp32)")
    add("--inputs", type=kept, help="where inputs of layers wait: memory, place, or bits (default: as it fits)")
    add("--resident", type=int, default=0, help="first layers that stay in memory (default 0)")
    add("--loss-tokens", type=int, help="positions whose logits are computed at once (default: all)")
    add("--threads", type=int, default=0, help="of the computation (default: as PyTorch)")
    add("--endurance", type=float, default=600.0, help="TB that the drive may take (default 600, a drive of 1 TB)")
    add("--seed", type=int, default=0)
    add("--impl", choices=("auto", "cpu", "reference"), default="auto", help="of the update")
    add("--dry-run", action="store_true", help="say what the run takes, and stop")
    add("--save", type=Path, help="a safetensors file for the weights at the end")
    return found


def size(nbytes: float) -> str:
    """Bytes as people read them."""
    for unit, one in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6)):
        if nbytes >= one:
            return f"{nbytes / one:.3g} {unit}" if nbytes / one < 100 else f"{nbytes / one:,.0f} {unit}"
    return f"{nbytes / 1e3:.0f} kB"


def needed(run: Run, program: int) -> dict[str, int]:
    """``memory_need``, and what the C library keeps of what was freed: seen up to 11 % with one and two threads."""
    need = memory_need(run, program)
    return need | {"freed and kept": int(KEPT_BACK * sum(need.values()))}


def fitted(run: Run, memory: int, given: str | int | None, program: int) -> Run:
    """The run with inputs where they fit.

    ValueError, one sentence, where nothing does: what takes most, and what would help.
    """
    choices = [given] if given is not None else ["memory", *(["place"] if run.place is not None else [])]
    for choice in choices:
        tried = replace(run, inputs=choice)
        if sum(needed(tried, program).values()) <= memory:
            return tried
    need = needed(replace(run, inputs=choices[-1]), program)
    most = max(need, key=lambda name: need[name])
    raise ValueError(
        f"it does not fit: a step needs {size(sum(need.values()))}, {size(memory)} are given, and most is "
        f"{most} ({size(need[most])}); {_advice(run, memory, program, choices[-1])}"
    )


def _advice(run: Run, memory: int, program: int, inputs: str | int) -> str:
    """What would make it fit."""
    if program >= memory:
        return "the program alone is larger than that"
    if run.place is None:
        return "--place lets the layers lie in files"
    config = run.config
    parts = [n for n in range(2 * config.accumulate, config.batch + 1) if config.batch % n == 0]
    tries = {f"--accumulate {n} would fit": replace(run, config=replace(config, accumulate=n)) for n in parts}
    tries["--loss-tokens 64 would fit"] = replace(run, loss_tokens=64)
    tries["--resident 0 would fit"] = replace(run, resident=0)
    tries["--clip previous would fit"] = replace(run, clip="previous")
    for words, tried in tries.items():
        if sum(needed(replace(tried, inputs=inputs), program).values()) <= memory:
            return words
    return "no option of this command makes it fit"


def report(found: Forecast, memory: int, program: int, endurance: float) -> str:
    """What the run will take, a line each."""
    run, step, seconds = found.run, found.step, found.step_s
    need, steps, tried = needed(run, program), run.config.steps, found.trial
    how = "by arithmetic" if tried is None else f"tried with {' and '.join(map(str, tried.depths))} layers"
    tokens, state = run.config.batch * run.seq, Model(run.model, run.state).nbytes
    lines = [
        f"model      {run.model.num_parameters:,} parameters in {run.model.layers} layers; weights and moments take "
        f"{size(state)}",
        f"memory     {size(sum(need.values()))} of {size(memory)}: "
        + ", ".join(f"{name} {size(nbytes)}" for name, nbytes in need.items()),
        f"time       {seconds:.2f} s a step of {tokens:,} tokens ({tokens / seconds:,.0f} tokens/s), "
        f"{how}, {step.binds} binds; {steps:,} steps take {seconds * steps / 3600:.2f} h",
    ]  # fmt: skip
    if run.place is not None:
        written = step.bytes_written()
        lines.append(
            f"disk       {size(disk_bytes(run))} of space; a step reads {size(step.bytes_read())} and writes "
            f"{size(written)}"
        )
        lines.append(
            f"wear       {size(written * steps)} in all; a drive that may take {endurance:,.0f} TB lasts "
            f"{float(steps_of_a_drive(endurance * 1e12, written)):,.0f} steps"
        )
        if step.binds == "disk":
            lines.append(f"hint       {step.hides_at():.1f} times as many tokens a step would hide the disk")
    return "\n".join(lines)


def enforce(memory: int) -> bool:
    """The system refuses this process any more; False where it cannot."""
    try:
        import resource

        resource.setrlimit(resource.RLIMIT_DATA, (memory, resource.getrlimit(resource.RLIMIT_DATA)[1]))
    except (ImportError, OSError, ValueError):
        return False
    return True


def _run(given: argparse.Namespace) -> Run:
    shape = PRESETS[given.preset]
    if given.layers is not None:
        shape = replace(shape, layers=given.layers)
    config = TrainConfig(
        steps=given.steps, batch=given.batch, seq=given.seq, lr=given.lr, accumulate=given.accumulate, seed=given.seed,
        grad_clip=given.grad_clip or None,
    )  # fmt: skip
    return Run(
        shape, config, given.place, given.state, "memory", given.clip, not given.scratch, given.resident,
        given.loss_tokens, given.impl,
    )  # fmt: skip


def _refused(given: argparse.Namespace, run: Run, corpus: Corpus, program: int) -> Run:
    """The run as it fits; ValueError or OSError, in one sentence, where it cannot work."""
    check(run.model, corpus, run.config, inputs="memory" if given.inputs is None else given.inputs, clip=run.clip,
          resident=run.resident, loss_tokens=run.loss_tokens, impl=run.impl, state=run.state,
          place=run.place)  # fmt: skip
    run = fitted(run, given.memory, given.inputs, program)
    if run.place is not None:
        run.place.mkdir(parents=True, exist_ok=True)
        there = sum(x.stat().st_size for x in run.place.iterdir() if x.is_file())
        room, taken = shutil.disk_usage(run.place).free + there, disk_bytes(run)
        if taken > room:
            raise OSError(f"the files need {size(taken)}, the disk of {run.place.name} has {size(room)} free")
    return run


def main(arguments: Sequence[str] | None = None) -> int:
    """Of the command line; 1 where something cannot work."""
    given = parser().parse_args(arguments)
    if given.threads:
        torch.set_num_threads(given.threads)
    try:
        corpus = load("stdlib")  # before the program is weighed: it stays in memory
        program = load_program(given.impl)
        run = _refused(given, _run(given), corpus, program)
        print(report(forecast(run), given.memory, program, given.endurance), flush=True)
        if given.dry_run:
            return 0
        if not enforce(given.memory):
            print("the system cannot enforce the memory here", file=sys.stderr)
        with StreamedTrainer(
            run.model, corpus, run.config, run.place, state=run.state, seed=given.seed, inputs=run.inputs,
            clip=run.clip, resumable=run.resumable, resident=run.resident, loss_tokens=run.loss_tokens, impl=run.impl,
        ) as trainer:  # fmt: skip
            if trainer.steps_done:
                print(f"resumed after step {trainer.steps_done}", flush=True)
            losses = trainer.train()
            if losses:
                print(f"loss {losses[0]:.4f} before the first step, {losses[-1]:.4f} before the last")
            if given.save is not None:
                save(trainer, given.save)
                print(f"{given.save}: {given.save.stat().st_size:,} bytes")
    except (ValueError, OSError, FloatingPointError) as error:
        print(f"stream: {error}", file=sys.stderr)
        return 1
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and "alloc" not in str(error):
            raise
        print(f"stream: the {size(given.memory)} were not enough after all; give it a tenth more", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
