"""Hosts with shaped links: rates, bytes, sites, faults, and that nothing of it stays."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest
import torch

from tests.distributed import test_collectives as collective
from tests.distributed.helpers import outcomes
from tests.lab import crew_functions as on
from tq.lab.net import hosts, namespaces
from tq.lab.net.crew import Crew
from tq.lab.net.hosts import HostsFailed, Lab, NetworkUnavailable

WHY = hosts.obstacle()
needs_hosts = pytest.mark.skipif(WHY is not None, reason=f"needs hosts: {WHY}")
# As an ordinary user, and as root where we are.
as_user_or_root = pytest.mark.parametrize("as_user", (True, *([False] if os.geteuid() == 0 else [])))


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> None:
    """What the ranks would compile on their first call, while others wait for an answer."""
    assert outcomes(2, tmp_path_factory.mktemp("ranks"), on.first, timeout_s=240) == [{"value": "donedone"}] * 2


SERVE = """
import socket
connection, _ = socket.create_server(("", 9000)).accept()
got = 0
while data := connection.recv(1 << 20):
    got += len(data)
connection.sendall(str(got).encode())
"""
SEND = """
import socket, sys, time
for _ in range(200):
    try:
        connection = socket.create_connection((sys.argv[1], 9000), 1)
        break
    except OSError:
        time.sleep(0.05)
