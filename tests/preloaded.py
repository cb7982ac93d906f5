"""Import what commands import, and fill caches that they fill with the same values, before `fork_server` forks.

Nothing here starts a thread or depends on a command's options, so a fork differs from a new process in its speed only.
"""

from contextlib import suppress
from importlib import import_module

MODULES = (
    "tiewise.cli.training",
    "tiewise.training.compare",
    "tiewise.training.kinds.flax",
    "tiewise.lab.runs",
    "tiewise.report.comparison_page",
    "transformers.models.llama.modeling_llama",
    "transformers.models.gpt2.modeling_gpt2",
    "transformers.trainer",
)


def fill_caches():
    """Compress plotly's script, compile the page's template, and list the renamed weights of transformers."""
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping

    from tiewise.report import report_page

    report_page._packed_plotly()
    report_page._template()
    get_checkpoint_conversion_mapping("llama")


for module in MODULES:
    with suppress(ImportError):  # a command without the package refuses it by name
        import_module(module)
fill_caches()
