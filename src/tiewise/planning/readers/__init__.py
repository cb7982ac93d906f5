"""Exact readers of decoders whose layers differ, and of models with towers.

Each file has a group of families. `parts` has the sublayers and `mixed_decoder`, which joins them. Importing this
package registers every reader.
"""

from __future__ import annotations

from tiewise.planning.readers import deepseek, encoders, gemma, glm, hybrids, mimo, qwen, towers

MODULES = (deepseek, encoders, gemma, glm, hybrids, mimo, qwen, towers)
