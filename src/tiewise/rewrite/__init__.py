"""Rewriting a checkpoint into a new folder: each verb only reads its source, and its result appears whole or not.

@verb
def untie(facts, *, force) -> Change: ...         what a verb is: from what a checkpoint holds to what shall change
untie(source, to, dry_run=True) -> Receipt        what its user calls: the engine carries the change out
"""

from tiewise.rewrite.adapter_verbs import merge as merge
from tiewise.rewrite.adapter_verbs import slim as slim
from tiewise.rewrite.engine import Receipt as Receipt
from tiewise.rewrite.engine import rewrite as rewrite
from tiewise.rewrite.engine import verb as verb
from tiewise.rewrite.factor import densify as densify
from tiewise.rewrite.factor import factor as factor
from tiewise.rewrite.resize import resize as resize
from tiewise.rewrite.ties import dedupe as dedupe
from tiewise.rewrite.ties import repair as repair
from tiewise.rewrite.ties import tie as tie
from tiewise.rewrite.ties import untie as untie
from tiewise.rewrite.transplant import transplant as transplant
from tiewise.rewrite.trim import trim as trim
