"""The command line: answers, JSON that agrees with the text, and errors of one line with exit code 2."""

from __future__ import annotations

import datetime
import io
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tq.economics import calculator, prices
from tq.economics.__main__ import EXAMPLES, main
from tq.economics.savings import reference
from tq.economics.terminal import progress
from tq.systems import tables

DAY = ["--as-of", prices.load().newest.isoformat()]
RUN = ["--model", "llama2-7b", "--tp", "2", "--dp", "8", "--tokens", "1e11", "--samples", "500", *DAY]


def ask(capsys: pytest.CaptureFixture[str], *arguments: str) -> Any:
    assert main([*arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_savings_are_the_calculator_s(capsys: pytest.CaptureFixture[str]) -> None:
    found = ask(capsys, "savings", "--link-gbit", "25", "--baseline", "fp32", "--overlap", ".3")
    case = reference(link_gbit=25.0, base_bits=32.0, overlap=0.3)
    expected = calculator.savings(case)
    assert found["case"] == case and found["saving"] == expected["saving"] and found["pays"] == "yes"
    assert main(["savings", "--link-gbit", "25", "--baseline", "fp32", "--overlap", ".3"]) == 0
    assert f"{expected['saving']:.1%}" in capsys.readouterr().out


def test_a_model_brings_its_parameters(capsys: pytest.CaptureFixture[str]) -> None:
    assert ask(capsys, "savings", "--model", "llama2-7b")["case"]["parameters_b"] == pytest.approx(6.738, rel=1e-3)


CHECKPOINT = ["checkpoint", "--parameters-b", "405", "--gpus", "128", "--bytes-per-parameter", "12", "--price", "4.40"]


def test_the_checkpoint_interval_is_the_cost(capsys: pytest.CaptureFixture[str]) -> None:
    """The article's own case: 4,526 GiB at 5 GB/s (its GiB taken for GB), every 30 minutes of the clock."""
    rate = str(405e9 * 12 / 905.2 / 1e9)
    often = ask(capsys, *CHECKPOINT, "--write-gb-s", rate, "--interval-min", str((1800 - 905.2) / 60))
    assert often["stalled"] == pytest.approx(0.503, abs=5e-4)
    assert 0.503 * often["month_usd"] == pytest.approx(203_934, rel=2e-3)  # what the article prints
    best = ask(capsys, *CHECKPOINT, "--write-gb-s", rate)
    assert best["interval_s"] == best["best_interval_s"] == pytest.approx(50_195, rel=1e-3)
    assert best["wasted_usd"] == pytest.approx(14_440, rel=2e-3) and often["waste"] > 0.503
    smaller = ask(capsys, *CHECKPOINT, "--write-gb-s", rate, "--ratio", "1.27")
    assert best["wasted_usd"] - smaller["wasted_usd"] == pytest.approx(1_600, abs=100)
    assert main([*CHECKPOINT, "--write-gb-s", rate]) == 0
    assert "best interval   836" in capsys.readouterr().out


def test_memory_with_and_without_coding(capsys: pytest.CaptureFixture[str]) -> None:
    shape = ["--model", "llama2-70b", "--tp", "8", "--pp", "4", "--dp", "8"]
    found = ask(capsys, "memory", *shape, "--activation-bits", "4")
    plain, coded = found["without_compression"], found["with_compression"]
    parts = ("weights", "gradients", "states", "activations", "working")
    assert plain["total_gib"] == pytest.approx(sum(plain[f"{part}_gib"] for part in parts))
    assert coded["activations_gib"] == pytest.approx(plain["activations_gib"] * 4.25 / 16)
    assert coded["largest_micro_batch"] > plain["largest_micro_batch"] >= 1
    small = ask(capsys, "memory", *shape[:2])
    assert small["without_compression"]["largest_micro_batch"] == 0


def test_memory_is_that_of_the_software(capsys: pytest.CaptureFixture[str]) -> None:
    shape = ["memory", "--model", "llama2-7b", "--zero", "3", "--dp", "8"]
    older, newer, torch = (
        ask(capsys, *shape, "--software", name)["without_compression"]
        for name in ("megatron-2022", "megatron-core", "fsdp")
    )
    assert older["gradients_gib"] == newer["gradients_gib"]
    none = [*shape, "--recompute", "none", "--software"]
    scores = [ask(capsys, *none, name)["without_compression"]["activations_gib"] for name in ("megatron-2022", "fsdp")]
    assert scores[0] > 2 * scores[1]  # a fused attention keeps no scores
    assert torch["working_gib"] - newer["working_gib"] == pytest.approx(10 * 4096 * 32000 / 2**30)
    halves = ask(capsys, *shape, "--software", "deepspeed-zero3-2021")["without_compression"]
    assert halves["gradients_gib"] == pytest.approx(newer["gradients_gib"] / 2)


def test_context_and_experts_are_split(capsys: pytest.CaptureFixture[str]) -> None:
    whole, split = (ask(capsys, "memory", "--model", "llama2-7b", *more) for more in ([], ["--cp", "2"]))
    kept = [found["without_compression"]["activations_gib"] for found in (whole, split)]
    assert kept[1] == pytest.approx(kept[0] / 2)
    moe = ["memory", "--model", "mixtral-8x7b", "--dp", "8", "--zero", "0"]
    whole, split = (ask(capsys, *moe, "--ep", ep)["without_compression"] for ep in ("1", "8"))
    assert split["weights_gib"] < whole["weights_gib"] / 4
    both = ["--cp", "2", "--dp", "8", "--ep", "8", "--tokens", "1e9", "--price", "2", "--samples", "100"]
    assert ask(capsys, "cost", "--model", "mixtral-8x7b", *both)["gpus"] == 16


def test_a_run_that_does_not_fit_is_not_priced_in_silence(capsys: pytest.CaptureFixture[str]) -> None:
    small = ["cost", "--model", "llama2-70b", "--dp", "8", "--tokens", "1e9", "--price", "2", "--samples", "100"]
    found = ask(capsys, *small)["without_compression"]
    assert not found["fits"] and found["memory_gib"] > found["usable_gib"] and found["gpus_needed"] > 8
    assert main(small) == 0
    assert f"DOES NOT FIT: {found['memory_gib']:.1f} GiB are needed" in capsys.readouterr().out
    large = [*small, "--tp", "8", "--pp", "4", "--dp", "2"]
    found = ask(capsys, *large)["without_compression"]
    assert found["fits"] and found["gpus_needed"] is None
    assert main(large) == 0
    assert "DOES NOT FIT" not in capsys.readouterr().out


CLOSED = ["economics prices --max-age-days 9999", "economics --help", "economics breakeven --json", "book claims"]


@pytest.mark.parametrize("asked", CLOSED)
def test_a_closed_pipe_is_no_traceback(asked: str) -> None:
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", *f"tq.{asked}".split()]
    done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, text=True, check=False)
    os.close(write)
    assert done.stderr == "" and done.returncode == 0


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("stream", [Terminal, io.StringIO])
def test_progress_shows_on_a_terminal_only(stream: type[io.StringIO], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", stream())
    assert list(progress([64, 128], "{} GPUs".format)) == [64, 128]
    said = sys.stderr.getvalue()  # type: ignore[attr-defined]
    assert ("1 of 2, now 128 GPUs" in said and said.endswith("\r\x1b[K")) if stream is Terminal else not said


def test_memory_of_a_shape_of_one_s_own(capsys: pytest.CaptureFixture[str]) -> None:
    own = "--layers 24 --hidden 2304 --heads 24 --vocab 51200 --seq 2048".split()
    assert ask(capsys, "memory", *own)["parameters"] == pytest.approx(1.66e9, rel=0.02)
    assert ask(capsys, "memory", *own, "--gated")["parameters"] != pytest.approx(1.66e9, rel=0.02)


def test_cost_with_price_failures_and_compression(capsys: pytest.CaptureFixture[str]) -> None:
    found = ask(capsys, "cost", *RUN, "--gradient-bits", "4", "--checkpoint-gb-s", "5")
    plain = found["without_compression"]
    assert plain["usd"]["low"] < plain["usd"]["mid"] < plain["usd"]["high"]
    assert plain["waste"]["share"] > 0 and plain["tornado_usd"][0]["name"] == "usd_per_gpu_hour"
    assert found["saving"]["low"] <= found["saving"]["mid"] <= found["saving"]["high"]
    exact = ask(capsys, "cost", *RUN, "--price", "2")
    assert exact["usd_per_gpu_hour"] == {"low": 2, "mid": 2, "high": 2}
    aws = ask(capsys, "cost", *RUN, "--provider", "aws")
    assert aws["usd_per_gpu_hour"]["low"] == aws["usd_per_gpu_hour"]["high"] == 6.88
    a100 = ask(capsys, "cost", *RUN, "--gpu", "a100-40gb", "--provider", "aws")  # 400 Gbit/s for the 8 of a node
    assert (aws["network_gbit_per_gpu"], a100["network_gbit_per_gpu"]) == (400, 50)


def test_breakeven_against_both_baselines(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["breakeven", "--share", ".2", "--link", "400", "--overhead", "1", "1.5"]
    bf16, fp32 = ask(capsys, *arguments), ask(capsys, *arguments, "--baseline", "fp32")
    assert (round(bf16["ratio"], 2), round(fp32["ratio"], 2)) == (3.76, 7.53)
    row = bf16["rows"][0]
    assert row["saving"]["1.0"] == pytest.approx(0.2 * (1 - 1 / bf16["ratio"]))
    assert row["saving"]["1.0"] > 0 > row["saving"]["1.5"] and 1 < row["breakeven_overhead"] < 1.5
    assert fp32["rows"][0]["share_there"] > row["share_there"] == pytest.approx(0.2)


def test_pareto_front_has_no_beaten_offer(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["pareto", "--model", "gpt2-1.5b", "--tokens", "1e12", "--gpus", "8", "16", "--batch", "64", *DAY]
    every, best = ask(capsys, *arguments, "--all")["offers"], ask(capsys, *arguments)["offers"]
    assert 0 < len(best) < len(every) and best == [offer for offer in every if offer["on_front"]]
    assert {offer["network_is_stated"] for offer in every} == {True, False}
    stated = ask(capsys, *arguments, "--all", "--stated-network")["offers"]
    assert stated and all(offer["network_is_stated"] for offer in stated) and len(stated) < len(every)
    for a in best:
        assert not any(b["hours"] <= a["hours"] and b["usd"] < a["usd"] for b in every)


def test_prices_listed_checked_and_taken_in(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    rows = ask(capsys, "prices", "--gpu", "h100-80gb", *DAY)["prices"]
    assert [row["usd_per_gpu_hour"] for row in rows] == sorted(row["usd_per_gpu_hour"] for row in rows)
    every = ask(capsys, "prices", *DAY)["prices"]
    assert {row["gpu"] for row in every} > {"h100-80gb"} and [r for r in every if r["gpu"] == "h100-80gb"] == rows
    aws = ask(capsys, "prices", "--provider", "aws", *DAY)["prices"]
    assert aws == [row for row in every if row["provider"] == "aws"]
    few = ask(capsys, "prices", *DAY, "--max-age-days", "60")
    assert 0 < len(few["prices"]) == len(every) - few["stale"] < len(every)
    assert ask(capsys, "prices", "--storage", *DAY)["storage"]
    book, new, bad = (tmp_path / name for name in ("book.csv", "new.csv", "bad.csv"))
    shutil.copy(tables.folder() / "prices.csv", book)
    text = book.read_text(encoding="utf-8")
    header, row = text.splitlines()[0], text.splitlines()[1].split(",")
    new.write_text(f"{header}\nacme,h100-80gb,spot,0.5,2026-12-01,,a list,read in source,\n", encoding="utf-8")
    bad.write_text(text.replace(row[3], "-1", 1), encoding="utf-8")
    assert ask(capsys, "prices", "--check", str(new))["problems"] == []
    assert ask(capsys, "prices", "--import", str(new), "--prices", str(book)) == {"added": 1}
    assert prices.load(book).find("h100-80gb", "spot", "acme", as_of=prices.load(book).newest)
    assert main(["prices", "--check", str(bad)]) == 1
    assert "row 2: usd_per_gpu_hour" in capsys.readouterr().out


NEWEST = prices.load().newest
OLD = "cost --model llama2-7b --dp 8 --tokens 1e9 --samples 100"


@pytest.mark.parametrize("days", [0, 300, 3 * 365])
@pytest.mark.parametrize(
    "line", [OLD, "pareto --model gpt2-124m --tokens 1e9 --gpus 8 --batch 8", "prices", "prices --storage"]
)
def test_whatever_the_clock_says_prices_answer_with_their_days(
    capsys: pytest.CaptureFixture[str], line: str, days: int
) -> None:
    today = NEWEST + datetime.timedelta(days)
    assert main(line.split(), today=today) == 0
    text = capsys.readouterr()
    assert main([*line.split(), "--json"], today=today) == 0
    found, again = json.loads(capsys.readouterr().out), text.err
    oldest, newest = found["price_dates"]["oldest"], found["price_dates"]["newest"]
    assert oldest <= newest <= today.isoformat()
    shown = newest if oldest == newest else f"{oldest} to {newest}"
    assert text.out.splitlines()[0].endswith(f"prices of {shown}")
    if days > prices.MAX_AGE_DAYS:
        assert all("warning: " in row and "stale" in row for row in again.splitlines()) and again.count("\n") >= 1
        assert f"the newest is of {newest}" in again
    else:
        assert again == ""


def test_an_old_day_that_is_asked_for_is_no_other_than_the_clock_s(capsys: pytest.CaptureFixture[str]) -> None:
    later = NEWEST + datetime.timedelta(400)
    assert main(OLD.split(), today=later) == 0
    clock = capsys.readouterr()
    assert main([*OLD.split(), "--as-of", later.isoformat()]) == 0
    assert capsys.readouterr() == clock


def test_a_price_that_is_given_has_no_day(capsys: pytest.CaptureFixture[str]) -> None:
    assert ask(capsys, *OLD.split(), "--price", "2")["price_dates"] is None
    assert main([*OLD.split(), "--price", "2"], today=NEWEST + datetime.timedelta(4000)) == 0
    said = capsys.readouterr()
    assert said.out.splitlines()[0].endswith("at a given price") and said.err == ""


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("savings --overlap 2", "overlap must be a number from 0 to 1, got 2"),
        (
            "memory --model llama2-7b --reserve-gib nan",
            "--reserve-gib: a number from 0 to 1e+06 is accepted, got 'nan'",
        ),
        ("memory --model llama2-7b --global-batch 0", "--global-batch: a whole number from 1"),
        (f"memory --model llama2-7b --ffn {10**400}", "--ffn: a whole number from 1 to 1000000000 is accepted, got"),
        ("memory --model llama2-7b --software nosuch", "--software: invalid choice: 'nosuch'"),
        ("memory --model llama2-7b --ep 2 --dp 2", "ep needs a model with experts, got ep=2"),
        ("memory --model llama2-7b --cp 3 --dp 1", "cp must divide seq=4096, got 3"),
        ("cost --model llama2-7b --tokens 1e9 --price 4 --provider aws", "accepted is one of them, got both"),
        ("cost --model llama2-7b --tokens 1e9 --provider nosuch --max-age-days 9999", "provider='nosuch'"),
        ("cost --model llama2-7b --tokens inf --price 4", "--tokens: a number above 0 to 1e+18 is accepted, got 'inf'"),
        ("cost --model llama2-7b --tokens 1e9 --price 1e308", "--price: a number above 0 to 1e+06"),
        ("cost --model llama2-7b --tokens 1e9 --price 4 --seed -1", "--seed: a whole number from 0"),
        ("cost --model llama2-7b --tokens 1e9 --price 4 --samples 10000000000", "--samples: a whole number from 2"),
        ("cost --model llama2-7b --tokens 1e9 --prices /bin/ls", "/bin/ls is no CSV file in UTF-8"),
        ("breakeven --link inf --json", "--link: a number above 0 to 1e+06 is accepted, got 'inf'"),
        ("breakeven --link 0 --json", "--link: a number above 0"),
        ("breakeven --overhead inf", "--overhead: a number from 1 to 1e+06 is accepted, got 'inf'"),
        ("breakeven --reference nan", "--reference: a number above 0"),
        ("pareto --model gpt2-1.5b --tokens 1e9 --batch 0", "--batch: a whole number from 1"),
        ("pareto --model gpt2-1.5b --tokens 1e9 --provider nosuch", "provider='nosuch'"),
        ("prices --provider nosuch", "provider='nosuch'"),
        ("prices --storage --provider nosuch", "provider='nosuch'"),
        ("prices --as-of 2001-01-01", "on or before 2001-01-01"),
        ("prices --storage --as-of 2001-01-01", "none is dated on or before it"),
        ("prices --max-age-days -1", "--max-age-days: a whole number from 0"),
        ("savings --gpus -1", "gpus must be"),
        ("savings --model gpt-9", "name must be one of"),
        ("savings --link-gbit fast", "invalid float value: 'fast'"),
        ("memory", "a model needs --model NAME"),
        ("memory --model llama2-7b --tp 7", "tp must divide heads=32, got 7"),
        ("memory --model llama2-7b --pp 99", "pp"),
        ("memory --model llama2-7b --gpu h300", "gpu must be one of"),
        ("memory --model llama2-7b --reserve-gib 90", "--reserve-gib must be"),
        ("memory --model llama2-7b --activation-bits 0", "bits must be"),
        ("memory --model llama2-7b --tp 0", "tp must be an int of at least 1, got 0"),
        ("cost --model llama2-7b", "required: --tokens"),
        ("cost --model llama2-7b --tokens -1 --price 4", "--tokens: a number above 0"),
        ("cost --model llama2-7b --tokens 1e9 --price -4", "--price: a number above 0"),
        ("cost --model llama2-7b --tokens 1e9 --price nan", "--price: a number above 0"),
        ("cost --model llama2-7b --tokens 1e9 --as-of 2001-01-01", "on or before 2001-01-01"),
        ("cost --model llama2-7b --tokens 1e9 --as-of today", "a day such as"),
        ("cost --model llama2-7b --tokens 1e9 --price 4 --region atlantis", "region='atlantis'"),
        ("cost --model llama2-7b --tokens 1e9 --price 4 --checkpoint-gb-s 0", "--checkpoint-gb-s: a number above 0"),
        ("breakeven --share 1.2", "--share: a number from 0 to 0.999 is accepted, got '1.2'"),
        ("breakeven --overhead .5", "--overhead: a number from 1"),
        ("pareto --model megatron-1t --tokens 1e9 --gpus 8 --batch 8 --max-age-days 9999", "no offer fits"),
        ("pareto --model gpt2-1.5b --tokens -1 --gpus 8", "--tokens: a number above 0"),
        ("pareto --model gpt2-1.5b --tokens 1e9 --gpus 8 --as-of 2001-01-01", "on or before 2001-01-01"),
        ("prices --gpu h300", "gpu='h300'"),
        ("prices --gpu h100-80gb --as-of 2001-01-01", "on or before 2001-01-01"),
        ("prices --prices nowhere.csv", "No such file"),
        ("prices --import nowhere.csv", "No such file"),
        ("", "required: command"),
        ("sell", "invalid choice: 'sell'"),
    ],
)
def test_errors_are_one_line_and_exit_2(capsys: pytest.CaptureFixture[str], line: str, words: str) -> None:
    try:
        code: object = main(line.split())
    except SystemExit as stop:
        code = stop.code
    shown = capsys.readouterr()
    assert code == 2 and shown.out == ""
    assert words in shown.err and shown.err.count("\n") == 1


def test_help_shows_examples_that_run(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["--help"])
    assert stop.value.code == 0 and "examples:" in capsys.readouterr().out
    commands = [line.split("then:")[0].split()[3:] for line in EXAMPLES.splitlines() if "python -m" in line]
    every = {"savings", "memory", "cost", "checkpoint", "breakeven", "pareto", "prices"}
    assert {command[0] for command in commands} == every
    for command in commands:
        if "--check" not in command:
            dated = DAY if command[0] in ("cost", "pareto", "prices") else []
            assert main([*command, *dated]) == 0
