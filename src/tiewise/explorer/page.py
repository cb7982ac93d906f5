"""`explore`: the page and what it is told, as one file that opens from disk and asks for nothing.

    facts (JSON) + web/*.js joined + report.css + page.css → web/page.html

The modules import each other by name, so that an editor knows them; joined, they are one script in which every name is
unique, and which a worker of the page runs too. Needs neither torch nor plotly, but for a live model.
"""

from __future__ import annotations

import json
import os
import pkgutil
import re
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from tiewise.core import Late
from tiewise.core.colours import COLOURS, DIVERGING, PATHS, PLACES
from tiewise.core.errors import RunError
from tiewise.core.files import size, write_result
from tiewise.explorer import known_facts
from tiewise.explorer.compared import compared, is_run
from tiewise.explorer.embedded import embedded
from tiewise.explorer.picture import picture

_LIVE = Late("tiewise.explorer.live")  # which needs torch
_FRAME = (  # of a notebook: scripts run in it, and reach nothing of the notebook
    'title="tiewise explore" sandbox="allow-scripts allow-forms" allow="clipboard-write" width="100%" height="760" '
    'style="border: 1px solid #8884; border-radius: 8px; background: #fff"'
)
IMPORT = re.compile(r'^import \{[^}]*\} from "\./(\w+)\.js";\n', re.MULTILINE)


class Explorer:
    """The page as text; in a notebook it shows itself in a frame that reaches nothing outside of it."""

    def __init__(self, html: str, picture: str) -> None:
        self.html = html
        self.picture = picture  # SVG, for where no script runs

    def __repr__(self) -> str:
        return f"Explorer: a page of {size(len(self.html))}; .write(path) keeps it"

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, str]:
        frame = f'<iframe srcdoc="{escape(self.html)}" {_FRAME}></iframe>'
        return {"text/html": frame, "image/svg+xml": self.picture, "text/plain": repr(self)}

    def write(self, path: str | os.PathLike[str], overwrite: bool = False) -> Path:
        """Write the page to `path`, whole or not at all, and return it.

        Raises:
            RunError: something is there already and not to be replaced, or it cannot be written there.
        """
        target = Path(path)
        if target.exists() and not overwrite:
            raise RunError(f"{target} exists", "choose another place, or replace it with --overwrite")
        return write_result(self.html, target, "--out")


def explore(*shown: Any, words: Sequence[str] = (), texts: Sequence[str] = (), tokenizer: Any = None) -> Explorer:
    """Make the page, and open it at what was given.

    Args:
        shown: folders of `tiewise compare` or `tiewise train`, side by side; and a checkpoint to carry a part of, or a
            live Hugging Face model.
        words: tokens whose rows are to be in that part: words that are one token, or "#1234".
        texts: what is counted, as `tiewise compare --text` takes it: that part holds its most frequent tokens.
        tokenizer: of a live model, to name its rows.

    Raises:
        RunError: several checkpoints, or a run that cannot be read, or texts without a checkpoint.
        CheckpointError: what is neither run nor checkpoint, or cannot be read.
        DataError: a word that is no token; a text without tokens, or that no tokenizer beside the model reads.
        InstallError, UnsupportedError: a live model that has no two tables of tokens to show.
    """
    places = [one if hasattr(one, "state_dict") else Path(os.fspath(one)) for one in shown]
    runs = [place for place in places if isinstance(place, Path) and is_run(place)]
    models = [place for place in places if place not in runs]
    if len(models) > 1:
        raise RunError(f"{len(models)} checkpoints", "give one; `tiewise inspect` shows two side by side")
    if texts and not models:
        raise RunError("a text to count, and no checkpoint", "name the checkpoint whose tokens are counted in it")
    held = None
    for model in models:
        path = isinstance(model, Path)
        held = embedded(model, words, texts) if path else _LIVE.live(model, tokenizer, words, texts)
    facts = {"at": "checkpoint" if held else "runs" if runs else "symmetry", "counts": known_facts.facts()}
    facts["checkpoint"] = {"table": known_facts.verdict_table(), "embedded": held}
    facts |= {"runs": compared(runs)} if runs else {}
    # texts of users stand in the JSON, which closes no script, and in the picture
    told = json.dumps(facts, ensure_ascii=True, separators=(",", ":"), allow_nan=False)
    parts = {
        "style": f"{_text('report/templates/report.css')}{_colours()}{_text('explorer/web/page.css')}",
        "picture": picture(facts),
        "facts": told.replace("<", "\\u003c"),
        "code": joined(),
    }
    filled = re.sub(r"/\*(style|picture|facts|code)\*/", lambda found: parts[found[1]], _text("explorer/web/page.html"))
    return Explorer(filled, parts["picture"])


def joined(last: str = "main") -> str:
    """Return a module and all that it imports as one script, each after those that it imports."""
    texts: dict[str, str] = {}

    def take(name: str) -> None:
        text = _text(f"explorer/web/{name}.js")
        for imported in IMPORT.findall(text):
            if imported not in texts:
                take(imported)
        texts[name] = re.sub(r"^export ", "", IMPORT.sub("", text), flags=re.MULTILINE)

    take(last)
    return "\n".join(('"use strict";', _text("report/templates/theme.js"), *texts.values()))


def _colours() -> str:
    """Return the colours that all pages share as variables of the style sheet."""
    boundaries = "".join(f"--{name}: {COLOURS[place]}; " for name, place in (PLACES | PATHS).items())
    ends = {
        theme: "; ".join(map(": ".join, zip(("--low", "--zero", "--high"), three, strict=True)))
        for theme, three in DIVERGING.items()
    }
    return f':root {{ {boundaries}{ends["light"]}; }}\n:root[data-theme="dark"] {{ {ends["dark"]}; }}\n'


def _text(path: str) -> str:
    data = pkgutil.get_data("tiewise", path)
    assert data is not None, path
    return data.decode()
