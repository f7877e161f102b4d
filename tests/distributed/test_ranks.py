"""Training on real ranks follows the run of one process."""

from __future__ import annotations

import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from tests.distributed.helpers import values
from tq import Codec
from tq.train.collectives import GroupError
from tq.train.experiments.ranks import HOWS, ParallelTrainer
from tq.train.model.corpus import load
from tq.train.model.gpt import GPT, PRESETS
from tq.train.model.loop import TrainConfig, Trainer

CONFIG = TrainConfig(steps=6, batch=4, lr=2e-3, warmup=1)
DILOCO = {"every": 2, "lr": 1.0, "momentum": 0.0}


def run(rank: int, ranks: int) -> dict[str, Any]:
    corpus, found = load("stdlib", max_bytes=200_000), {}
    for how in ("ddp", "fsdp", "diloco"):
        for codec in (None, Codec(8)):
            options = {"diloco": DILOCO} if how == "diloco" else {}
            trainer = ParallelTrainer(GPT(PRESETS["tiny"]), corpus, CONFIG, how, codec, **options)
            trainer.train(progress=False)
            found[f"{how} {codec is not None}"] = (trainer.mean_losses(), trainer.evaluate(2))
    pairwise = ParallelTrainer(GPT(PRESETS["tiny"]), corpus, CONFIG, "fsdp", pairwise=True)
    pairwise.train(progress=False)
    found["fsdp pairwise"] = (pairwise.mean_losses(), pairwise.evaluate(2))
    with pytest.raises(ValueError, match="pairwise=True goes with how='fsdp' and no codec"):
        ParallelTrainer(GPT(PRESETS["tiny"]), corpus, CONFIG, "fsdp", Codec(8), pairwise=True)
    for bad, said in (({"how": "zero"}, "how must be one of"), ({}, "ranks times accumulate=1 must divide 3")):
        with pytest.raises(ValueError, match=said):
            ParallelTrainer(GPT(PRESETS["tiny"]), corpus, CONFIG if bad else TrainConfig(steps=2, batch=3), **bad)
    dist.barrier()
    return found


def at_two_sites(rank: int, ranks: int, inside: str) -> dict[str, Any]:
    corpus = load("stdlib", max_bytes=200_000)
    trainer = ParallelTrainer(
        GPT(PRESETS["tiny"]), corpus, CONFIG, "diloco", Codec(4), diloco={"every": 3}, sites=[0, 1, 0, 1], inside=inside
    )
    same = []
    for _ in range(6):
        trainer.step()
        whole = [
            p.full_tensor() if isinstance(p, DTensor) else p for p in map(torch.detach, trainer.model.parameters())
        ]
        crc = torch.tensor([zlib.crc32(torch.cat([p.flatten() for p in whole]).numpy())])
        everyone = [torch.empty_like(crc) for _ in range(ranks)]
        dist.all_gather(everyone, crc)
        same.append([int(c) for c in everyone])
    assert trainer.outer is not None
    for bad, said in (([0, 0, 0, 1], "sites must put the 4 ranks at sites of one size"), ([0, 1, 0, 1], "inside must")):
        with pytest.raises(ValueError, match=said):
            how = "ddp" if bad[1] == 0 else "zero"
            ParallelTrainer(GPT(PRESETS["tiny"]), corpus, CONFIG, "diloco", sites=bad, inside=how)
    return {"same": same, "held_out": trainer.evaluate(2)}


@pytest.mark.parametrize("inside", ["ddp", "fsdp"])
def test_sites_agree_inside_always_and_across_in_turn(inside: str, tmp_path: Path) -> None:
    found = values(4, tmp_path, at_two_sites, inside)
    for step, crcs in enumerate(found[0]["same"], start=1):
        assert crcs[0] == crcs[2] and crcs[1] == crcs[3]
        assert (crcs[0] == crcs[1]) == (step % 3 == 0)
    assert len({rank["held_out"] for rank in found}) == 1


def stopped(rank: int, ranks: int, how: str, folder: str) -> dict[str, Any]:
    corpus = load("stdlib", max_bytes=200_000)

    def made(bits: int = 4) -> ParallelTrainer:
        options = {"diloco": {"every": 2}} if how == "diloco" else {}
        return ParallelTrainer(GPT(PRESETS["tiny"]), corpus, CONFIG, how, Codec(bits), **options)

    whole, first, second = made(), made(), made()
    whole.train(progress=False)
    first.train(4, progress=False)
    first.save(f"{folder}/{rank}")
    second.load(f"{folder}/{rank}")
    second.train(progress=False)
    for path, bits, said in (
        (f"{folder}/{(rank + 1) % ranks}", 4, "another run .rank:"),
        (f"{folder}/{rank}", 2, "codec:"),
    ):
        with pytest.raises(ValueError, match=said):
            made(bits).load(path)
    dist.barrier()
    return {"whole": whole.mean_losses(), "resumed": second.mean_losses()}


