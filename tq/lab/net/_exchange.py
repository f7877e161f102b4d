"""One host's part in rounds of messages. Standard library only, so that it starts in no time: python -S FILE

The first line on stdin is who talks to whom: {"address", "port", "out": [[peer, address, source port], ...], "in": how
many, "congestion"}. Each further line is a run: {"start": monotonic seconds, "rounds": [{"send": [[peer, bytes], ...],
"receive": [[peer, bytes], ...], "times": n}, ...]}. A round is over when all has left for the interface's queue and all
has come: a message of the next round does not share the link with it. What is printed: a line "ready", then for each
run {"end": monotonic seconds, "heard": {peer: seconds}}.
"""

from __future__ import annotations

import fcntl
import json
import select
import socket
import struct
import sys
import time

PART = 1 << 18
SPIN_S = 0.0005  # before the start a host does not sleep any more, as it would wake up late
SIOCOUTQNSD = 0x894B  # asks a socket for the bytes that TCP has not yet sent
_NOTHING, _ROOM = memoryview(bytes(PART)), bytearray(PART)


def _connection(rank: int, address: str, port: int, source: tuple[str, int], congestion: str) -> socket.socket:
    deadline = time.monotonic() + 20
    while True:
        made = socket.socket()
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, congestion.encode())
        made.settimeout(5)
        try:
            made.bind(source)
            made.connect((address, port))
            made.sendall(rank.to_bytes(4, "big"))
            return made
        except OSError:
            made.close()
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)


def _read(connection: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        more = connection.recv(size - len(data))
        if not more:
            raise ConnectionError("the other end has gone")
        data += more
    return data


def _round(out: dict[int, socket.socket], inn: dict[int, socket.socket], turn: dict, heard: dict[int, float]) -> None:
    """Sends and receives at once, until both are done."""
    to = {out[peer].fileno(): [out[peer], size] for peer, size in turn["send"] if size}
    of = {inn[peer].fileno(): [inn[peer], size, peer] for peer, size in turn["receive"] if size}
    poll = select.poll()
    for number in to:
        poll.register(number, select.POLLOUT)
    for number in of:
        poll.register(number, select.POLLIN)
    while to or of:
        for number, _ in poll.poll(60_000) or [(-1, 0)]:
            if number == -1:
                raise TimeoutError("nothing has moved for a minute")
            if number in to:
                job = to[number]
                job[1] -= job[0].send(_NOTHING[: job[1]])
                if not job[1]:
                    poll.unregister(number)
                    del to[number]
            else:
                job = of[number]
                got = job[0].recv_into(_ROOM, min(job[1], PART))
                if not got:
                    raise ConnectionError(f"host {job[2]} has gone")
                job[1] -= got
                if not job[1]:
                    heard[job[2]] = time.monotonic()
                    poll.unregister(number)
                    del of[number]


    for peer, _ in turn["send"]:
        while struct.unpack("i", fcntl.ioctl(out[peer], SIOCOUTQNSD, bytes(4)))[0]:
            time.sleep(5e-5)


def main() -> None:
    """Connects, then runs what the lines say, until there are no more."""
    who = json.loads(sys.stdin.readline())
    server = socket.create_server((who["address"], who["port"]), backlog=64)
    out = {
        peer: _connection(who["rank"], address, who["port"], (who["address"], source), who["congestion"])
        for peer, address, source in who["out"]
    }  # fmt: skip
    inn: dict[int, socket.socket] = {}
    server.settimeout(30)
    while len(inn) < who["in"]:
        connection, _ = server.accept()
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.settimeout(30)
        inn[int.from_bytes(_read(connection, 4), "big")] = connection
    for connection in (*out.values(), *inn.values()):
        connection.setblocking(False)
    print("ready", flush=True)
    for line in sys.stdin:
        run = json.loads(line)
        heard: dict[int, float] = {}
        time.sleep(max(0.0, run["start"] - time.monotonic() - SPIN_S))
        while time.monotonic() < run["start"]:
            pass
        for turn in run["rounds"]:
            for _ in range(turn["times"]):
                _round(out, inn, turn, heard)
        print(json.dumps({"end": time.monotonic(), "heard": heard}), flush=True)


if __name__ == "__main__":
    main()
