"""Packets at random moments from one host to another, each with its time. Standard library only.

python -S FILE receive PORT COUNT      prints a line "ready", then [[number, seconds sent, seconds received], ...]
python -S FILE send ADDRESS PORT COUNT RATE BYTES SEED      at RATE a second on average, with exponential gaps
"""

from __future__ import annotations

import json
import random
import socket
import struct
import sys
import time

SO_TIMESTAMPNS = 35  # the kernel's own time of arrival, before this process is awake


def receive(port: int, count: int) -> None:
    """Until all have come, or nothing for three seconds."""
    s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    s.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 22)
    s.setsockopt(socket.SOL_SOCKET, SO_TIMESTAMPNS, 1)
    s.bind(("", port))
    s.settimeout(30)
    print("ready", flush=True)
    found: list[tuple[int, float, float]] = []
    while len(found) < count:
        try:
            data, extra, _, _ = s.recvmsg(2048, 128)
        except TimeoutError:
            break
        s.settimeout(3)
        whole, part = struct.unpack("qq", extra[0][2][:16])
        number, sent = struct.unpack("!Id", data[:12])
        found.append((number, sent, whole + part * 1e-9))
    print(json.dumps(found))


def send(address: str, port: int, count: int, rate: float, nbytes: int, seed: int) -> None:
    """Packets of so many bytes with UDP's, IP's and Ethernet's headers."""
    draw, s = random.Random(seed), socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    s.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 22)
    s.connect((address, port))
    rest = bytes(nbytes - 42 - 12)
    at = time.time() + 0.1
    for number in range(count):
        at += draw.expovariate(rate)
        if (left := at - time.time()) > 0.0008:
            time.sleep(left - 0.0006)
        while time.time() < at:  # a sleep ends late by a tenth of a millisecond or more
            pass
        s.send(struct.pack("!Id", number, time.time()) + rest)


if __name__ == "__main__":
    if sys.argv[1] == "receive":
        receive(int(sys.argv[2]), int(sys.argv[3]))
    else:
        words = sys.argv[2:]
        send(words[0], int(words[1]), int(words[2]), float(words[3]), int(words[4]), int(words[5]))
