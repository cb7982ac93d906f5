"""Rules about the shared table and the head of ONNX files: B100 and B101."""

from __future__ import annotations

from tiewise.checkpoint.facts import Facts
from tiewise.checkpoint.rules.onnx_file import OnnxFacts
from tiewise.checkpoint.rules.rule import Observation, Observations, describe, names, rule, tensor_names
from tiewise.checkpoint.stored import Stored
from tiewise.checkpoint.table_scans import compares_random_rows, extent_of_comparison
from tiewise.checkpoint.untrusted import short
from tiewise.core.files import format_bytes

EXPORT = "export it again with one initialiser for both ends (onnxruntime-genai: shared_embeddings=true)"


@rule(
    "B100",
    "warning",
    "an ONNX file stores a shared table once",
    kind="onnx",
    reads="the table, and tensors of its size",
)
def onnx_shared(facts: OnnxFacts) -> Observations:
    """Exporters often write a tied model's table twice, for the lookup and for the head. The second one has the same
    bytes, their transpose, or a quantised copy. With one initialiser for both, Phi-4-mini went from 5.15 to 2.69 GB. An
    exporter with sharing switched on also shares in a model of two tables, and tokens are then looked up in the wrong
    one (onnxruntime-genai#2306). A quantised copy has other bytes: only the source checkpoint (--original) shows
    that the two are one table.
    What to do: export again, with sharing only if the model is tied.
    Sources: onnxruntime-genai#1690; onnxruntime-genai#1885; onnxruntime-genai#2306; Olive#2240; mobius#154
    """
    table, source = facts.table, facts.source
    if table is None:
        return
    is_shared = table in facts.heads
    if source is not None and is_shared:
        yield from _shared_by_mistake(table, source)
    yield from _repeated_table(facts, table)
    if source is not None and not is_shared:
        yield from _other_head(facts, table, source)


def _shared_by_mistake(table: Stored, source: Facts) -> Observations:
    """Report a table that serves both ends if the source has two tables."""
    if source.tables_are_tied is False:
        problem = f"the file has one table for both ends, and its source has two. It is {describe(table)}"
        yield Observation(short(table.name), problem, "export it again without sharing", severity="error")


def _repeated_table(facts: OnnxFacts, table: Stored) -> Observations:
    """Report initialisers that repeat the table."""
    copies = facts.copies
    if copies:
        spare = format_bytes(sum(copy.nbytes for copy in copies))
        problem = f"the file stores its table more than once, which costs {spare}"
        problem += f". {tensor_names(copies)} equals {describe(table)}"
        if compares_random_rows(table):
            problem += f", {extent_of_comparison(table)}"
        yield short(copies[0].name), problem, EXPORT


def _other_head(facts: OnnxFacts, table: Stored, source: Facts) -> Observations:
    """Report a separate head if the source has one table for both ends."""
    if not source.tied:
        return
    for head in facts.heads:
        # a head of the same type and size is a copy, which is reported already, or has other values
        if (head.dtype, head.nbytes) != (table.dtype, table.nbytes):
            problem = f"its source has one table, and the file has {describe(table)} ({format_bytes(table.nbytes)})"
            problem += f" and {describe(head)} ({format_bytes(head.nbytes)})"
            yield short(head.name), problem, EXPORT
            return


@rule("B101", "error", "an exported model has its head", kind="onnx", reads="the graph")
def onnx_head(facts: OnnxFacts) -> Observations:
    """A tied checkpoint stores no lm_head. An exporter that looks for one by name leaves a weight without data, or a
    graph that ends at the hidden states. Such a graph is right for an embedding model only.
    What to do: export again with a version that ties.
    Sources: mobius#295; mobius#671
    """
    export = "export it again with an exporter that ties, or from a source that `tiewise untie` wrote"
    lacking = _without_data(facts)
    for name, operator in lacking.items():
        problem = f"the file has no data for {short(name)}, which {short(operator)} reads"
        yield short(name), problem, export
    if facts.heads or lacking:
        return
    if facts.table is not None:
        yield _no_product(facts, facts.table, export)


def _no_product(facts: OnnxFacts, table: Stored, export: str) -> Observation:
    """Return the finding about a graph without a product for the logits."""
    problem = f"the graph has no output head: it ends at {names(facts.outputs)}"
    problem += f". Its table is {describe(table)}, and no product has {table.rows:,} columns"
    promised = [name for name in facts.outputs if "logits" in name]
    if promised:
        return Observation("graph", problem, export)
    fixes = ("none needed for an embedding model", f"else: {export}")
    return Observation("graph", problem, fixes, severity="info")


def _without_data(facts: OnnxFacts) -> dict[str, str]:
    """Return {name without data: operator that reads it}.

    A head that the caller must provide has no data.
    """
    heads_of_caller = {name for name in facts.inputs if "lm_head" in name}
    with_data = facts.filled.union(facts.makers, [""]) - heads_of_caller  # an empty name is an omitted input
    lacking = dict[str, str]()
    for node in facts.nodes:
        for name in node.inputs:
            if name not in with_data:
                lacking[name] = node.operator
    return lacking
