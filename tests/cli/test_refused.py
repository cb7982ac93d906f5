"""Test wrong command lines: one line with the error and its fix, exit code 2, and no changed file."""

import json
import os
import shlex

import numpy as np
import pytest
import yaml
from cli_tiny import TINY, assert_refused
from tests.checkpoint.tiny_checkpoints import llama, table

from tiewise.cli.commands import commands
from tiewise.training.folder import locked

SMALL = ["compare", *TINY, "--arms=tied,untied", "--seeds=1"]


@pytest.fixture(autouse=True)
def files(tmp_path, text):
    """Write texts, corpora and configs; most of them are unusable."""
    words = {"train": "a b c d\n" * 12, "valid": "a b x d\n" * 3, "test": "b c d y\n" * 3}
    written = {
        "empty.txt": "",
        "short.txt": "one two three",
        "little.txt": "\n\n".join(f"{i} some words of a text that is not long" for i in range(20)),
        "rows.jsonl": "".join(json.dumps({"body": f"row {i}"}) + "\n" for i in range(50)),
        "ones.jsonl": "".join(json.dumps({"text": f"Row {i} is one sentence."}) + "\n" for i in range(300)),
        "odd.yaml": "breadth: 3",
        "grid.yaml": "{asks: Why, settings: {text: [text.txt], arms: [untied, tied]}, axes: {width: [8, 16]}}",
        "other/thesis.tex": "x",
        "file": "x",
        "bad.json": "{",
        "empty.json": "{}",
        "config.json": "{}",
        **{f"{corpus}/{name}.txt": words[name] for corpus in ("corpus", "cut") for name in words},
    }
    for name, content in written.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(content)
    (tmp_path / "cut" / "valid.txt").unlink()
    llama(tmp_path / "twice", head=table())
    llama(tmp_path / "differ", head=table(seed=2))
    (tmp_path / "binary.txt").write_bytes(np.random.default_rng(0).bytes(4000))


@pytest.fixture
def assert_refuses(tiewise, tree):
    """Return a function that checks that a command refuses its arguments in one line and changes nothing."""

    def run(says, *arguments):
        before = tree()
        assert says in assert_refused(tiewise(*arguments))
        assert tree() == before

    return run


