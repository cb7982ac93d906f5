"""Reduce JSON, tensors and written files to leaves that fit into a reviewable record."""

import hashlib
import html
import json
import math
import re
from fnmatch import fnmatch

import ml_dtypes
import numpy as np

from tests.answers import texts

LONG = 8  # a list of more entries than this is recorded as a summary
READABLE = 20_000  # a text of at most so many characters is recorded line by line
# Paths of JSON whose values depend on the clock, the machine or the version of a library.
VOLATILE = re.compile(
    r"/(seconds|tokens_per_second|peak_memory\w*|started|finished|date|versions?|host|machine|commit|cpu|pid|hash|sha256"
    r"|processor|threads|transformers_version|python|torch|platform)(/|$)"
    # how many singular values rounding leaves of tables of rank 4: processors differ, their sum does not
    r"|/alignment/found/(factored:4|model-factored)/curves/[01]/[xy]$"
)
# Written files whose bytes differ from run to run; their names are recorded.
NAMES_ONLY = {
    "*.pt": "pickles of torch hold addresses and dates",
    "*.pth": "pickles of torch hold addresses and dates",
    "*.bin": "training_args.bin pickles paths of the temporary folder",
    "*.parquet": "holds the version of its writer; the same table is written as CSV",
    "*.arrow": "holds the version of its writer",
    "*.lock": "empty",
}
# Files whose names are not recorded either: they have a date, a host or a process id.
HIDDEN = ("*/tensorboard/*", "*/checkpoint-*/*", "*events.out*")
READABLE_PAGE = 12_000  # the same of a page
READABLE_JSON = 1_500  # the same of a written JSON file, which often repeats what the command prints
SCRIPT = re.compile(r"<script[^>]*>(.*?)</script>", re.DOTALL)
PLOTLY = 500_000  # a script of more characters is plotly
NUMPY_TYPES = {"F64": "f8", "F32": "f4", "F16": "f2", "I64": "i8", "I32": "i4", "I16": "i2", "I8": "i1", "U8": "u1"}
NUMPY_TYPES |= {"U32": "u4", "BOOL": "u1", "BF16": ml_dtypes.bfloat16, "F8_E4M3": ml_dtypes.float8_e4m3fn}


def leaves(value, path=""):
    """Return {path: leaf} of a JSON value."""
    if VOLATILE.search(path):
        return {}
    if isinstance(value, dict):
        return _leaves_of_parts(value.items(), path) if value else {path: "{}"}
    if isinstance(value, texts.Sums):
        return {path: value}
    if isinstance(value, list):
        return _list_leaves(value, path)
    return {path: value}


def _list_leaves(values, path):
    """Return the leaves of a list: long lists of numbers as sums, other long ones as two entries and a digest."""
    if not values:
        return {path: []}
    if len(values) <= LONG:
        return _leaves_of_parts(enumerate(values), path)
    if all(map(_is_number, values)):
        return {f"{path}[]": texts.sums([math.nan if value is None else value for value in values])}
    every = _leaves_of_parts(enumerate(values), path)
    summary = digest("\n".join(f"{where} {leaf}" for where, leaf in every.items()))
    return {f"{path}/length": len(values), f"{path}/all": summary} | _leaves_of_parts(enumerate(values[:2]), path)


def _leaves_of_parts(parts, path):
    result = {}
    for key, part in parts:
        result |= leaves(part, f"{path}/{str(key).replace('/', '|')}")
    return result


def nested(value):
    """Return an answer in which {path: leaf} is nested, which is shorter to print."""
    if not isinstance(value, dict):
        return value
    if not value or not all(key.startswith("/") for key in value):
        return {key: nested(part) for key, part in value.items()}
    tree = {}
    for path, leaf in value.items():
        *parents, last = path.split("/")[1:]
        branch = tree
        for parent in parents:
            branch = branch.setdefault(parent, {})
        branch[last] = leaf
    return {"/": tree}


def flat(value):
    """Undo `nested`."""
    if not isinstance(value, dict):
        return value
    if set(value) == {"/"}:
        return _flat_leaves(value["/"], "")
    return {key: flat(part) for key, part in value.items()}


def _flat_leaves(tree, path):
    if not isinstance(tree, dict):
        return {path: tree}
    result = {}
    for key, part in tree.items():
        result |= _flat_leaves(part, f"{path}/{key}")
    return result


def rounded(value, digits):
    """Return an answer whose fractions have so many significant digits."""
    if isinstance(value, dict):
        return {key: rounded(part, digits) for key, part in value.items()}
    if isinstance(value, list):
        return [rounded(part, digits) for part in value]
    return float(f"{value:.{digits}g}") if isinstance(value, float) else value


def _is_number(item):
    return item is None or (isinstance(item, int | float) and not isinstance(item, bool))


def digest(text):
    """Return a hash of the words of a text and the sums of its numbers."""
    split = texts.parts(text)
    numbers = [texts.value(number) for number in split.numbers]
    return {"words": hashlib.sha256(split.words.encode()).hexdigest()[:16], "numbers": texts.sums(numbers)}


def text_leaf(text):
    """Return the lines of a text, or a digest where it is long."""
    return texts.lines(text) if len(text) <= READABLE else digest(text)


