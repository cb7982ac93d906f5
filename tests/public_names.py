"""Public names of tiewise, at the top level and in its namespaces."""

from importlib import import_module

NAMESPACES = ("tiewise", "tiewise.checkpoint", "tiewise.boundary", "tiewise.lab")


def homes():
    """Return the namespace of every public name; the top level if it has the name."""
    found = {}
    for namespace in NAMESPACES:
        for name in dir(import_module(namespace)):
            found.setdefault(name, namespace)
    return found


def public(name):
    """Return the object of a public name."""
    return getattr(import_module(homes()[name]), name)
