"""Rewriting a checkpoint into a new folder: each verb only reads its source, and its result appears whole or not."""

from tiewise.checkpoint.rewrite.dedupe import dedupe as dedupe
from tiewise.checkpoint.rewrite.densify import densify as densify
from tiewise.checkpoint.rewrite.factor import factor as factor
from tiewise.checkpoint.rewrite.receipt import Receipt as Receipt
from tiewise.checkpoint.rewrite.repair import repair as repair
from tiewise.checkpoint.rewrite.resize import resize as resize
from tiewise.checkpoint.rewrite.tie import tie as tie
from tiewise.checkpoint.rewrite.untie import untie as untie