# arguments that make a valid command line invalid, and the message about them
TEXTS = {
    "builtn": "no file or folder 'builtn'; did you mean builtin?",
    "synthetic:wrds=3": "did you mean words?",
    "missing.txt": "missing.txt",
    "binary.txt": "binary.txt",
    "short.txt": "give more text",
    "rows.jsonl:title": "title",
    "rows.jsonl": "text",
    "hf:": "hf:",
    "-": "standard input is empty",
    "little.txt --set=batch=64": "training blocks of 16 tokens, and one step takes 64; give more text",
}
OPTIONS = {
    "--arms=factored": "factored:128, say",
    "--arms=tied,factored:17": "k = 17 exceeds the model width 16; choose k ≤ 16",
    "--arms=": "unknown boundary ''",
    "--arms=tied,untide": "unknown boundary 'untide'; did you mean untied? choose one of",
    "--arms=tied+bais": "unknown option 'bais' in 'tied+bais'; did you mean bias? known: bias",
    "--set=learning_rat=1": "unknown setting 'learning_rat' in --set; did you mean learning_rate? known: arms",
    "--set=wdith=32": "did you mean width?",
    "--set=match=with": "match = 'with'; did you mean width? choose one of width, parameters, flops",
    "--widht=32": "no option --widht; did you mean --set width=VALUE? see ",
    "--bondary=tied": "no option --bondary; did you mean --boundary?",
    "--seeds=0": "seeds = 0",
    "--jobs=0": "jobs = '0'; give how many runs are trained at a time, 1 or more, or auto",
    "--steps=many": "--steps: 'many' is not a whole number; see ",
    "--minutes=1": "both steps and minutes are given",  # TINY has steps
    "--model=nothing": "give the path of a config.json, or one of llama, gpt2",
    "--model=gtp2": "unknown model 'gtp2'; did you mean gpt2?",
    "--recipe=nosuch": "no recipe 'nosuch'; choose one of albert-base",
    "--tokenizer=bpe:12": "bpe:12",
    "--set=width": "write --set NAME=VALUE",
    "--set=breadth=3": "unknown setting 'breadth' in --set",
    "--set=width=wide": "width in --set must be a whole number",
    "--set=width={": "the value cannot be read",
    f"--set=learning_rate=1{'0' * 400}": "learning_rate in --set is too large a number",
    "--set=seed=1": "seed is a setting of train",
    "--config=odd.yaml": "unknown setting 'breadth' in odd.yaml",
    "--launcher=condor": "no launcher 'condor'; choose local or ray",
    "--launcher=ray --jobs=0": "jobs = '0'",
    "--element=0 --tune": "tune with --element 0, which trains nothing",
    "--element=0 --set=tune=true": "leave tune out, or use --launcher ray",
    "--element=1": "--element 1; give no option but --out a/run --resume with it",
    "--sparkle": "no option --sparkle; did you mean --share? see ",
    "--out": "--out needs a value; see ",
    "more less": "unexpected argument: less; see ",
}
FOLDERS = {
    "other": "other exists and is no run of tiewise; choose another --out",
    "file": "file is a file; choose another --out",
    "file/run": "cannot write to file/run",
    "/proc/run": "cannot write to /proc/run",
}
SWEEP = {
    "": "no grid is named; name a YAML file, or quick",
    "quik": "no grid 'quik'; did you mean quick? name a YAML file, or one of",
    "nowhere.yaml": "no grid 'nowhere.yaml'; name a YAML file, or one of causes, ",
    "--resume --out=none": "none holds no study to resume; leave --resume out, and name a grid",
    "grid.yaml --resume": "runs/sweep holds no study to resume; leave --resume out",
    "grid.yaml --resume --overwrite": "--resume takes its grid from the study; give only --out runs/sweep --resume",
    "--quick --resume": "--resume takes its grid from the study; give only --out runs/sweep --resume",
    "grid.yaml --launcher=cloud": "no launcher 'cloud'; choose local or ray",
    "grid.yaml --jobs=none": "jobs = 'none'",
    "grid.yaml --out=other": "other exists and is no study of tiewise; choose another --out",
}
TRAIN = {
    "--seed=0": "seed = 0",
    "--steps=0": "steps = 0",
    "--set=kind=seq2seq --model=llama": "llama",
    "--set=tune=true": "tune is a setting of compare",
    "'--set=arms=[tied, untied]'": "2 boundaries (tied, untied) for one run",
}
RECIPES = {
    "--recipe lstm corpus": "no recipe 'lstm'",
    "--recipe=press-wolf-smal corpus": "did you mean press-wolf-small?",
    "corpus": "without --recipe",
    "twice": "is a model, and this command trains new ones; give it your text: --text FILE",
    "--recipe awd": "needs one corpus; name its folder without --text: --recipe awd CORPUS",
    "--recipe awd corpus --text builtin": "needs one corpus; leave --text out, and 'corpus' is read",
    "--recipe awd elsewhere": "no corpus folder",
    "--recipe pytorch-200 cut": "valid.txt",
    "--recipe awd corpus --set 'files=[none.txt, valid.txt, test.txt]'": "has no none.txt",
    "--recipe pytorch-200 corpus --set embedding=100": "projected",
    "--set epochs=3": "add --recipe",
    "--recipe=albert-small --text ones.jsonl --tokenizer=bpe:300 --set=length=24": "no document has two sentences",
    "--recipe=albert-small --text text.txt --share=none,ffn": (
        "2 boundaries (factored:64+share=none, factored:64+share=ffn) for one run"
    ),
}
ALBERT = {
    "--share=some": "unknown sharing 'some' in 'some'; choose one of none, attention, ffn, all, sandwich",
    "--share=all,all:groups=1": "an arm is given twice",
    "--share=ffn --arms=tied+share=all": "leave +share= out, or --share",
    "--arms=factored:8+share=all,rank=4": (
        "unknown sharing 'all,rank=4' in 'all,rank=4'; write all:groups=2 or all+rank=4, say"
    ),
}
SHOW = {
    "--objective order": "unknown objective",
    "--length 3": "rows of 3 tokens",
    "--split dev --length 60": "no split 'dev'",
    "-n 0": "0 rows",
    "--masking 0": "nothing is masked",
}
PLAN = {
    "": "no model to plan; give one of: a config.json or its folder",
    "--like=gpt2 --boundary=teid": "unknown boundary 'teid'; did you mean tied? choose one of untied, tied",
    "--like=gpt2 --share=al": "did you mean all?",
    "--like=gpt2 --widht=9": "no option --widht; did you mean --width? see ",
    "--like=gtp2": "did you mean gpt2",
    "--like=gpt2 --gated": "--gated does not apply to gpt2, whose class decides it",
    ". --like=gpt2": "a model and --like gpt2 at once",
    "--vocab=10 --width=4": "--layers missing",
    "--vocab=0 --width=4 --layers=1": "vocab = 0",
    "--vocab=10 --width=10 --layers=2 --heads=3": "not a multiple of 3 heads",
    "--like=gpt2 --boundary=factored:9999": "k = 9999 exceeds the model width 768",
    "--like=gpt2 --boundary=residual:9999": "rank 9999 exceeds",
    "--like=gpt2 --tp=3": "tp 3 does not divide the world of 1",
    "--like=gpt2 --world=0": "must be a whole number, 1 or more",
    "--like=gpt2 --world=8 --fsdp=0": "fsdp = 0; it must be a whole number, 1 or more",
    "--like=gpt2 --world=8 --fsdp=4 --tp=4": "fsdp 4 × tp 4 does not divide the world of 8",
    "--like=gpt2 --batch=0": "must be a whole number, 1 or more",
    "--like=gpt2 --dtype=int3": "dtype = 'int3'",
    "--like=gpt2 --init=-1": "--init -1.0; give a positive number",
    "--like=gpt2 --init=nan": "--init nan; give a positive number",
    "--like=granite-4.1-8b": "no source gives the vocabulary size of granite-4.1-8b",
    "gtp2": "no model 'gtp2', and no file or folder has this path; did you mean gpt2? `tiewise plan --list` lists all",
    "bad.json": "bad.json",
    "empty.json": "the config has no model_type: the config has no",
    "--like=gpt2 --plot=no/such/plan.html": "choose another place with --plot",
    "--like=gpt2 --vocab=many": "--vocab",
    "--vocab=10 --width=4 --layers=1 --build": "--build has no config to build",
    "--like=gemma-4-e2b --build": "--build has no config to build",
    "empty.json --build": "cannot build a config without model_type",
}
CHECKPOINTS = {
    "check /no/such/place": "no such file or folder",
    "check": "give a checkpoint",
    "check --explain B999": "no rule 'B999'",
    "check twice --select B999": "no rule 'B999'",
    "check twice --fail-on some": "choose one of",
    "check twice --headers --deep": "reads every row",
    "check twice --base /tmp": "not an adapter",
    "tie differ --to new": "--keep",
    "tie differ --to new --keep inputs": "no choice --keep inputs; did you mean input? choose one of input, ",
    "tie differ": "--to is missing; see ",
    "inspect": "A is missing; see ",
    "check twice --select B0155": "there is no rule 'B0155'; did you mean B015? rules are",
    "check twice --fail-on eror": "--fail-on eror; did you mean error?",
    "kernels bild": "no action 'bild'; did you mean build? choose build",
    "heal twice": "no teacher; give --teacher: the folder of the model that twice was rewritten from",
    "factor twice --to new --rank 8": "rank",
    "factor twice --to new --rank 0": "rank",
    "vocab resize twice --to new": "the new number of rows is missing; give --vocab, --multiple-of or --tokenizer",
    "vocab resize twice --to new --rows 100": "no choice --rows 100; did you mean --vocab 100? rows are drawn or zero",
    "vocab resize twice --to new --vocab 10": "shrink",
    "factor twice --undo --to new": "plain",
    "vocab trim twice --to new": "the tokens to keep are missing; give --text, --keep or --size",
    "vocab trim twice --to new --size 9": "no tokenizer.json in it",
    "repair twice --to /proc/new": "/proc",
    "repair twice --to differ": "not empty",
}
RENAMED = {
    "models": "no command 'models'; it is `tiewise plan --list` now; see tiewise --help",
    "dedupe twice --to new": "no command 'dedupe'; it is `tiewise repair` now",
    "densify twice": "no command 'densify'; it is `tiewise factor --undo` now",
    "resize twice": "no command 'resize'; it is `tiewise vocab resize` now",
    "merge twice": "no command 'merge'; it is `tiewise adapter merge` now",
    "hot -t text.txt": "no command 'hot'; it is `tiewise vocab hot`; see",
    "comparr": "no command 'comparr'; did you mean `tiewise compare`? see tiewise --help",
    "densfy": "no command 'densfy'; did you mean `tiewise factor --undo`?",
    "vocab cold": "no command 'vocab cold'; choose one of vocab resize, vocab trim, vocab transplant, vocab hot",
    "vocab rezise": "no command 'vocab rezise'; did you mean `tiewise vocab resize`?",
    "adapter mend": "no command 'adapter mend'; choose adapter slim or adapter merge; see tiewise adapter --help",
}
EMPTY = dict.fromkeys(("''", "--out=", "--to="), "an argument is empty: is a variable unset?")
TOO_LONG = {"word" * 99: "File name too long; check the path"}
NO_FILE = {path: f"{path}: a pipe, device or socket; give a checkpoint folder" for path in ("/dev/zero", "pipe")}
RESUME = dict.fromkeys(
    ("--steps=3", "--set=width=8", "--config=odd.yaml", "-t text.txt", "--no-tune", "--overwrite", "--share=ffn"),
    "--resume takes its settings from the run; give only --out run --resume",
)
WRONG = [
    (shlex.join([*SMALL, "--out=a/run", "-t"]), TEXTS),
    (shlex.join([*SMALL, "-t", "text.txt", "--out=a/run"]), OPTIONS),
    (shlex.join([*SMALL, "-t", "text.txt", "--out"]), FOLDERS),
    (shlex.join([*SMALL, "-t", "text.txt", "--overwrite", "--out"]), FOLDERS),
    (shlex.join(["train", "-t", "text.txt", *TINY, "--out=run"]), TRAIN),
    ("sweep -q", SWEEP),
    ("compare --element=0", {"--launcher=ray": "--element 0 with --launcher ray; leave --launcher out"}),
    ("train -o out", RECIPES),
    ("compare --recipe=albert-small --text text.txt -o out", ALBERT),
    ("compare --share=ffn", {"": "--recipe albert-small", "--recipe=pytorch-200 corpus": "--recipe albert-small"}),
    ("compare --resume --out run", RESUME),
    ("compare --resume --out", {"none": "none holds no run to resume"}),
    (
        "compare --resume --out=none --element=1",
        {"": "none holds no run", "--launcher=ray": "give no option but --out none --resume with it"},
    ),
    ("train --resume --out", {"other": "other holds no run to resume"}),
    ("data", {"shoe": "no command 'data shoe'; did you mean `tiewise data show`? see tiewise data --help"}),
    ("", RENAMED),
    ("data show -t text.txt --tokenizer bpe:300", SHOW),
    ("plan", PLAN),
    ("plan --list", {"--family=lama": "did you mean llama? `tiewise plan --list` lists all"}),
    ("inspect twice", {"--only=alignmnet": "there is no section 'alignmnet'; did you mean alignment? sections are"}),
    ("plan --list", {"--sort=age": "cannot sort by 'age'; choose one of", "--min-vocab=x": "--min-vocab"}),
    ("sparkle", {"": "'sparkle'"}),
    ("", CHECKPOINTS),
    (
        "plan",
        dict.fromkeys(TOO_LONG, "wordw...', and no file or folder has this path; `tiewise plan --list` lists all"),
    ),
    *((verb, TOO_LONG) for verb in ("inspect", "train", "explore", "sweep", "exercise 1", "train --model")),
    *((verb, NO_FILE) for verb in ("check", "inspect", "untie --to new")),
    *((name, EMPTY) for name in commands()),
    ("compare --element=0", {"--resume": "--element 0 with --resume; runs/compare is prepared; give a number from 1"}),
]
CASES = [(f"{command} {rest}", says) for command, rows in WRONG for rest, says in rows.items()]


