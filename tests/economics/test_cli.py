"""The command line: answers, JSON that agrees with the text, and errors of one line with exit code 2."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tq.economics import calculator, prices
from tq.economics.__main__ import EXAMPLES, main
from tq.systems import tables

DAY = ["--as-of", prices.load().newest.isoformat()]
RUN = ["--model", "llama2-7b", "--tp", "2", "--dp", "8", "--tokens", "1e11", "--samples", "500", *DAY]


def ask(capsys: pytest.CaptureFixture[str], *arguments: str) -> Any:
    assert main([*arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_savings_are_the_calculator_s(capsys: pytest.CaptureFixture[str]) -> None:
    found = ask(capsys, "savings", "--link-gbit", "25", "--baseline", "fp32", "--overhead", "1.2")
    case = calculator.defaults("savings") | {"link_gbit": 25.0, "base_bits": 32.0, "overhead": 1.2}
    expected = calculator.savings(case)
    assert found["case"] == case and found["saving"] == expected["saving"] and found["pays"] == "yes"
    assert main(["savings", "--link-gbit", "25", "--baseline", "fp32", "--overhead", "1.2"]) == 0
    assert f"{expected['saving']:.1%}" in capsys.readouterr().out


def test_a_model_brings_its_parameters(capsys: pytest.CaptureFixture[str]) -> None:
    assert ask(capsys, "savings", "--model", "llama2-7b")["case"]["parameters_b"] == pytest.approx(6.738, rel=1e-3)


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
    assert ask(capsys, "prices", "--storage")["storage"]
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


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("savings --overlap 2", "overlap must be a number from 0 to 1, got 2"),
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
        ("cost --model llama2-7b --tokens -1 --price 4", "tokens must be positive"),
        ("cost --model llama2-7b --tokens 1e9 --price -4", "price must be positive"),
        ("cost --model llama2-7b --tokens 1e9 --price nan", "finite"),
        ("cost --model llama2-7b --tokens 1e9 --as-of 2035-01-01", "stale"),
        ("cost --model llama2-7b --tokens 1e9 --as-of today", "a day such as"),
        ("cost --model llama2-7b --tokens 1e9 --price 4 --region atlantis", "region='atlantis'"),
        ("cost --model llama2-7b --tokens 1e9 --price 4 --checkpoint-gb-s 0", "write_bytes_per_s"),
        ("breakeven --share 1.2", "shares must be between 0 and 1"),
        ("breakeven --overhead .5", "k must be at least 1"),
        ("breakeven --link 0", "link_gbit must be positive"),
        ("pareto --model megatron-1t --tokens 1e9 --gpus 8 --batch 8 --max-age-days 9999", "no offer fits"),
        ("pareto --model gpt2-1.5b --tokens -1 --gpus 8", "tokens must be positive"),
        ("pareto --model gpt2-1.5b --tokens 1e9 --gpus 8 --as-of 2035-01-01", "stale"),
        ("prices --gpu h300", "gpu='h300'"),
        ("prices --gpu h100-80gb --as-of 2035-01-01", "stale"),
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
    assert {command[0] for command in commands} == {"savings", "memory", "cost", "breakeven", "pareto", "prices"}
    for command in commands:
        if "--check" not in command:
            dated = DAY if command[0] in ("cost", "pareto", "prices") else []
            assert main([*command, *dated]) == 0
