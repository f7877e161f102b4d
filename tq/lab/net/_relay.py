"""Wires that take a time: frames between TAP devices, each passed on after a delay. Standard library only.

python -S FILE DELAY_S PID ...: a device eth0 in the network namespace of each process, with the hardware address
02:00:00:00:00:NN, NN the place in the list. Frames to an address go to its device, all others to every other one.
Prints "ready" once the devices are there.
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import fcntl
import os
import select
import struct
import sys
import time

SPIN_S = 0.0005  # before a frame is due the relay does not sleep any more, as it would wake up late
TUNSETIFF, IFF_TAP, IFF_NO_PI, CLONE_NEWNET = 0x400454CA, 0x2, 0x1000, 0x40000000


def device(pid: int) -> int:
    """A TAP device in the network namespace of a process, which this one enters for it."""
    libc = ctypes.CDLL(None, use_errno=True)
    namespace = os.open(f"/proc/{pid}/ns/net", os.O_RDONLY)
    if libc.setns(namespace, CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "setns")
    os.close(namespace)
    tap = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(tap, TUNSETIFF, struct.pack("16sH22x", b"eth0", IFF_TAP | IFF_NO_PI))
    return tap


def main() -> None:
    """Relays until it is ended."""
    with contextlib.suppress(OSError):  # a wire waits for nobody; without the right to it, it is a little late
        os.setpriority(os.PRIO_PROCESS, 0, -15)
    delay, taps = float(sys.argv[1]), [device(int(pid)) for pid in sys.argv[2:]]
    print("ready", flush=True)
    waiting: collections.deque[tuple[float, int, bytes]] = collections.deque()  # in order, as all wait equally long
    while True:
        left = max(0.0, waiting[0][0] - time.monotonic() - SPIN_S) if waiting else None
        for tap in select.select(taps, [], [], left)[0]:
            for _ in range(64):
                try:
                    frame = os.read(tap, 1 << 16)
                except OSError:  # nothing more, or a device that is not up yet
                    break
                due = time.monotonic() + delay
                to = frame[5] if frame[:5] == b"\x02\0\0\0\0" else -1
                for other in [taps[to]] if 0 <= to < len(taps) else [t for t in taps if t != tap]:
                    waiting.append((due, other, frame))
        now = time.monotonic()
        while waiting and waiting[0][0] <= now:
            _, tap, frame = waiting.popleft()
            try:
                os.write(tap, frame)
            except OSError:  # its queue is full or it is down: dropped, as a wire would
                pass


if __name__ == "__main__":
    main()
