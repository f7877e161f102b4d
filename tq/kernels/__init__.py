"""Source-tree shim: lets `tq.kernels` find the modules of the sibling folder `kernels/`.

It exists only in a checkout. An installed tq-book has the modules here and not this file, and it never
looks at a top-level `kernels`, which may be somebody else's package.
"""

from pathlib import Path

_ROOT = Path(__file__).resolve().parents[2]
if (_ROOT / "pyproject.toml").is_file() and (_ROOT / "kernels").is_dir():
    __path__.append(str(_ROOT / "kernels"))
