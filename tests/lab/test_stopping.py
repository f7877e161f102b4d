"""A stopped process: nothing in it moves, it comes back in time, and its helper goes with it."""

import os
import subprocess
import sys
import time

import psutil
import pytest

from tq.lab.stopping import Stopper

TICKS = """
import threading, time
from tq.lab.stopping import Stopper
ticks = []
def tick():
    while True:
        ticks.append(time.monotonic())
        time.sleep(0.005)
threading.Thread(target=tick, daemon=True).start()
with Stopper(awake_s=0.2) as stopper:
    began = time.monotonic()
    print("begins", flush=True)
    stopper.pause(1.0)
    ended = time.monotonic()
    time.sleep(0.1)
    gaps = [b - a for a, b in zip(ticks, ticks[1:]) if began <= a <= ended]
    print(ended - began, max(gaps), flush=True)
    stopper.pause(0.21)
"""


def test_all_threads_stand_still_and_go_on_in_time() -> None:
    with subprocess.Popen([sys.executable, "-c", TICKS], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline().strip() == "begins"
        me, deadline = psutil.Process(process.pid), time.monotonic() + 5
        while me.status() != psutil.STATUS_STOPPED:
            assert time.monotonic() < deadline, "it was never stopped"
            time.sleep(0.005)
        took, longest = map(float, process.stdout.readline().split())
        assert 1.0 <= took < 2.0 and 0.75 < longest < 2.0
        assert process.wait() == 0


def test_the_helper_ends_with_its_process() -> None:
    code = "from tq.lab.stopping import Stopper; s = Stopper(); print(s._helper.pid, flush=True); s.pause(60)"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        helper = int(process.stdout.readline())
        process.kill()
    deadline = time.monotonic() + 5
    while psutil.pid_exists(helper) and psutil.Process(helper).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline, "the helper is left"
        time.sleep(0.02)


def test_another_process_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with Stopper() as stopper:
        monkeypatch.setattr(os, "getpid", lambda: 1)
        with pytest.raises(RuntimeError, match="is another one"):
            stopper.pause(0.1)
        monkeypatch.undo()
        stopper.close()
