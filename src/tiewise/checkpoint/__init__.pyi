"""Names of `tiewise.checkpoint` by module: type checkers and `core/lazy_names.py` read them here."""

from tiewise.checkpoint.adapter_settings import lora_config as lora_config
from tiewise.checkpoint.audit import Audit as Audit
from tiewise.checkpoint.audit import check as check
from tiewise.checkpoint.rewrite import factor as factor
from tiewise.checkpoint.rewrite import merge as merge
from tiewise.checkpoint.rewrite import repair as repair
from tiewise.checkpoint.rewrite import resize as resize
from tiewise.checkpoint.rewrite import slim as slim
from tiewise.checkpoint.rewrite import tie as tie
from tiewise.checkpoint.rewrite import transplant as transplant
from tiewise.checkpoint.rewrite import trim as trim
from tiewise.checkpoint.rewrite import untie as untie
from tiewise.checkpoint.rewrite.engine import Receipt as Receipt
from tiewise.core.errors import CheckpointError as CheckpointError
