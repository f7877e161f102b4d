"""On what a result was measured: device, commit, versions. It reads; what it cannot learn is None, never guessed."""

from __future__ import annotations

import os
import platform
import subprocess
from importlib import metadata

from tq.book import paths


def resolve_device(device: str = "auto") -> str:
    """ "cpu" or "cuda"; "auto" takes the GPU if there is one; "cuda" without one raises."""
    if device == "cpu":
        return device
    if device not in ("auto", "cuda"):
        raise ValueError(f"device={device!r}: accepted are 'auto', 'cpu' and 'cuda'")
    import torch

    available = torch.cuda.is_available()
    if device == "cuda" and not available:
        raise ValueError("device='cuda': torch sees no GPU here; accepted are 'auto' and 'cpu'")
    return "cuda" if available else "cpu"


def cores() -> int:
    """Processor cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def device_name(device: str) -> str:
    """What the device calls itself, e.g. "NVIDIA H200" or "AMD EPYC 7B13, 2 cores"."""
    if device == "cuda":
        import torch

        return torch.cuda.get_device_name(0)
    model = platform.processor() or platform.machine()
    if os.path.exists("/proc/cpuinfo"):
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as cpuinfo:
            found = [line.split(":", 1)[1].strip() for line in cpuinfo if line.startswith("model name")]
        model = found[0] if found else model
    return f"{model}, {cores()} core{'s' if cores() != 1 else ''}"


def _git(*arguments: str) -> str | None:
    command = ["git", "-C", str(paths.root()), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, stdin=subprocess.DEVNULL)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def commit() -> tuple[str | None, bool | None]:
    """(commit, dirty) of the tree; a copy without git is told its commit by `TQ_COMMIT`, and dirty is then unknown."""
    head = _git("rev-parse", "HEAD")
    if head is None:
        return os.environ.get("TQ_COMMIT") or None, None
    changes = _git("status", "--porcelain")
    return head, None if changes is None else bool(changes)


def full_commit(name: str) -> str:
    """The full name of a commit; ValueError where there is none of that name."""
    found = _git("rev-parse", "--verify", "--quiet", f"{name}^{{commit}}")
    if found is None:
        raise ValueError(f"commit={name!r}: git knows no commit of that name here")
    return found


def versions() -> dict[str, str]:
    """Versions of Python and of the packages that decide a result; what is not installed is left out."""
    found = {"python": platform.python_version()}
    for package in ("torch", "numpy", "triton", "numba"):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue  # the absence is the information
    return found
