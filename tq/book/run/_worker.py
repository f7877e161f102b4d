"""One chapter, executed by papermill in a process of its own. Started by `tq.book.run.reproduce`, not by hand.

The kernel is this very interpreter, whatever kernelspecs the machine has. When the runner dies, by whatever signal,
so do this process, the kernel and what the kernel started. Says how far it is as JSON lines on a file descriptor.
"""

from __future__ import annotations

import ctypes
import dataclasses
import json
import os
import re
import signal
import sys
import traceback
from pathlib import Path
from types import FrameType
from typing import Any

from tq.lab import peak_memory

PR_SET_PDEATHSIG = 1
# The kernel is killed with its parent also when that gets no chance to clean up. Linux only: elsewhere ipykernel
# itself looks every second whether its parent lives.
KERNEL = """
import sys
if sys.platform == "linux":
    import ctypes, signal
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
import runpy
runpy.run_module("ipykernel_launcher", run_name="__main__")
"""


def die_with(parent: int) -> None:
    """From now on this process gets SIGTERM when its parent dies."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:  # it died before
        os._exit(128 + signal.SIGTERM)


def _end_all(number: int, frame: FrameType | None) -> None:
    """Ends the kernel and everything below it; torchrun's workers have sessions of their own, so by descent."""
    import psutil

    for process in psutil.Process().children(recursive=True):
        try:
            process.kill()
        except psutil.NoSuchProcess:
            continue
    os._exit(128 + number)


def _kernel_manager() -> type[Any]:
    from jupyter_client import AsyncKernelManager
    from jupyter_client.kernelspec import KernelSpec

    class ThisInterpreter(AsyncKernelManager):
        """Starts the running interpreter, so that a kernelspec of another environment cannot take its place."""

        @property
        def kernel_spec(self) -> KernelSpec:
            command = [sys.executable, "-c", KERNEL, "-f", "{connection_file}"]
            return KernelSpec(argv=command, display_name="Python 3", language="python")

    return ThisInterpreter


def execute(source: Path, output: Path, parameters: dict[str, str], tell: Any) -> int:
    """Runs the notebook into `output`; returns the exit code.

    tell(dict) is called at each cell, and at the end with the cells' seconds.
    """
    import papermill
    from nbclient.exceptions import DeadKernelError

    from tq.book.run.clean import clean

    total = sum(1 for cell in json.loads(source.read_text(encoding="utf-8"))["cells"] if _counts(cell))
    seen: list[str] = []

    def started(cell: dict[str, Any], cell_index: int) -> None:
        if _counts(cell):
            seen.append(cell["source"])
            tell({"cell": len(seen), "of": total})

    failure = {"of": total, "source": "", "cell": 0, "error": "", "traceback": ""}
    try:
        nb = papermill.execute_notebook(
            source, output, parameters, kernel_name="python3", language="python", progress_bar=False,
            cwd=source.parent, kernel_manager_class=_kernel_manager(), on_cell_start=started,
        )  # fmt: skip
        clean(nb)  # what could not be committed fails here, not at promotion
    except papermill.PapermillExecutionError as error:
        trace = re.sub(r"\x1b\[[0-9;]*m", "", "\n".join(error.traceback))
        failure |= {"error": f"{error.ename}: {error.evalue}", "traceback": trace}
    except DeadKernelError as error:
        failure |= {"error": f"the kernel died ({error}); out of memory?"}
    except ValueError as error:
        tell({"failed": failure | {"error": str(error), "traceback": traceback.format_exc()}})
        return 1
    else:
        seconds = [cell.metadata.papermill.duration for cell in nb.cells if _counts(cell)]
        tell({"done": [round(s or 0.0, 3) for s in seconds]})
        return 0
    tell({"failed": failure | {"cell": len(seen), "source": seen[-1] if seen else ""}})
    return 1


def _counts(cell: dict[str, Any]) -> bool:
    """A code cell of the author's: not empty, not papermill's."""
    source = cell["source"] if isinstance(cell["source"], str) else "".join(cell["source"])
    return bool(
        cell["cell_type"] == "code"
        and source.strip()
        and "injected-parameters" not in cell.get("metadata", {}).get("tags", [])
    )


def main(source: str, output: str, device: str, profile: str, descriptor: str, parent: str) -> None:
    signal.signal(signal.SIGTERM, _end_all)
    die_with(int(parent))
    with os.fdopen(int(descriptor), "w", encoding="utf-8") as pipe:

        def tell(message: dict[str, Any]) -> None:
            pipe.write(json.dumps(message) + "\n")
            pipe.flush()

        with peak_memory.watch() as usage:
            code = execute(Path(source), Path(output), {"device": device, "profile": profile}, tell)
        tell({"usage": dataclasses.asdict(usage)})
    sys.exit(code)


if __name__ == "__main__":
    main(*sys.argv[1:])
