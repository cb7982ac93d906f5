"""Checkpoints with a boundary for transformers' auto classes (`tiewise.boundary.hf`)."""

from tiewise.boundary.hf import load as load
from tiewise.boundary.hf import plain_copy as plain_copy
