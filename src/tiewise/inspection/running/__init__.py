"""Forward and backward runs of a checkpoint's model; `loaded` opens it."""
