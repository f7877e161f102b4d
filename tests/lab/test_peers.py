"""Other people's quantizers: the same data for all, and what is missing is named with the reason."""

from __future__ import annotations

import sys
import types
from functools import partial
from typing import Any

import pytest
import torch

from tests.lab.helpers import HERE, HIDDEN, few_peers, hide
from tq.lab import peers, timing
from tq.lab.peers import Missing


def test_missing_peers_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    few_peers(monkeypatch, *HERE)
    hide(monkeypatch, *HIDDEN)
    found, missing = peers.peers("cpu", 1 << 12)
    assert [peer.name for peer in found] == ["PyTorch reference"]
    assert [absent.name for absent in missing] == list(HERE[1:])
    assert all("not installed" in absent.reason for absent in missing), missing


def test_what_a_peer_needs_and_how_it_fails_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def needs(*_: Any) -> list[Any]:
        raise ModuleNotFoundError("No module named 'scipy'", name="scipy")

    def fails(*_: Any) -> list[Any]:
        raise RuntimeError("no compiler\nand a long story")

    monkeypatch.setattr(peers, "PEERS", {"turboquant-torch": needs, "torchao": fails})
    assert peers.peers("cpu", 1 << 12)[1] == [
        Missing("turboquant-torch", "needs scipy, which is not installed"),
        Missing("torchao", "RuntimeError: no compiler"),
    ]


def test_what_is_left_out_is_named_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> list[Any]:
        raise AssertionError("was asked for")

    monkeypatch.setattr(timing, "cache_bytes", lambda device: 1 << 12)
    monkeypatch.setattr(peers, "PEERS", {"PyTorch reference": peers.PEERS["PyTorch reference"], "torchao": fails})
    rows, missing = peers.compare_peers("cpu", 1 << 12, repeats=1, without={"torchao": "takes too long"})
    assert [row.peer.name for row in rows] == ["PyTorch reference"]
    assert missing == [Missing("torchao", "takes too long")]


def test_all_peers_share_the_inputs_and_outputs(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a processor with half a gigabyte of cache every further set of them is two gigabytes."""
    monkeypatch.setattr(timing, "cache_bytes", lambda device: 512 << 20)
    few_peers(monkeypatch, "PyTorch reference")
    compare = partial(peers.compare_peers, "cpu", 1 << 18, 1, most_bytes=32 << 20)
    extra = timing.peak_extra_bytes(compare)
    assert extra is not None and 64 << 20 < extra < 96 << 20  # in, out, codes and the reference's temporaries


def test_an_installed_peer_is_measured_on_the_same_data(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for bitsandbytes: halves of everything, so its error is known, and it is slow."""
    fake = types.ModuleType("bitsandbytes.functional")
    sizes: list[int] = []

    def quantize(x: torch.Tensor, **_: Any) -> tuple[torch.Tensor]:
        sizes.append(x.numel())
        timing.time.sleep(0.003)
        return (x.clone(),)

    def dequantize(x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        timing.time.sleep(0.003)
        return x / 2

    for name in ("quantize_4bit", "quantize_blockwise"):
        monkeypatch.setattr(fake, name, quantize, raising=False)
        monkeypatch.setattr(fake, "de" + name, dequantize, raising=False)
    monkeypatch.setitem(sys.modules, "bitsandbytes", types.ModuleType("bitsandbytes"))
    monkeypatch.setitem(sys.modules, "bitsandbytes.functional", fake)
    monkeypatch.setattr(timing, "cache_bytes", lambda device: 1 << 12)
    few_peers(monkeypatch, "bitsandbytes")
    rows, missing = peers.compare_peers("cpu", 1 << 12, repeats=3)
    assert missing == [] and set(sizes) == {1 << 12}
    assert [row.peer.name for row in rows] == ["bitsandbytes NF4", "bitsandbytes 8-bit"]
    for row in rows:
        assert row.nmse == pytest.approx(0.25)
        assert row.ours_nmse < 0.02
        assert row.ours.bits_per_element == row.peer.bits + 0.25  # as many bits as the peer, not 4 against 8
        assert row.encode_over.low > 1 and row.decode_over.low > 1


def test_the_compiled_reference_gives_the_reference_or_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    few_peers(monkeypatch, "torch.compile of it")
    monkeypatch.setattr(timing, "cache_bytes", lambda device: 1 << 12)
    found, missing = peers.peers("cpu", 1 << 12)
    if not found:  # a machine without a C++ compiler
        (absent,) = missing
        assert absent.name == "torch.compile of it" and absent.reason
        return
    x = torch.randn(1 << 12, generator=torch.Generator().manual_seed(1))
    want = timing.standard().encode(x, impl="reference")
    code = found[0].encode(x)
    assert (code.payload == want.payload).float().mean() > 0.999
    torch.testing.assert_close(found[0].decode(want), timing.standard().decode(want, impl="reference"))
