"""What leaves a host is the payload of the formulas and a few headers."""

import pytest

from tq.lab import sparse_wire
from tq.lab.net import hosts
from tq.systems.synchronisation import sparse_bytes


@pytest.mark.skipif(hosts.obstacle() is not None, reason=f"needs hosts: {hosts.obstacle()}")
def test_bytes_at_the_interface_are_the_payload_and_headers() -> None:
    found = sparse_wire.wire({"ranks": 2, "numel": 2_000_000, "times": 4})
    assert found is not None and set(found) == {"dgc", "ours", "fp32"}
    for method, each in found.items():
        assert 1 < each["over"] < (1.2 if method == "dgc" else 1.03), (method, each)


def test_payloads() -> None:
    assert sparse_wire.payload("fp32", 4, 1000) == 6000
    assert sparse_wire.payload("ours", 2, 128_000) == 128_000 * 4.25 / 8
    assert sparse_wire.payload("dgc", 8, 1_000_000) == sparse_bytes(1e6, 8, 0.001) == 7 * 1000 * 6
