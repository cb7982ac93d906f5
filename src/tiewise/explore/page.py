"""`explore`: the page and what it is told, as one file that opens from disk and asks for nothing.

    facts (JSON) + web/*.js joined + report.css + page.css → web/page.html

The modules import each other by name, so that an editor knows them; joined, they are one script in which every name is
unique, and which a worker of the page runs too. Needs neither torch nor plotly.
"""

from __future__ import annotations

import json
import os
import pkgutil
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tiewise.core.colours import COLOURS, DIVERGING, PLACES
from tiewise.core.errors import RunError
from tiewise.core.files import write_whole
from tiewise.explore import counts
from tiewise.explore.embedded import embedded
from tiewise.explore.verdict_table import verdict_table

IMPORT = re.compile(r'^import \{[^}]*\} from "\./(\w+)\.js";\n', re.MULTILINE)


class Explorer:
    """The page as text; in a notebook it shows itself in a frame of its own."""

    def __init__(self, html: str) -> None:
        self.html = html

    def write(self, path: str | os.PathLike[str], overwrite: bool = False) -> Path:
        """Write the page to `path`, whole or not at all, and return it.

        Raises:
            RunError: something is there already and not to be replaced, or it cannot be written there.
        """
        target = Path(path)
        if target.exists() and not overwrite:
            raise RunError(f"{target} exists", "choose another place, or replace it with --overwrite")
        try:
            write_whole(target, self.html)
        except OSError as error:
            raise RunError(f"cannot write {target}: {error.strerror}", "choose another place with --out") from None
        return target


def explore(*paths: str | os.PathLike[str], words: Sequence[str] = ()) -> Explorer:
    """Make the page.

    Args:
        paths: a checkpoint to carry a part of.
        words: tokens whose rows are to be in that part: words that are one token, or "#1234".
    """
    checkpoint = {"table": verdict_table(), "embedded": embedded(paths[0], words) if paths else None}
    facts = {"counts": counts.facts(), "checkpoint": checkpoint}
    return Explorer(_page({"at": "checkpoint" if paths else "symmetry"} | facts))


def _page(facts: dict[str, Any]) -> str:
    """Return the page for these facts. Text of users stands in the JSON alone, which closes no script element."""
    told = json.dumps(facts, ensure_ascii=True, separators=(",", ":"), allow_nan=False)
    parts = {
        "style": f"{_text('report/templates/report.css')}{_colours()}{_text('explore/web/page.css')}",
        "facts": told.replace("<", "\\u003c"),
        "code": joined(),
    }
    return re.sub(r"/\*(style|facts|code)\*/", lambda found: parts[found[1]], _text("explore/web/page.html"))


def joined(last: str = "main") -> str:
    """Return a module and all that it imports as one script, each after those that it imports."""
    texts: dict[str, str] = {}

    def take(name: str) -> None:
        text = _text(f"explore/web/{name}.js")
        for imported in IMPORT.findall(text):
            if imported not in texts:
                take(imported)
        texts[name] = re.sub(r"^export ", "", IMPORT.sub("", text), flags=re.MULTILINE)

    take(last)
    return "\n".join(('"use strict";', _text("report/templates/theme.js"), *texts.values()))


def _colours() -> str:
    """Return the colours that all pages share as variables of the style sheet."""
    boundaries = "".join(f"--{name}: {COLOURS[place]}; " for name, place in PLACES.items())
    ends = {
        theme: "; ".join(map(": ".join, zip(("--low", "--zero", "--high"), three, strict=True)))
        for theme, three in DIVERGING.items()
    }
    return f':root {{ {boundaries}{ends["light"]}; }}\n:root[data-theme="dark"] {{ {ends["dark"]}; }}\n'


def _text(path: str) -> str:
    data = pkgutil.get_data("tiewise", path)
    assert data is not None, path
    return data.decode()
