import inspect
import sys
import sysconfig
import textwrap

import pytest

from tiewise.core.errors import DataError
from tiewise.data.sources import builtin_documents


@pytest.fixture(scope="module")
def documents():
    loaded = set(sys.modules)
    found = list(builtin_documents())
    assert "turtle" not in set(sys.modules) - loaded  # its docstrings are read, it is not imported
    return {document.name: document.text for document in found}


def test_holds_topics_and_docstrings(documents):
    assert "for_stmt" in documents["topic for"] or "iterable" in documents["topic for"]
    assert inspect.getdoc(textwrap.dedent) in documents["module textwrap.py"]
    assert inspect.getdoc(textwrap.TextWrapper) in documents["module textwrap.py"]
    assert "module turtle.py" in documents
    assert sum(map(len, documents.values())) > 1_000_000


def test_leaves_out_tests_and_other_packages(documents):
    names = [name.removeprefix("module ").split("/") for name in documents if name.startswith("module ")]
    assert names
    for parts in names:
        assert {"site-packages", "test", "tests", "idle_test"}.isdisjoint(parts)


def test_sorted_topics_before_modules(documents):
    names = list(documents)
    topics = [name for name in names if name.startswith("topic ")]
    assert names[: len(topics)] == sorted(topics)


def test_docstrings_in_reading_order_with_nested_ones(tmp_path, monkeypatch):
    (tmp_path / "a.py").write_text(
        '"""one"""\nif 1:\n    def f():\n        """two"""\n        class C:\n            "three"\n'
    )
    (tmp_path / "b.py").write_text("x = 1\n")
    (tmp_path / "c.py").write_text("def broken(:\n")
    (tmp_path / "d.py").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "test").mkdir()
    (tmp_path / "test" / "e.py").write_text('"""not this"""')
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    monkeypatch.setitem(sys.modules, "pydoc_data.topics", None)
    assert [(d.name, d.text) for d in builtin_documents()] == [("module a.py", "one\n\ntwo\n\nthree")]


def test_python_without_texts_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    monkeypatch.setitem(sys.modules, "pydoc_data.topics", None)
    with pytest.raises(DataError, match=r"carries no documentation; name a text of your own"):
        list(builtin_documents())
