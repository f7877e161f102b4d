"""A streamed run and its twin in memory, each in a process of its own, under one ceiling or none.

The ceiling is ``RLIMIT_DATA``: what a process may write to, program and stacks included. Both sides are the same
subprocess, so that whatever memory is refused is refused by the system and not by us.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMBA_NUM_THREADS")  # their stacks count
FIELDS = (
    "layers", "hidden", "seq", "batch", "steps", "accumulate", "state", "clip", "inputs", "resident", "impl", "large"
)  # fmt: skip


def in_process(way: str, place: str, ceiling: int | None, timeout_s: float = 1800, **run: Any) -> dict[str, Any]:
    """Runs "forecast", "streamed", "measured" (both, one after the other) or "memory" in a fresh process.

    run: values for ``FIELDS``; large: whether transfers go through large pages.

    Returns:
        losses, digest of the weights, seconds of each step, most resident bytes; or ``refused``, the system's words.
    """
    job = json.dumps({"way": way, "place": place, "ceiling": ceiling, **run})
    env = {**os.environ, "MALLOC_ARENA_MAX": "1", **dict.fromkeys(THREADS, "1")}
    if way == "memory" and ceiling is None:  # weights and moments in large pages, as a streamed run has its records
        env["GLIBC_TUNABLES"] = "glibc.malloc.hugetlb=1"
    done = subprocess.run(
        [sys.executable, "-m", "tq.lab.streaming", job], capture_output=True, text=True, env=env, timeout=timeout_s,
        cwd=Path(__file__).resolve().parents[2],
    )  # fmt: skip
    if done.returncode:
        return {"refused": done.stderr.strip().splitlines()[-1] if done.stderr.strip() else f"exit {done.returncode}"}
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def under_one_ceiling(folder: str, room: int = 8 << 20, at_once: int = 1, **run: Any) -> dict[str, Any]:
    """The ceiling is what the forecast of a streamed run needs, and ``room`` bytes.

    Streamed under it, in memory under it, and in memory without one: whether losses and weights agree bit for bit.
    at_once: of these three; above 1 their seconds say nothing."""
    need = in_process("forecast", folder, None, **run)
    ceiling = int(need["bytes"]) + room
    with tempfile.TemporaryDirectory(dir=folder) as place, ThreadPoolExecutor(at_once) as pool:
        sides = (("streamed", place, ceiling), ("memory", folder, ceiling), ("memory", folder, None))
        waiting = [pool.submit(in_process, *side, **run) for side in sides]
        streamed, held, free = [side.result() for side in waiting]
    return {
        "ceiling": ceiling, "program": need["program"], "state": need["state"], "streamed": streamed,
        "memory_under_it": held, "memory": free,
        "same": streamed.get("losses") == free.get("losses") and streamed.get("digest") == free.get("digest"),
    }  # fmt: skip


def forecast_and_measured(folder: str, **run: Any) -> dict[str, Any]:
    """Seconds of a step as forecast by arithmetic and by a trial, and as a streamed run then took; or ``refused``."""
    with tempfile.TemporaryDirectory(dir=folder) as place:
        return in_process("measured", place, None, measure=True, **run)


# --- inside the process ---
def _shape(job: dict[str, Any]) -> tuple[Any, Any]:
    from tq.train.model import GPTConfig, TrainConfig

    shape = GPTConfig(layers=job["layers"], hidden=job["hidden"], heads=max(1, job["hidden"] // 64), vocab=256,
                      seq=job["seq"])  # fmt: skip
    config = TrainConfig(steps=job["steps"], batch=job["batch"], grad_clip=job.get("clip"),
                         accumulate=job.get("accumulate", 1))  # fmt: skip
    return shape, config


def _state(job: dict[str, Any]) -> tuple[int, int] | None:
    return tuple(job["state"]) if job.get("state") else None


def _forecast(job: dict[str, Any]) -> dict[str, Any]:
    from tq.train.stream.forecast import Run, load_program, memory_need
    from tq.train.stream.layout import Model
    from tq.train.stream.trial import forecast

    shape, config = _shape(job)
    impl = job.get("impl", "reference")
    program = load_program(impl)
    run = Run(
        shape, config, Path(job["place"]), _state(job), job.get("inputs", "place"), resident=job.get("resident", 0),
        impl=impl,
    )  # fmt: skip
    found: dict[str, Any] = {"program": program, "bytes": sum(memory_need(run, program).values()),
             "state": Model(shape, _state(job)).nbytes}  # fmt: skip
    if job.get("measure"):
        before = forecast(run)
        if before.trial is None:
            raise RuntimeError("there was no room for the trial of a step")
        step = before.step
        found |= {"seconds": step.seconds(), "trial": before.step_s, "binds": step.binds, "read": step.bytes_read(),
                  "written": step.bytes_written()}  # fmt: skip
    return found


def _streamed(job: dict[str, Any], corpus: Any) -> dict[str, Any]:
    from tq.train.stream import StreamedTrainer

    shape, config = _shape(job)
    with StreamedTrainer(
        shape, corpus, config, job["place"], state=_state(job), inputs=job.get("inputs", "place"),
        resident=job.get("resident", 0), impl=job.get("impl", "reference"),
    ) as trainer:  # fmt: skip
        works, before = [], _moved()
        for _ in range(config.steps):
            trainer.step()
            works.append(trainer.work)
        after = _moved()
        counted = [sum(getattr(w, name) for w in works if w) for name in ("bytes_read", "bytes_written")]
        return {
            "losses": trainer.losses, "digest": _digest(trainer.weights()), "system": [a - b for a, b in
            zip(after, before, strict=True)], "counted": counted,
            "seconds": [w.seconds for w in works if w], "waited": [w.waited_s for w in works if w],
        }  # fmt: skip


def _memory(job: dict[str, Any], corpus: Any) -> dict[str, Any]:
    """The twin: the same model whole in memory, each block computed again in the backward pass."""
    from torch.utils.checkpoint import checkpoint

    from tq.train.model import GPT, Trainer
    from tq.train.optim import TurboQuantAdamW
    from tq.train.stream import layer_groups

    shape, config = _shape(job)
    model = GPT(shape)
    for block in model.blocks.children():
        plain = block.forward

        def again(*given: Any, plain: Any = plain) -> Any:
            return checkpoint(plain, *given, use_reentrant=False)

        block.forward = again

    def optimizer(_: Any) -> TurboQuantAdamW:
        return TurboQuantAdamW(
            layer_groups(model, config.weight_decay), lr=config.lr, betas=config.betas, eps=config.eps,
            variant="local", state=_state(job), impl=job.get("impl", "reference"), bucket_elements=1 << 40,
        )  # fmt: skip

    trainer = Trainer(model, corpus, config, optimizer=optimizer)
    seconds = []
    for _ in range(config.steps):
        began = time.perf_counter()
        trainer.step()
        seconds.append(time.perf_counter() - began)
    return {"losses": trainer.losses, "digest": _digest(model.named_parameters()), "seconds": seconds}


def _digest(named: Any) -> str:
    import hashlib

    found = hashlib.blake2b(digest_size=16)
    for name, x in named:
        found.update(name.encode())
        found.update(memoryview(x.detach().numpy().data).cast("B"))
    return found.hexdigest()


def _moved() -> list[int]:
    """(read, written) bytes of this process at the disk, by the system's count."""
    lines = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return [int(lines["read_bytes"]), int(lines["write_bytes"])]


def main(text: str) -> None:
    """A job, as ``in_process`` writes it."""
    import torch

    job = json.loads(text)
    torch.set_num_threads(1)
    if not job.get("large", True):
        from tq.train.stream import files

        files.ADVICE = 15  # MADV_NOHUGEPAGE
    if job["way"] == "forecast":
        print(json.dumps(_forecast(job)))
        return
    from tq.train.model import load
    from tq.train.stream.forecast import load_program

    load_program(job.get("impl", "reference"))
    if job["ceiling"]:
        import resource

        resource.setrlimit(resource.RLIMIT_DATA, (job["ceiling"], job["ceiling"]))
    corpus = load("stdlib", max_bytes=1_000_000)
    if job["way"] == "measured":
        print(json.dumps({"forecast": _forecast(job), "measured": _streamed(job, corpus)}))
        return
    found = (_streamed if job["way"] == "streamed" else _memory)(job, corpus)
    lines = Path("/proc/self/status").read_text().splitlines()
    most = next((int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM:")), 0)
    print(json.dumps({**found, "most": most}))


if __name__ == "__main__":
    main(sys.argv[1])
