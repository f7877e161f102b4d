"""Functions that no source hash covers because they write a state and read it back: it comes back bit for bit."""

from __future__ import annotations

import ast
import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.book import helpers as h
from tq.book.record import dependencies
from tq.book.record.code_text import running
from tq.book.record.kept_states import STAND_INS, counted, replaced
from tq.train.model import GPT, GPTConfig, TrainConfig, Trainer, loop
from tq.train.model.corpus import load
from tq.train.optim import TurboQuantAdamW

LOOP = "tq/train/model/loop.py"
OPTIMIZERS = {
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=1e-2, momentum=0.9),
    "coded": lambda parameters: TurboQuantAdamW(parameters, lr=1e-3, state=(4, 8)),
    "log": lambda parameters: TurboQuantAdamW(parameters, lr=1e-3, state=(8, 8)),
    "exact": lambda parameters: TurboQuantAdamW(parameters, lr=1e-3, state=None),
}


def earlier(name: str) -> Any:
    """What stands in for a method of the trainer, as a function."""
    source = "from __future__ import annotations\nclass Trainer:\n" + STAND_INS[LOOP][name]
    found: dict[str, Any] = {}
    exec(compile(source, name, "exec", dont_inherit=True), vars(loop), found)
    return getattr(found["Trainer"], name.removeprefix("Trainer."))


def trainer(made: str, dtype: torch.dtype | None = None) -> Trainer:
    torch.manual_seed(0)
    model = GPT(GPTConfig(layers=1, hidden=32, heads=2, vocab=256, seq=32), seed=0)
    config = TrainConfig(steps=6, batch=2, seed=0, autocast=dtype)
    return Trainer(model, load(max_bytes=200_000), config, optimizer=OPTIMIZERS[made])


def same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor):
        bits = (torch.equal(x.contiguous().flatten().view(torch.uint8), y.contiguous().flatten().view(torch.uint8))
                for x, y in [(a, b)])  # fmt: skip
        return a.dtype == b.dtype and a.shape == b.shape and all(bits)
    if isinstance(a, dict):
        return isinstance(b, dict) and [*a] == [*b] and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and (a == b or a != a and b != b)


@pytest.mark.parametrize("made", OPTIMIZERS)
@pytest.mark.parametrize("dtype", [None, torch.float16])
def test_states_come_back_as_they_did_and_runs_go_on_as_if_never_stopped(
    made: str, dtype: torch.dtype | None, tmp_path: Path
) -> None:
    run = trainer(made, dtype)
    run.train(3, progress=False)
    kept = copy.deepcopy(run.state_dict())
    run.save(tmp_path / "now")
    earlier("Trainer.save")(run, tmp_path / "then")
    run.train(progress=False)
    ways = {
        "now": Trainer.load, "then": Trainer.load,  # files of before are still read
        "then, as then": earlier("Trainer.load"),
    }  # fmt: skip
    for way, read in ways.items():
        other = trainer(made, dtype)
        read(other, tmp_path / way.split(",")[0])
        assert same(dict(other.state_dict()), dict(kept)), way
        other.train(progress=False)
        assert other.losses == run.losses and same(dict(other.state_dict()), dict(run.state_dict())), way


def test_the_hash_does_not_see_them_and_sees_all_else(tmp_path: Path) -> None:
    source = (h.ROOT / LOOP).read_text()
    path = tmp_path / LOOP
    path.parent.mkdir(parents=True)

    def digest(text: str) -> bytes:
        path.write_text(text)
        return running(counted(path))

    whole = digest(source)
    assert digest(source.replace("tqk.save(path, self.state_dict())", "pass")) == whole
    assert digest(source.replace("self.load_state_dict(state)\n\n    def _run", "pass\n\n    def _run")) == whole
    others = ("self.scaler.step(self.optimizer)", "EVALUATION_SEED = 0", "FORMAT = 2", "digest_size=32")
    for text in others:
        assert text in source and digest(source.replace(text, f"{text} + 0", 1)) != whole, text
    assert digest(source.replace("def save(", "def saved(")) != whole  # gone: nothing stands in for it


def test_imports_of_what_is_left_out_do_not_count() -> None:
    files = dependencies.module_sources("tq.train.model.loop")
    assert LOOP in files and not any("tqk" in name for name in files)


def test_what_stands_in_is_short_and_replaces_what_is_there() -> None:
    named = {name for functions in STAND_INS.values() for name in functions}
    assert named == {"Trainer.save", "Trainer.load", "__main__"}
    for file, functions in STAND_INS.items():
        source = (h.ROOT / file).read_text()
        changed = replaced(source, functions)
        assert all(text in changed and (not text or text not in source) for text in functions.values())
        assert changed != source and replaced(changed, functions) == changed


def test_of_a_command_line_nothing_is_left_out_but_what_no_import_runs() -> None:
    file = "tq/train/checkpoint.py"
    source = (h.ROOT / file).read_text()
    module, rest = ast.parse(source).body, ast.parse(replaced(source, STAND_INS[file])).body
    assert [ast.dump(node) for node in rest] == [ast.dump(node) for node in module[:-1]]
    assert ast.unparse(module[-1]).startswith("if __name__ == '__main__':")
    assert not any("tqk" in name for name in dependencies.module_sources("tq.train.checkpoint"))
    guard = "if __name__ == '__main__':\n    print(1)\nelse:\n    x = 1\n"
    assert replaced(guard, {"__main__": ""}) == guard  # the other branch runs on an import


def test_decorators_and_functions_of_a_module_are_replaced_whole() -> None:
    source = "@a\n@b(\n  1)\ndef f(x):\n    return x\n\nclass C:\n    @p\n    def f(self): return 1\n    y = 2\n"
    assert replaced(source, {"f": "def f(): ...\n"}).startswith("def f(): ...\n\nclass C:\n    @p\n")
    assert replaced(source, {"C.f": "    z = 1\n"}).endswith("class C:\n    z = 1\n    y = 2\n")
    assert replaced(source, {"g": "def g(): ...\n"}) == source
