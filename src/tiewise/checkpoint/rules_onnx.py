"""What an ONNX file keeps of the two ends: B100 and B101."""

from __future__ import annotations

from tiewise.checkpoint.onnx_file import PRODUCTS, OnnxFacts
from tiewise.checkpoint.rule import Said, Told, describe, names, rule
from tiewise.checkpoint.untrusted import short
from tiewise.core.files import size

EXPORT = "export it again with one initialiser for both ends (onnxruntime-genai: shared_embeddings=true)"


@rule("B100", "warning", "an ONNX file stores a shared table once", kind="onnx")
def onnx_shared(facts: OnnxFacts) -> Told:
    """Exporters write a tied model's table for the lookup and once more for the head: the same bytes, their transpose,
    or a quantised copy beside the full one. With one initialiser for both, Phi-4-mini went from 5.15 to 2.69 GB. The
    other way round, an exporter that is told to share does so for a model of two tables too, and every token is looked
    up in the head (onnxruntime-genai#2306). Tables are compared byte by byte, transposed ones too; a quantised copy is
    told by the source alone (--beside), whose config says whether the two are one.
    What to do: export again, sharing where the model is tied and only there.
    Sources: onnxruntime-genai#1690; onnxruntime-genai#1885; onnxruntime-genai#2306; Olive#2240; mobius#154;
    optimum#2241
    """
    table, heads, source = facts.table, facts.heads, facts.source
    if table is None:
        return
    if table in heads and source is not None and source.truth is False:
        what = f"{describe(table)} serves both ends, and its source has two tables"
        yield Said(short(table.name), what, "export it again without sharing", severity="error")
    if facts.copies:
        spare = size(sum(one.nbytes for one in facts.copies))
        what = f"{names([one.name for one in facts.copies])} repeats {describe(table)}: {spare} stored more than once"
        yield short(facts.copies[0].name), what, EXPORT
    others = [one for one in heads if one is not table and (one.dtype, one.nbytes) != (table.dtype, table.nbytes)]
    if others and table not in heads and source is not None and source.tied:
        what = f"its source has one table, and the file has {describe(table)} ({size(table.nbytes)}) and"
        yield short(others[0].name), f"{what} {describe(others[0])} ({size(others[0].nbytes)})", EXPORT


@rule("B101", "error", "an exported model has its head", kind="onnx")
def onnx_head(facts: OnnxFacts) -> Told:
    """A tied checkpoint stores no lm_head, and an exporter that looks for one by name leaves an initialiser without
    data, a name that nothing makes, or a graph that ends at the hidden states. The first two do not load, or run on
    whatever memory holds; the last is right for an embedding model alone.
    What to do: export again with a version that ties.
    Sources: mobius#295; mobius#671
    """
    fix = "export it again, from a checkpoint that stores its head (tiewise untie) where the exporter ties none"
    for name in facts.unfilled:
        yield short(name), f"{short(name)} is declared with a shape, and has no data", fix
    for node in facts.nodes:
        for name in node.inputs:
            if name and name not in facts.known and name not in facts.makers:
                yield (
                    short(name),
                    f"{short(node.operator)} takes {short(name)}, which nothing makes and no file holds",
                    fix,
                )
    weights = {name for node in facts.nodes if node.operator in PRODUCTS for name in node.inputs[1:2]}
    for name in facts.inputs:
        if name in weights and name.endswith(("weight", "kernel")):
            yield short(name), f"{short(name)} is asked of whoever runs the model: the export left it out", fix
    if facts.table is not None and not facts.heads and not facts.unfilled:
        what = f"{describe(facts.table)} is looked up in, and no product has {facts.table.rows:,} columns"
        what += f": it ends at {names(facts.outputs)}"
        promised = any("logits" in name for name in facts.outputs)
        yield Said("graph", what, f"{fix}; none for an embedding model", severity="error" if promised else "warning")
