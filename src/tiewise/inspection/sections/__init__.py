"""The sections of an inspection, one file each: see `tiewise.inspection.inspection`."""

import pkgutil


def section_names() -> list[str]:
    """Return the names of all sections, without importing them.

    The names are those of the files, because some sections import torch.
    """
    return sorted(module.name for module in pkgutil.iter_modules(__path__))
