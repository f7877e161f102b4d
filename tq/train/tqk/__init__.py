"""Checkpoints in lossless code: files that no crash can tear and no damage can pass, read by tensor and by row."""

from tq.train.tqk.background import Background
from tq.train.tqk.disk import SaveFailed
from tq.train.tqk.file import DamagedFile, File, load, save
from tq.train.tqk.folder import Checkpoints

__all__ = ["Background", "Checkpoints", "DamagedFile", "File", "SaveFailed", "load", "save"]
