"""Laws of the corpora: stable content, disjoint splits, exact round trips, batches that depend on nothing else."""

from __future__ import annotations

import hashlib
import io
import math
import zipfile
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tq.train.model import corpus as corpora
from tq.train.model import text_sources
from tq.train.model.corpus import Corpus, bits_per_byte, load, text_file

CAP = 400_000


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a test reached for the network")

    monkeypatch.setattr(text_sources.urllib.request, "urlopen", refuse)


@pytest.fixture(scope="module")
def plain() -> Corpus:
    return load(max_bytes=CAP)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def bpe(folder: Path) -> Corpus:
    return load(tokenizer="bpe", vocab=512, max_bytes=CAP, cache=folder)


def test_stdlib_is_the_same_at_every_load(plain: Corpus):
    again = load(max_bytes=CAP)
    assert again.sha256 == plain.sha256
    assert torch.equal(again.train, plain.train) and torch.equal(again.valid, plain.valid)
    raw = bytes(plain.train.tolist()) + bytes(plain.valid.tolist())
    assert plain.sha256 == hashlib.sha256(raw).hexdigest()
    assert plain.train_bytes + plain.valid_bytes == len(raw) <= CAP
    assert plain.vocab == 256 and plain.train.dtype == torch.uint8


def test_stdlib_splits_share_no_file():
    train, valid = text_sources.stdlib(None)
    assert not set(train) & set(valid)
    assert len(set(train)) == len(train)  # no content twice
    share = sum(map(len, valid)) / sum(map(len, train + valid))
    assert 0.03 < share < 0.08
    assert sum(map(len, train)) > 3e6
    assert not [p for p in text_sources.stdlib_files() if {"test", "site-packages", "idlelib"} & set(p.parts[-3:])]


def test_a_capped_stdlib_is_a_prefix_of_the_whole():
    for whole, part in zip(text_sources.stdlib(None), text_sources.stdlib(CAP), strict=True):
        assert whole[: len(part)] == part


def test_batches_are_windows_of_the_split(plain: Corpus):
    text = bytes(plain.valid.tolist())
    ids, targets = plain.batch(3, 5, 40, seed=1, split="valid")
    assert ids.shape == targets.shape == (5, 40) and ids.dtype == targets.dtype == torch.int64
    for row_ids, row_targets in zip(ids.tolist(), targets.tolist(), strict=True):
        assert row_ids[1:] == row_targets[:-1]
        assert bytes([row_ids[0], *row_targets]) in text


def test_batches_depend_on_seed_step_and_split_only(plain: Corpus):
    state = torch.get_rng_state()
    wanted = {step: plain.batch(step, 4, 32, seed=7)[0] for step in range(6)}
    assert torch.equal(state, torch.get_rng_state())
    torch.manual_seed(99)
    for step in (5, 0, 3, 3, 1):
        assert torch.equal(plain.batch(step, 4, 32, seed=7)[0], wanted[step])
    assert torch.equal(plain.batch(2, 9, 32, seed=7)[0][:4], wanted[2])  # a row does not depend on the others
    distinct = [*wanted.values(), plain.batch(0, 4, 32, seed=8)[0]]
    assert len({tuple(x.flatten().tolist()) for x in distinct}) == 7


def test_batches_reach_every_place_equally():
    size = 16
    line = torch.arange(size + 1, dtype=torch.uint8)
    corpus = Corpus("line", "bytes", 256, line, line, "", size + 1, size + 1)
    starts = corpus.batch(0, 8000, 1, seed=0)[0].flatten()
    counts = torch.bincount(starts, minlength=size).double()
    expected = 8000 / size
    chi2 = ((counts - expected) ** 2 / expected).sum().item()
    assert len(counts) == size and chi2 < 37.7  # 15 degrees of freedom, p = .001; the seed is fixed
    assert corpus.batch(0, 50, size, seed=0)[1][:, -1].eq(size).all()  # the one window that fits


def test_bad_batches_are_refused(plain: Corpus):
    with pytest.raises(ValueError, match="train, valid, got 'test'"):
        plain.batch(0, 1, 8, 0, split="test")
    with pytest.raises(ValueError, match="seq=999999999 needs more than"):
        plain.batch(0, 1, 999_999_999, 0)
    with pytest.raises(ValueError, match="positive, got batch=0"):
        plain.batch(0, 0, 8, 0)


@given(st.text(max_size=300))
@settings(max_examples=300, deadline=None)
def test_every_text_comes_back(plain: Corpus, bpe: Corpus, text: str):
    for corpus in (plain, bpe):
        ids = corpus.encode(text)
        assert ids.dtype == corpus.train.dtype
        assert corpus.decode(ids) == text


def test_bpe_splits_decode_to_the_raw_text(plain: Corpus, bpe: Corpus):
    for split in corpora.SPLITS:
        assert bpe.decode(bpe.split(split)) == plain.decode(plain.split(split))
    assert bpe.sha256 == plain.sha256
    assert bpe.vocab == 512 and bpe.train.dtype == torch.uint16 and int(bpe.train.to(torch.int64).max()) < 512
    assert bpe.bytes_per_token == plain.valid_bytes / len(bpe.valid) > 1.5
    ids, targets = bpe.batch(0, 3, 16, seed=0)
    assert bpe.decode(torch.cat((ids[0], targets[0, -1:]))) in plain.decode(plain.train)