@pytest.mark.parametrize("how", HOWS)
def test_stop_and_resume(how: str, tmp_path: Path) -> None:
    for found in values(2, tmp_path, stopped, how, str(tmp_path)):
        if how == "ddp":
            torch.testing.assert_close(found["resumed"], found["whole"], rtol=0, atol=2e-2)
        else:
            assert torch.equal(found["resumed"], found["whole"])


def test_ranks_follow_the_run_of_one_process(tmp_path: Path) -> None:
    found = values(2, tmp_path, run)
    alone = Trainer(GPT(PRESETS["tiny"]), load("stdlib", max_bytes=200_000), CONFIG)
    losses = torch.tensor(alone.train(progress=False), dtype=torch.float64)
    valid = alone.evaluate(2)
    for key, (mean, held_out) in found[0].items():
        assert found[1][key][1] == held_out, key
        assert torch.equal(mean, found[1][key][0])
        if key.startswith("diloco"):
            assert abs(held_out - valid) < 0.1
        else:
            tight = key.endswith(("False", "pairwise"))
            torch.testing.assert_close(mean, losses, rtol=0, atol=2e-4 if tight else 2e-2)
            assert abs(held_out - valid) < (1e-3 if tight else 2e-2), key


def accumulated(rank: int, ranks: int) -> dict[str, Any]:
    corpus, found = load("stdlib", max_bytes=200_000), {}
    for how in ("ddp", "fsdp"):
        once = ParallelTrainer(GPT(PRESETS["tiny"]), corpus, CONFIG, how, Codec(8))
        parts = ParallelTrainer(GPT(PRESETS["tiny"]), corpus, replace(CONFIG, accumulate=2), how, Codec(8))
        for trainer in (once, parts):
            trainer.train(2, progress=False)
        assert once.exchange is not None and parts.exchange is not None
        found[how] = (once.exchange.step, parts.exchange.step, (once.mean_losses() - parts.mean_losses()).abs().max())
    return found


def test_an_accumulated_step_is_exchanged_once(tmp_path: Path) -> None:
    for how, (once, parts, difference) in values(2, tmp_path, accumulated)[0].items():
        assert once == parts, how
        assert difference < 0.02


def overflowing(rank: int, ranks: int) -> tuple[int, float, bool]:
    corpus = load("stdlib", max_bytes=200_000)
    config = replace(CONFIG, autocast=torch.float16)
    with pytest.raises(ValueError, match="with FSDP2: its ranks would scale apart"):
        ParallelTrainer(GPT(PRESETS["tiny"]), corpus, config, "fsdp")
    trainer = ParallelTrainer(GPT(PRESETS["tiny"]), corpus, config, "ddp", Codec(8))
    before = [p.clone() for p in trainer.model.parameters()]
    trainer.scaler._init_scale = 2.0**40  # every gradient overflows
    trainer.step()
    same = all(torch.equal(p, q) for p, q in zip(trainer.model.parameters(), before, strict=True))
    return trainer.skipped, trainer.scaler.get_scale(), same


def test_an_overflowing_float16_step_is_skipped_on_every_rank(tmp_path: Path) -> None:
    assert values(2, tmp_path, overflowing) == [(1, 2.0**39, True)] * 2


def apart(rank: int, ranks: int, folder: str) -> list[str]:
    corpus, said = load("stdlib", max_bytes=200_000), []
    trainer = ParallelTrainer(GPT(PRESETS["tiny"]), corpus, CONFIG, "ddp", Codec(8))
    states = [trainer.state_dict()]
    trainer.train(1, progress=False)
    states.append(trainer.state_dict())
    other = ParallelTrainer(GPT(PRESETS["tiny"], seed=rank), corpus, CONFIG, "diloco", Codec(8), diloco=DILOCO)
    for call in (lambda: trainer.load_state_dict(states[rank]), other.step):
        try:
            call()
        except GroupError as error:
            said.append(str(error))
    return said


def test_ranks_that_would_go_on_apart_are_told(tmp_path: Path) -> None:
    for said in values(2, tmp_path, apart, str(tmp_path)):
        assert said[0] == "rank 1 asks for a start after step 1, others for a start after step 0"
        assert said[1].startswith("rank 1 asks for replicas with the weights ")
