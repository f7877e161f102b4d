"""A cleaned notebook says what the chapter says, and nothing of the machine that ran it."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import nbformat
import pytest

from tests.book import helpers as h
from tq.book.run.clean import clean, clean_file, dumps, with_outputs

BASE64 = "/".join(("aGk", "tmp", "x"))  # looks like a path and is none


def executed(root: Path) -> dict[str, Any]:
    """What papermill leaves, with everything that must not be committed."""
    nb = h.notebook("print(1)  \n", "", "show()", name="a")
    injected = {"id": "inj", "metadata": {"tags": ["injected-parameters"]}, "source": "device='cuda'"}
    nb["cells"].insert(2, copy.deepcopy(nb["cells"][1]) | injected)
    for number, cell in enumerate(nb["cells"]):
        cell["metadata"] |= {"papermill": {"duration": 1.0}, "execution": {"iopub.status.busy": "2026-01-01"}}
        cell["metadata"].setdefault("tags", [])
        if cell["cell_type"] == "code":
            cell["execution_count"] = 10 + number
    stream = {"output_type": "stream", "name": "stdout"}
    widget = {"application/vnd.jupyter.widget-view+json": {"model_id": "1"}, "text/plain": "HBox()"}
    picture = {"image/png": BASE64, "text/plain": "[figure]"}
    nb["cells"][4]["outputs"] = [
        {**stream, "text": ["1 "]},
        {**stream, "text": f"\n{root}/data/x.csv in {root}\n"},
        {"output_type": "stream", "name": "stderr", "text": "\r 10%|#  | 1/10"},
        {"output_type": "display_data", "data": widget, "metadata": {}},
        {"output_type": "execute_result", "data": picture, "metadata": {}, "execution_count": 14},
    ]
    nb["metadata"] |= {"papermill": {"x": 1}, "widgets": {"state": {}}}
    nb["metadata"]["language_info"] = {"name": "python", "version": "3.9"}
    nb["metadata"]["kernelspec"] = {"name": "my-env", "display_name": "Mine", "language": "python"}
    return nb


def test_nothing_of_the_run_stays(tmp_path: Path) -> None:
    nb = clean(executed(tmp_path), tmp_path)
    nbformat.validate(nbformat.from_dict(nb))
    assert [cell["id"] for cell in nb["cells"]] == ["title", "c0", "c1", "c2", "c3", "c4"]
    assert [cell.get("execution_count") for cell in nb["cells"]] == [None, 1, 2, 3, None, 4]
    printed, result = nb["cells"][3]["outputs"]
    assert printed["text"] == "1 \ndata/x.csv in .\n" and nb["cells"][3]["source"] == "print(1)"
    assert result["execution_count"] == 3 and result["data"]["image/png"] == BASE64
    assert nb["cells"][1]["metadata"] == {"tags": ["parameters"]} and nb["cells"][3]["metadata"] == {}
    assert nb["metadata"]["kernelspec"]["name"] == "python3" and "version" not in nb["metadata"]["language_info"]
    text = dumps(nb)
    for trace in ("papermill", "injected", "cuda", "widget", str(tmp_path), "2026", "10%"):
        assert trace not in text


def test_outputs_of_a_run_join_prose_that_was_edited_since(tmp_path: Path) -> None:
    today = h.notebook("print(1)", "", "show()", name="a")
    today["cells"][0]["source"] = "# another title"
    merged = with_outputs(today, executed(tmp_path))
    assert merged["cells"][0]["source"] == "# another title" and len(merged["cells"]) == len(today["cells"])
    assert merged["cells"][3]["outputs"] == executed(tmp_path)["cells"][4]["outputs"] != []
    assert today["cells"][3]["outputs"] == []
    today["cells"][3]["source"] = "print(2)"
    with pytest.raises(ValueError, match="other code cells"):
        with_outputs(today, executed(tmp_path))


def test_cleaning_twice_changes_nothing(tmp_path: Path) -> None:
    given = executed(tmp_path)
    before = copy.deepcopy(given)
    once = clean(given, tmp_path)
    assert given == before
    assert dumps(clean(once, tmp_path)) == dumps(once)
    assert dumps(clean(json.loads(dumps(once)), tmp_path)) == dumps(once)
    assert dumps(once).endswith("}\n")


# Put together, because no file of this repository may hold such a path itself.
PLACES = ["/".join(("", *parts)) for parts in (("tmp", "ipykernel_1", "2.py"), ("home", "me", "a"), ("Users", "me"))]


@pytest.mark.parametrize("path", [str(Path.home() / "x"), *PLACES])
@pytest.mark.parametrize("kind", ["stream", "display_data", "error"])
def test_a_path_of_this_machine_is_refused_with_the_cell(tmp_path: Path, path: str, kind: str) -> None:
    outputs = {
        "stream": {"output_type": "stream", "name": "stderr", "text": f"{path}:3: UserWarning"},
        "display_data": {"output_type": "display_data", "metadata": {}, "data": {"text/html": f"<a href='{path}'>"}},
        "error": {"output_type": "error", "ename": "E", "evalue": "", "traceback": [f'File "{path}"']},
    }
    nb = h.notebook("x = 1", "warn()")
    nb["cells"][1]["outputs"] = [outputs[kind]]
    with pytest.raises(ValueError, match=r"code cell 2 \(warn\(\)\).*" + path):
        clean(nb, tmp_path)


def test_urls_and_pictures_are_no_paths(tmp_path: Path) -> None:
    nb = h.notebook("x")
    text = f'<img src="data:image/png;base64,{BASE64}"> https://example.org/home/page ratio 1{PLACES[0]}'
    nb["cells"][0]["outputs"] = [{"output_type": "display_data", "metadata": {}, "data": {"text/html": text}}]
    assert clean(nb, tmp_path)["cells"][0]["outputs"][0]["data"]["text/html"] == text


def test_what_matplotlib_returns_is_dropped(tmp_path: Path) -> None:
    nb = h.notebook("ax.legend()", name="a")
    texts = ["<matplotlib.legend.Legend at 0x7f47851c04d0>", "Text(0.5, 0, 'x')", "[<matplotlib.lines.Line2D>]", "2"]
    nb["cells"][-1]["outputs"] = [
        {"output_type": "execute_result", "data": {"text/plain": text}, "metadata": {}, "execution_count": 3}
        for text in texts
    ]
    (left,) = clean(nb, tmp_path)["cells"][-1]["outputs"]
    assert left["data"] == {"text/plain": "2"}


def test_ids_are_made_once_and_never_twice(tmp_path: Path) -> None:
    nb = h.notebook("a", "b")
    for cell in nb["cells"]:
        del cell["id"]
    assert clean(nb, tmp_path) == clean(nb, tmp_path)
    nb = h.notebook("a", "b")
    nb["cells"][1]["id"] = nb["cells"][0]["id"]
    with pytest.raises(ValueError, match="'c0'"):
        clean(nb, tmp_path)


def test_a_file_is_cleaned_in_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TQ_BOOK_ROOT", str(h.book(tmp_path, {"a": executed(tmp_path)})))
    path = tmp_path / "notebooks" / "a.ipynb"
    assert clean_file(path) is True
    assert clean_file(path) is False