def files(folder):
    """Return {name: (size, time of change)} of the files below a folder."""
    result = {}
    for path in folder.rglob("*"):
        name = str(path.relative_to(folder))
        if path.is_file() and not any(fnmatch(name, pattern) for pattern in HIDDEN):
            result[name] = (path.stat().st_size, path.stat().st_mtime_ns)
    return dict(sorted(result.items()))


def file_leaf(path, folder, *, moved=False, each_tensor=True):
    """Describe one written file.

    Args:
        path: the file.
        folder: where the case ran.
        moved: whether the bytes of tensors are copied and never computed: their hash is recorded then.
        each_tensor: whether every tensor has sums of its own.
    """
    if any(fnmatch(path.name, pattern) for pattern in NAMES_ONLY):
        return "a file"
    if path.suffix == ".safetensors":
        return tensors_leaf(path, moved=moved, each_tensor=each_tensor)
    if path.suffix in (".npy", ".npz"):
        return _arrays_leaf(path)
    raw = path.read_bytes()
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError:
        return {"sha256": hashlib.sha256(raw).hexdigest()[:16], "bytes": len(raw)}
    if path.suffix == ".html" or text[:15].lower() == "<!doctype html>":
        return page_leaf(texts.normalised(_without_plotly(text), folder), trained=not each_tensor)
    if path.suffix in (".json", ".ipynb"):
        return json_leaf(text, folder)
    if path.suffix == ".jsonl":
        return digest(json.dumps([leaves(json.loads(line)) for line in text.splitlines()]))
    return text_leaf(texts.normalised(text, folder))


def json_leaf(text, folder):
    """Describe a JSON file by its leaves."""
    result = leaves(texts.parsed(text, folder))
    as_text = json.dumps(result, ensure_ascii=False)
    return result if len(as_text) <= READABLE_JSON else digest(as_text)


def _without_plotly(page):
    """Replace the longest script of a page, which is plotly, by a blank."""
    return SCRIPT.sub(lambda script: " " if len(script[1]) >= PLOTLY else script[0], page)


def page_leaf(page, *, trained):
    """Describe an HTML page: its visible text, and digests of its tags and scripts.

    The report of a training also shows how fast it was, so of its text the words are kept, without the numbers.
    """
    short_scripts = [script for script in SCRIPT.findall(page) if len(script) < PLOTLY]
    rest = re.sub(r"<(script|style)[^>]*>.*?</\1>", " ", page, flags=re.DOTALL)
    rows = re.sub(r"</t[dh]>\s*", "  ", rest)  # the cells of a row in one line
    visible = html.unescape(re.sub(r"<(?!/?t[dh])[^>]*>", "\n", rows))
    visible = re.sub(r"<[^>]*>", " ", visible)
    visible_text = "\n".join(line.strip() for line in visible.splitlines() if line.strip())
    visible_text = texts.without_machine(visible_text)
    ids = re.compile(r"[0-9a-f]{8}-[0-9a-f-]{27}")  # plotly draws a new one for every figure
    tags = ids.sub("ID", "".join(re.findall(r"<[^>]*>", rest)))
    result = {f"script {place}": digest(ids.sub("ID", script)) for place, script in enumerate(short_scripts)}
    page_text = text_of_page(visible_text)
    if trained:
        page_text = {"words": digest(visible_text)["words"]}
    else:
        result |= {f"sizes {place}": sizes(ids.sub("ID", script)) for place, script in enumerate(short_scripts)}
        result["sizes"] = sizes(visible_text)
    return {"text": page_text, "tags": digest(tags)} | result


def sizes(text):
    """Return sums of the logarithms of a text's numbers, which show a change of a small one next to large ones."""
    numbers = map(texts.value, texts.parts(text).numbers)
    return texts.sums([math.copysign(math.log1p(1000 * abs(number)), number) for number in numbers])


def text_of_page(visible_text):
    """Return the lines of a page's text, or a digest where it is long."""
    return texts.lines(visible_text) if len(visible_text) < READABLE_PAGE else digest(visible_text)


def tensors_leaf(path, *, moved, each_tensor):
    """Describe a safetensors file by its header and sums of its tensors."""
    raw = path.read_bytes()
    size = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + size])
    result = {"metadata": header.pop("__metadata__", None)}
    every, words = [], []
    for name, entry in header.items():
        begin, end = entry["data_offsets"]
        data = np.frombuffer(raw[8 + size + begin : 8 + size + end], NUMPY_TYPES.get(entry["dtype"], "u1"))
        numbers = data.astype(np.float64).tolist()
        label = f"{name} {entry['dtype']} {entry['shape']}"
        if each_tensor:
            result[label] = texts.sums(numbers)
        words.append(label)
        every += numbers
    if not each_tensor:
        names = hashlib.sha256("\n".join(words).encode()).hexdigest()[:16]
        result |= {"tensors": len(words), "names": names, "numbers": texts.sums(every)}
    if moved:
        result["sha256"] = hashlib.sha256(raw[8 + size :]).hexdigest()[:16]
    return result


def _arrays_leaf(path):
    loaded = np.load(path, mmap_mode=None, allow_pickle=False)
    arrays = {"": loaded} if isinstance(loaded, np.ndarray) else {name: loaded[name] for name in loaded.files}
    return {
        f"{name} {array.dtype} {list(array.shape)}": texts.sums(array.astype(np.float64).ravel().tolist())
        for name, array in arrays.items()
        if math.prod(array.shape) and array.dtype.kind in "biuf"
    }
