"""A stack's program on whose rank 1 something goes wrong: it dies at its third step, or its settings are others."""

import json
import os
import runpy
import signal

from tq.lab.stacks import task

given = json.loads(os.environ[task.TASK])
rank = int(os.environ.get("RANK", os.environ.get("LOCAL_RANK", "0")))
stepped = task.Task.stepped


def dies(self: task.Task) -> None:
    stepped(self)
    if self.rank == 1 and len(self._steps) == 3:
        os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    if given["options"]["fault"] == "dies":
        task.Task.stepped = dies  # type: ignore[method-assign]
    elif rank == 1:
        os.environ[task.TASK] = json.dumps({**given, "bits": 3})
    runpy.run_module(given["options"]["module"], run_name="__main__")
