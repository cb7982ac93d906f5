"""Rewriting a checkpoint into a new folder: each verb only reads its source, and its result appears whole or not."""

from tiewise.rewrite.dedupe import dedupe as dedupe
from tiewise.rewrite.densify import densify as densify
from tiewise.rewrite.factor import factor as factor
from tiewise.rewrite.receipt import Receipt as Receipt
from tiewise.rewrite.repair import repair as repair
from tiewise.rewrite.resize import resize as resize
from tiewise.rewrite.tie import tie as tie
from tiewise.rewrite.untie import untie as untie
