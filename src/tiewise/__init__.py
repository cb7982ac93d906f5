"""tiewise: the two places where a language model touches its vocabulary."""

__version__ = "0.1.0"
