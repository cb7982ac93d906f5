"""How many tokens of logits the fused loss holds at a time; read by the loss itself and by whoever plans its memory."""

from __future__ import annotations

# Elements of a chunk of logits. On two CPU cores 512 rows of 50,304 were within 3 % of the bare products; much smaller
# chunks starve the matrix product, larger ones only cost memory. A GPU wants thousands of rows.
CHUNK_ELEMENTS = {"cpu": 26_000_000, "cuda": 268_000_000}
MINIMUM_ROWS = 256


def chunk_rows(n: int, v: int, device: str, asked: int | None = None) -> int:
    """Rows of a chunk for `n` tokens over `v` words on a device type; `asked` overrides."""
    if asked is not None:
        return asked
    most = max(MINIMUM_ROWS, CHUNK_ELEMENTS.get(device, CHUNK_ELEMENTS["cuda"]) // v)
    pieces = max(1, -(-n // most))
    return max(1, -(-n // pieces))  # even pieces: a short last chunk would waste the buffer