@pytest.mark.parametrize(("line", "says"), CASES)
def test_command_refuses_wrong_arguments_with_one_line_and_changes_nothing(assert_refuses, tmp_path, line, says):
    if "pipe" in line:
        os.mkfifo(tmp_path / "pipe")
    assert_refuses(says, *shlex.split(line))


def test_compare_refuses_existing_locked_or_damaged_run_folder(compare, tiewise, assert_refuses, tmp_path):
    small, resume = [*SMALL[:-2], "-t", "text.txt", "--out=run"], ["compare", "--out=run", "--resume"]
    assert compare("--arms=tied", "--seeds=1", "--out=run").code == 0
    assert_refuses("--resume to finish it, --overwrite to replace it", *small, "--arms=tied")
    assert_refuses("k = 500 exceeds", *small, "--overwrite", "--arms=factored:500")  # before the run is replaced
    with locked(tmp_path / "run"):
        for line in (resume, [*small, "--overwrite", "--arms=tied"]):
            assert_refuses("another run is at work in run; wait for it, or choose another --out", *line)
    assert tiewise(*resume).code == 0
    settings = (tmp_path / "run" / "run.yaml").read_text()
    (tmp_path / "run" / "run.yaml").write_text(yaml.safe_dump(yaml.safe_load(settings) | {"width": "wide"}))
    assert_refuses("width in run/run.yaml must be a whole number", *resume)
    (tmp_path / "run" / "run.yaml").write_text(settings)
    (tmp_path / "run" / "data" / "train.bin").write_bytes(b"")
    assert_refuses("train.bin", *resume)
    assert compare("--arms=untied", "--seeds=1", "--out=run", "--overwrite").code == 0
