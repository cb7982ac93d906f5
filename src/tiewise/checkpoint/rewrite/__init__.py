"""Rewriting a checkpoint into a new folder: each verb only reads its source, and its result appears whole or not.

@verb
def untie(facts, *, force) -> Change: ...         what a verb is: from what a checkpoint holds to what shall change
untie(source, to, dry_run=True) -> Receipt        what its user calls: the engine carries the change out
"""

from tiewise.checkpoint.rewrite.adapter_verbs import merge as merge
from tiewise.checkpoint.rewrite.adapter_verbs import slim as slim
from tiewise.checkpoint.rewrite.engine import Receipt as Receipt
from tiewise.checkpoint.rewrite.engine import rewrite as rewrite
from tiewise.checkpoint.rewrite.engine import verb as verb
from tiewise.checkpoint.rewrite.factor import densify as densify
from tiewise.checkpoint.rewrite.factor import factor as factor
from tiewise.checkpoint.rewrite.resize import resize as resize
from tiewise.checkpoint.rewrite.ties import dedupe as dedupe
from tiewise.checkpoint.rewrite.ties import repair as repair
from tiewise.checkpoint.rewrite.ties import tie as tie
from tiewise.checkpoint.rewrite.ties import untie as untie
from tiewise.checkpoint.rewrite.transplant import transplant as transplant
from tiewise.checkpoint.rewrite.trim import trim as trim
