"""The version of this package, where every module may read it: the root imports modules, and no module the root."""

__version__ = "0.1.0"
