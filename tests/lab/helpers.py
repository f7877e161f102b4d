"""Which quantizers a test finds, whatever the machine has."""

from __future__ import annotations

import sys

import pytest

from tq.lab import peers

HERE = ("PyTorch reference", "bitsandbytes", "turboquant-torch", "fast-hadamard-transform")
HIDDEN = ("bitsandbytes", "bitsandbytes.functional", "turboquant", "fast_hadamard_transform")


def few_peers(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    """Only these: compiling takes long, and a machine may have peers installed."""
    monkeypatch.setattr(peers, "PEERS", {name: peers.PEERS[name] for name in names})


def hide(monkeypatch: pytest.MonkeyPatch, *modules: str) -> None:
    for module in modules:
        monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.setattr(peers.metadata, "version", _no_version)


def _no_version(name: str) -> str:
    raise peers.metadata.PackageNotFoundError(name)
