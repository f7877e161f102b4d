"""The stacks: what each needs beside this package, pinned, and which program runs it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
MARK = ".pins"
PROGRAMS = (  # whole names, so that results depend on them
    "tq.lab.stacks.with_ddp", "tq.lab.stacks.with_fsdp", "tq.lab.stacks.with_lightning",
    "tq.lab.stacks.with_lightning_fsdp", "tq.lab.stacks.with_accelerate", "tq.lab.stacks.with_trainer",
    "tq.lab.stacks.with_deepspeed", "tq.lab.stacks.with_ray", "tq.lab.stacks.with_megatron",
    "tq.lab.stacks.with_titan",
)  # fmt: skip
LIGHTNING = ("lightning==2.6.6", "lightning-utilities==0.15.3", "torchmetrics==1.9.0")


@dataclass(frozen=True)
class Stack:
    """One engine.

    Attributes:
        name: of its program, ``tq.lab.stacks.with_NAME``, and of its folder.
        title: as its makers write it, with the version.
        needs: pinned packages beside those of this book, all of them: nothing else is installed.
        ways: of ``task.WAYS`` that its program knows beside "plain".
        changes: what a user changes, in a line.
        launcher: "torchrun", or "own" where the program starts its workers itself.
        flags: of pip.
        environment: of pip and of the program.
    """

    name: str
    title: str
    needs: tuple[str, ...] = ()
    ways: tuple[str, ...] = ("backend",)
    changes: str = ""
    launcher: str = "torchrun"
    flags: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def module(self) -> str:
        return next(program for program in PROGRAMS if program.endswith(f".with_{self.name}"))

    @property
    def folder(self) -> Path:
        """Where ``install`` puts its packages: below TQ_STACKS, else below the checkout's _build/stacks."""
        return Path(os.environ.get("TQ_STACKS", ROOT / "_build" / "stacks")).absolute() / self.name

    def obstacle(self) -> str | None:
        """Why it cannot run here, in a sentence; None if it can."""
        pins = self.folder / MARK
        if not self.needs or (pins.is_file() and pins.read_text().split() == list(self.needs)):
            return None
        return f"{self.title} is not installed (python -m tq.lab.stacks install {self.name})"

    def install(self) -> None:
        """Fetch its pinned packages into its folder, unless they lie there.

        Raises:
            subprocess.CalledProcessError: where pip fails.
        """
        if self.obstacle() is None:
            return
        shutil.rmtree(self.folder, ignore_errors=True)
        argv = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
        argv += [*self.flags, "--target", str(self.folder), *self.needs]
        subprocess.run(argv, check=True, env={**os.environ, **self.environment})
        (self.folder / MARK).write_text("\n".join(self.needs))


PYDANTIC = (
    "msgpack==1.2.4", "pydantic==2.14.4", "pydantic_core==2.50.5", "annotated-types==0.8.0", "typing-inspection==0.4.5",
)  # fmt: skip
STACKS = {
    stack.name: stack
    for stack in (
        Stack("ddp", "PyTorch DDP", ways=("backend", "hook", "bf16"), changes='`init_process_group("tq")`'),
        Stack("fsdp", "PyTorch FSDP2", ways=("backend", "hook", "bf16"), changes='`init_process_group("tq")`'),
        Stack(
            "lightning", "Lightning 2.6.6, DDPStrategy", LIGHTNING, ("backend", "hook"),
            '`DDPStrategy(process_group_backend="tq")`',
        ),
        Stack(
            "lightning_fsdp", "Lightning 2.6.6, FSDP2", LIGHTNING, ("backend", "hook"),
            '`ModelParallelStrategy(process_group_backend="tq")`',
        ),
        Stack(
            "accelerate", "Accelerate 1.15.0", ("accelerate==1.15.0",), ("backend", "hook"),
            '`init_process_group("tq")` before `Accelerator()`',
        ),
        Stack(
            "trainer", "Transformers 5.24.0, Trainer",
            ("transformers==5.24.0", "accelerate==1.15.0", "regex==2026.11.19"), ("backend", "hook", "optimizer"),
            '`init_process_group("tq")` before `TrainingArguments()`',
        ),
        Stack(
            "deepspeed", "DeepSpeed 0.19.8, ZeRO 0-3",
            ("deepspeed==0.19.8", "einops==0.8.2", "hjson==3.1.0", "py-cpuinfo==9.0.0", *PYDANTIC),
            changes='`init_distributed("tq")`; "reduce_scatter": false where a tensor is no multiple of the ranks',
            flags=("--no-build-isolation",), environment={"DS_ACCELERATOR": "cpu", "DS_BUILD_OPS": "0"},
        ),
        Stack(
            "ray", "Ray Train 2.60.0", ("ray==2.60.0", "protobuf==7.36.2", "pyarrow==26.0.1", *PYDANTIC),
            changes='`TorchConfig(backend="tq")`, and a `worker_process_setup_hook` that imports `tq.backend`',
            launcher="own",
            environment={"RAY_USAGE_STATS_ENABLED": "0", "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"},  # loopback only
        ),
        Stack(
            "megatron", "Megatron-core 0.16.1, DDP buckets", ("megatron-core==0.16.1",),
            changes='`new_group(backend="tq")` for the data-parallel group',
        ),
        Stack(
            "titan", "torchtitan 0.3.0, apply_fsdp_to_decoder",
            ("torchtitan==0.3.0", "spmd_types==0.2.3", "tyro==1.0.16", "docstring_parser==0.18.0", "typeguard==4.6.1"),
            ("backend", "hook"), '`default_device_backend_map["cuda"] = "tq"`, and sums forced to be plain sums',
        ),
    )
}
