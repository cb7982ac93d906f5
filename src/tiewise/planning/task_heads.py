"""Heads of classes for other tasks than text: a score for each label, spans, choices.

add_task_head(config, architecture)   the model with its score head, or with the head named as not counted
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from tiewise.planning.architecture import Architecture, Count, linear
from tiewise.planning.config import LANGUAGE_HEADS, Config, saved_class

SCORES = "ForSequenceClassification"
USUAL_LABELS = 2
BARE = "Model"  # ending of classes without a head
PRETRAINING = "ForPreTraining"  # ending of classes whose reader counts all heads
FOR_TASK, DOUBLE = "For", "DoubleHeads"  # in names of classes for a task, and of GPT-2 with a second head


def add_task_head(values: Mapping[str, Any], architecture: Architecture) -> Architecture:
    """Return the counts of a class with its head for another task than text.

    The score head of a decoder is one map of the last hidden state to the labels, without bias. All other heads are
    named as not counted.
    """
    name = saved_class(values)
    if not name or _has_no_further_head(name):
        return architecture
    if name.endswith(SCORES) and architecture.kind == "decoder":
        config = Config(values, architecture.family)
        score = linear(architecture.ends.width, _count_labels(config))
        around = {**architecture.around, "other": score + architecture.around.get("other", Count())}
        return replace(architecture, around=around)
    return replace(
        architecture, not_counted=(*architecture.not_counted, f"parts of {name} next to its body (architectures)")
    )


def _has_no_further_head(name: str) -> bool:
    """Return whether a class has only token heads, or heads that its reader counts."""
    if name.endswith((*LANGUAGE_HEADS, PRETRAINING)):
        return True
    return name.endswith(BARE) and FOR_TASK not in name and DOUBLE not in name


def _count_labels(config: Config) -> int:
    """Return the number of labels: `num_labels`, else entries of `id2label`, else two."""
    labels = config.get("id2label")
    if isinstance(labels, Mapping) and config.get("num_labels") is None:
        return len(labels)
    return config.size("num_labels", USUAL_LABELS)