connection.settimeout(60)
start = time.perf_counter()
connection.sendall(bytes(int(sys.argv[2])))
connection.shutdown(socket.SHUT_WR)
assert connection.recv(100) == sys.argv[2].encode()
print(int(sys.argv[2]) * 8e-6 / (time.perf_counter() - start))
"""


def mbit(lab: Lab, sender: int, receiver: int, nbytes: int, folder: Path) -> float:
    """Rate of a TCP connection, in 1e6 bit/s of its payload."""
    server = lab.start(receiver, [sys.executable, "-S", "-c", SERVE])
    with open(folder / "sent", "w+") as said:
        client = lab.start(sender, [sys.executable, "-S", "-c", SEND, lab.address(receiver), str(nbytes)], output=said)
        assert client.wait(60) == 0 and server.wait(10) == 0
        said.seek(0)
        return float(said.read())


@needs_hosts
@as_user_or_root
@pytest.mark.parametrize(("rate", "nbytes"), ((20, 3_000_000), (200, 25_000_000)))
def test_a_link_has_the_rate_that_was_asked_for(rate: float, nbytes: int, as_user: bool, tmp_path: Path) -> None:
    with Lab(2, rate, _as_user=as_user) as lab:
        before = lab.sent_bytes(0)
        assert 0.85 * rate < mbit(lab, 0, 1, nbytes, tmp_path) < 1.02 * rate
        assert 1.0 < (lab.sent_bytes(0) - before) / nbytes < 1.06


@needs_hosts
def test_directions_sites_and_new_rates(tmp_path: Path) -> None:
    with Lab(3, (100, 10), sites=[0, 0, 1], between_mbit=4) as lab:
        assert 8 < mbit(lab, 0, 1, 4_000_000, tmp_path) < 10.2  # down to host 1
        before = lab.site_bytes(0)
        assert 3.2 < mbit(lab, 1, 2, 2_000_000, tmp_path) < 4.1  # between the sites
        assert 1.0 < (lab.site_bytes(0) - before) / 2_000_000 < 1.06
        lab.shape(None)
        lab.shape_sites(50)
        assert 40 < mbit(lab, 1, 2, 5_000_000, tmp_path) < 51


@needs_hosts
def test_ranks_answer_calls_and_say_what_failed() -> None:
    with Lab(2) as lab, Crew(lab, timeout_s=30) as crew:
        assert crew.call(on.total, value=3) == [{"sum": 3.0, "rank": 0}, {"sum": 3.0, "rank": 1}]
        with pytest.raises(HostsFailed, match="rank 1: ValueError: not on this one"):
            crew.call(on.fail, rank=1)
        assert crew.call(on.total, value=1)[1]["sum"] == 1.0


@needs_hosts
def test_a_rank_takes_one_thread_whatever_its_maker_may_take(monkeypatch: pytest.MonkeyPatch) -> None:
    for library in ("OMP", "MKL", "NUMBA"):
        monkeypatch.setenv(f"{library}_NUM_THREADS", "2")
    with Lab(1) as lab:
        with Crew(lab, timeout_s=30) as crew:
            assert {crew.call(on.threads)[0][f"{library}_NUM_THREADS"] for library in ("OMP", "MKL", "NUMBA")} == {"1"}
        with Crew(lab, timeout_s=30, env={"MKL_NUM_THREADS": "2"}) as crew:
            assert crew.call(on.threads)[0]["MKL_NUM_THREADS"] == "2"


def cut() -> None:
    """A link that is cut ends the collective on all ranks."""
    with Lab(2, 50) as lab, Crew(lab, timeout_s=8) as crew:
        crew.timeout_s = 120  # how long we wait; the ranks wait 8 s for each other
        crew.call(on.reduce, numel=1000, times=1)
        # the call is under way when the cable is drawn: some 3 s of traffic
        threading.Timer(1.0, lab.cut, [1]).start()
        start = time.monotonic()
        said = crew.call(on.reduce, numel=8_000_000, times=20)
        assert time.monotonic() - start < 25
        assert "no answer from rank 1" in said[0] and "rank 1 reaches neither" in said[1], said


@needs_hosts
@pytest.mark.usefixtures("compiled")
def test_a_cut_link_ends_the_collective_on_all_ranks_within_the_timeout() -> None:
    cut()


@needs_hosts
def test_a_killed_host_takes_its_processes_along() -> None:
    with Lab(2) as lab:
        process = lab.start(1, ["sleep", "1000"])
        time.sleep(0.2)
        lab.kill(1)
        assert process.wait(5) != 0


@needs_hosts
@as_user_or_root
def test_nothing_stays_when_the_maker_is_killed(as_user: bool) -> None:
    code = (
        f"import time\nfrom tq.lab.net.hosts import Lab\nlab = Lab(3, 10, _as_user={as_user})\n"
        "lab.start(1, ['sleep', '1000'])\nprint('up', flush=True)\ntime.sleep(100)\n"
    )
    maker = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert maker.stdout is not None and maker.stdout.readline() == "up\n"
    children = psutil.Process(maker.pid).children(recursive=True)
    assert len(children) >= 2 * 4 + 1
    maker.send_signal(signal.SIGKILL)
    maker.wait()
    assert psutil.wait_procs(children, timeout=10)[1] == []
    maker.stdout.close()


def goes_on(folder: Path) -> None:
    """A job that loses a rank, and is started again, has the losses of one that does not."""
    found = []
    for name in ("whole", "dies"):
        (folder / name).mkdir()
        with Lab(2) as lab:
            # A store that outlives the round of a restart tells ranks where the others were before.
            fresh = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
            lab.torchrun([on.__file__, str(folder / name), f"--{name}"], timeout_s=90, max_restarts=1, env=fresh)
        found += [torch.load(folder / name / f"losses-{rank}") for rank in (0, 1)]
    assert (folder / "dies" / "died").exists() and not (folder / "whole" / "died").exists()
    assert len(found[0]) == 8 and all(torch.equal(losses, found[0]) for losses in found)


@needs_hosts
@pytest.mark.usefixtures("compiled")
def test_a_job_that_lost_a_rank_goes_on_to_the_same_losses(tmp_path: Path) -> None:
    goes_on(tmp_path)


@needs_hosts
def test_a_command_that_fails_is_shown(tmp_path: Path) -> None:
    with Lab(1) as lab, pytest.raises(HostsFailed, match="(?s)hosts .0.: ended with an error.*no-such-script"):
        lab.torchrun([str(tmp_path / "no-such-script.py")], timeout_s=60)


@needs_hosts
def test_the_host_that_failed_is_named_and_nothing_goes_on(tmp_path: Path) -> None:
    script = tmp_path / "one.py"
    script.write_text(
        "import os, sys, time\nif os.environ['RANK'] == '1':\n    sys.exit('the culprit')\ntime.sleep(60)\n"
    )
    with Lab(2) as lab:
        start = time.monotonic()
        with pytest.raises(HostsFailed, match=r"(?s)hosts \[1\]: ended with an error.*the culprit"):
            lab.torchrun([str(script)], timeout_s=60)
        assert time.monotonic() - start < 40
        script.write_text("")
        lab.torchrun([str(script)], timeout_s=60)  # the port is free again


@needs_hosts
def test_a_rank_that_is_stuck_ends_with_its_crew() -> None:
    with Lab(1) as lab:
        crew = Crew(lab, timeout_s=1)
        crew._order(0, {"module": on.__name__, "function": "rest", "arguments": {"seconds": 60}})
        crew._turn = 1
        crew.close()
        with Crew(lab, timeout_s=30) as crew:
            assert crew.call(on.total, value=2)[0]["sum"] == 2.0


@pytest.mark.parametrize(
    ("arguments", "said"),
    (
        ({"hosts": 0}, "hosts must be 1 to 80, got 0"),
        ({"hosts": 2, "rate_mbit": -1}, "a rate must be positive Mbit/s or None"),
        ({"hosts": 2, "sites": [0, 2]}, "sites must number the site of each of 2 hosts"),
    ),
)
def test_bad_arguments(arguments: dict[str, object], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Lab(**arguments)  # type: ignore[arg-type]


def refused() -> str:
    hosts._way.cache_clear()
    try:
        with pytest.raises(NetworkUnavailable) as refusal:
            Lab(2, 10)
        return str(refusal.value)
    finally:
        hosts._way.cache_clear()


def test_where_it_is_not_allowed_one_sentence_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    unshare = tmp_path / "unshare"
    unshare.write_text("#!/bin/sh\necho 'unshare failed: Operation not permitted' >&2\nexit 1\n")
    unshare.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    start = "namespaces or token buckets are not allowed to whoever is not root here"
    assert refused() == f"{start} (unshare failed: Operation not permitted)"
    monkeypatch.setattr("os.geteuid", lambda: 0)
    assert refused().startswith("namespaces or token buckets are not allowed to root here (")


def test_where_a_command_is_missing_one_sentence_names_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(namespaces, "_path_of", lambda tool: None if tool == "tc" else f"/bin/{tool}")
    assert refused() == "the commands of iproute2 are not installed"


AS_ORDINARY_USER = """
import os, time
from tq.lab.net.hosts import Lab, obstacle  # before it gives up root, who alone may be able to read this interpreter
if os.geteuid() == 0:
    os.setgroups([])
    os.setresgid(65534, 65534, 65534)
    os.setresuid(65534, 65534, 65534)