def test_bpe_is_deterministic_and_learns_from_the_training_split_only(bpe: Corpus, folder: Path, tmp_path: Path):
    files = sorted(path.name for path in folder.iterdir())
    again = load(tokenizer="bpe", vocab=512, max_bytes=CAP, cache=tmp_path)  # trained anew
    assert again.bpe.to_str() == bpe.bpe.to_str() and torch.equal(again.train, bpe.train)
    cached = load(tokenizer="bpe", vocab=512, max_bytes=CAP, cache=folder)
    assert cached.bpe.to_str() == bpe.bpe.to_str() and torch.equal(cached.valid, bpe.valid)
    assert sorted(path.name for path in folder.iterdir()) == files and len(files) == 2
    train, valid = text_sources.stdlib(CAP)
    other, _ = corpora._bpe(train, [b"qqzqqz qqzqqz\n" * 999], 512, "another hash", tmp_path)
    assert other.to_str() == bpe.bpe.to_str()


def test_a_damaged_cache_is_named(tmp_path: Path):
    (tmp_path / "a.txt").write_text("one two three\n" * 50)
    text_file(tmp_path / "a.txt", tokenizer="bpe", vocab=260, cache=tmp_path / "cache")
    for path in (tmp_path / "cache").iterdir():
        path.write_bytes(path.read_bytes()[:20])
    with pytest.raises(ValueError, match="damaged tokenizer cache: delete"):
        text_file(tmp_path / "a.txt", tokenizer="bpe", vocab=260, cache=tmp_path / "cache")


def test_bits_per_byte_compares_tokenizers(plain: Corpus, bpe: Corpus):
    assert bits_per_byte(math.log(256), plain) == pytest.approx(8)
    # The same total in nats, spread over fewer tokens, is the same number of bits a byte.
    total = 1234.5
    a, b = (bits_per_byte(total / len(c.train), c, "train") for c in (plain, bpe))
    assert a == pytest.approx(b) == pytest.approx(total / math.log(2) / plain.train_bytes)


def test_text_file_holds_out_its_end(tmp_path: Path):
    path = tmp_path / "text.txt"
    content = "".join(f"line {i} ü\n" for i in range(100)).encode()
    path.write_bytes(content)
    corpus = text_file(path, held_out=0.2, sha256=hashlib.sha256(content).hexdigest())
    raw = bytes(corpus.train.tolist()), bytes(corpus.valid.tolist())
    assert raw[0] + raw[1] == content and raw[0].endswith(b"\n")
    assert corpus.valid_bytes / len(content) == pytest.approx(0.2, abs=0.02)
    assert corpus.sha256 == hashlib.sha256(content).hexdigest() and corpus.name == "text.txt"
    with pytest.raises(ValueError, match="expected 00"):
        text_file(path, sha256="00")
    path.write_bytes(b"\xff\xfe no text\n" * 9)
    with pytest.raises(ValueError, match="utf-8"):
        text_file(path)


def test_pinned_files_are_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(FileNotFoundError, match="download=True"):
        load("tiny-shakespeare", cache=tmp_path)
    fake = tmp_path / "input.txt"
    fake.write_bytes(b"First Citizen:\n" * 100)
    with pytest.raises(ValueError, match=r"not the pinned file: 1500 bytes.*expected 1115394 bytes"):
        load("tiny-shakespeare", path=fake)

    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for split in ("train", "valid", "test"):
            archive.writestr(f"wikitext-2-raw/wiki.{split}.raw", f" = {split} = \n" * 200)
    content = buffer.getvalue()
    pin = text_sources.Download("https://example.org/wikitext-2-raw-v1.zip", len(content), text_sources.hashlib.sha256(content).hexdigest())  # fmt: skip  # noqa: E501
    monkeypatch.setitem(text_sources.DOWNLOADS, "wikitext-2", pin)
    monkeypatch.setattr(text_sources.urllib.request, "urlopen", lambda url, timeout: io.BytesIO(content))
    corpus = load("wikitext-2", download=True, cache=tmp_path, max_bytes=100)
    assert corpus.decode(corpus.train) == " = train = \n" * 8 and corpus.decode(corpus.valid) == " = valid = \n" * 200
    monkeypatch.setattr(text_sources.urllib.request, "urlopen", None)
    assert load("wikitext-2", cache=tmp_path).valid_bytes == 200 * 12  # from the cache


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"name": "enwik8"}, "stdlib, tiny-shakespeare, wikitext-2"),
        ({"tokenizer": "words"}, "'bytes' or 'bpe', got 'words'"),
        ({"tokenizer": "bpe", "vocab": 255}, "between 256 and 65536, got 255"),
        ({"max_bytes": 0}, "max_bytes must be positive"),
        ({"max_bytes": 10}, "leaves an empty split"),
        ({"path": "x"}, "path belongs to a pinned file"),
    ],
)
def test_bad_arguments_are_refused(arguments: dict, message: str):
    with pytest.raises(ValueError, match=message):
        load(**arguments)


def test_missing_tokenizers_names_the_extra(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setitem(__import__("sys").modules, "tokenizers", None)
    with pytest.raises(ImportError, match=r"tq-book\[lab\]"):
        load(tokenizer="bpe", max_bytes=CAP, cache=tmp_path)


def test_the_environment_moves_the_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("TQ_CACHE", str(tmp_path / "here"))
    assert text_sources.cache_dir() == tmp_path / "here"
    monkeypatch.delenv("TQ_CACHE")
    assert text_sources.cache_dir() == Path.home() / ".cache" / "tq-book"