os.environ["PATH"] = "/usr/bin:/bin"  # of a login; tc lies elsewhere on Debian
assert os.geteuid() != 0 and obstacle() is None, obstacle()
with Lab(3, 10, sites=[0, 0, 1], between_mbit=4) as lab:
    before = lab.received_bytes(2)
    send = f"for _ in {{1..100}}; do head -c 1000 /dev/zero > /dev/udp/{lab.address(2)}/9000; done"
    assert lab.start(0, ["bash", "-c", send]).wait(20) == 0
    deadline = time.monotonic() + 20
    while lab.received_bytes(2) - before < 100_000:
        assert time.monotonic() < deadline, lab.received_bytes(2) - before
    print("arrived")
"""


@needs_hosts
def test_an_ordinary_user_makes_hosts() -> None:
    done = subprocess.run([sys.executable, "-c", AS_ORDINARY_USER], capture_output=True, text=True, timeout=120)
    assert done.stdout == "arrived\n", done.stderr


@needs_hosts
def test_a_host_is_entered_only_when_its_users_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who enters before that is nobody in there, and may do nothing."""
    asked, really = [], namespaces._has_users
    monkeypatch.setattr(namespaces, "_has_users", lambda pid: asked.append(pid) or (len(asked) > 3 and really(pid)))
    made = namespaces.Namespace(as_user=True)
    try:
        assert len(asked) > 3 and really(made.pid)
    finally:
        made.close()


def existing_namespaces() -> set[str]:
    """Network namespaces of the processes of this machine, and named ones."""
    found = {str(path) for path in Path("/var/run/netns").glob("*")}
    for process in psutil.process_iter():
        with contextlib.suppress(OSError):
            found.add(os.readlink(f"/proc/{process.pid}/ns/net"))
    return found


@needs_hosts
@pytest.mark.soak
@pytest.mark.usefixtures("compiled")
def test_twenty_faults_of_each_kind_leave_nothing(tmp_path: Path) -> None:
    before = existing_namespaces()
    for turn in range(20):
        cut()
        (tmp_path / str(turn)).mkdir()
        goes_on(tmp_path / str(turn))
        for case, ranks, said in (
            (collective.another_codec, 3, "rank 1 asks for"),
            (collective.not_finite, 3, "what rank 1 sent"),
            (collective.killed, 4, "no answer from rank 1:"),
        ):
            found = outcomes(ranks, tmp_path / f"{turn}-{case.__name__}", case, timeout_s=20)
            assert all(said in outcome["error"] for outcome in found if outcome), found
    assert existing_namespaces() <= before
