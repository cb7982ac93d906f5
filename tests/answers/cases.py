"""The recorded cases: every command, option, section of `inspect`, kind of run, rule of `check`, verb and spec option.

A case is one or more command lines that run in one folder, which holds the inputs that they name. Each line runs twice:
as a person reads it, and with `--json`.
"""

import re
from dataclasses import dataclass, field

from tests.answers import inputs, package, python_names
from tests.answers.faults import FAULTS
from tests.answers.texts import words

COMMANDS = frozenset(package.commands())
RUN = inputs.SET
DECODER = inputs.DECODER
ALBERT = inputs.ALBERT
RECURRENT = "--recipe pytorch-200 small-corpus --set=width=8 --set=batch=4 --set=length=8 --set=epochs=2 --quiet"
SEQ2SEQ = f"{DECODER} --set=kind=seq2seq"
EFFORT = "-t text.txt --windows=8 --length=16 --samples=80 --lens-steps=20 --quiet"
PLAIN = ["tied", "untied", "equal", "flag-lies", "flag-missing"]
PLAIN += ["no-head", "one-row-off", "short-vocab", "nan", "sharded"]
MODELS = ("model-gpt2", "model-bert", "model-t5", "model-bart", "model-factored")
FOLDERS = (*PLAIN, "half", "wrapped", "only-head", "quantised", "adapter", "broken", "model.gguf", *MODELS)
# commands with `--resume`, and the cases of them that train with `--json` too
TRAINING = ("compare", "train", "heal", "sweep")
TRAINED_TWICE = ("compare decoder", "compare loud", "train decoder", "train loud", "heal all")
TRAINED_TWICE += ("train uploaded offline",)  # its exit code is that of the upload


@dataclass(frozen=True)
class Case:
    """One recorded case.

    Attributes:
        name: its command or group, then words that identify the case.
        lines: command lines, without `tiewise`.
        tolerance: "words" for text that must be equal, "exact" for figures, "trained" for figures of training.
        slow: whether it belongs to the slow suite.
        json: whether each line also runs with `--json`.
        function: name of a function of `python_names` that runs instead of command lines.
        needs: inputs that no command line names.
        environment: further variables.
    """

    name: str
    lines: tuple[str, ...] = ()
    tolerance: str = "exact"
    slow: bool = False
    json: bool = True
    function: str = ""
    needs: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)

    @property
    def resumed(self):
        """Whether the JSON is that of `--resume` in the folder of the first run, which has the same content.

        So the case trains once. One case of each command trains again with `--json`.
        """
        if self.command not in TRAINING or len(self.lines) > 1 or self.name in TRAINED_TWICE:
            return False
        return self.json and re.search("(-o|--out) out( |$)", self.lines[0]) is not None

    @property
    def command(self):
        """The command that the case is recorded under, of a group in two words."""
        two_words = " ".join(self.name.split()[:2])
        return two_words if two_words in COMMANDS else self.name.split()[0]

    def inputs(self):
        """Return the names of the inputs that the command lines name."""
        named = set(re.findall(r"[\w.-]+", " ".join(self.lines)))
        return [name for name in inputs.names() if name in named or name in self.needs]


def cases(lines, **options):
    """Return cases by their names: {name: command line, or several}."""
    table = {}
    for name, lines_of_case in lines.items():
        table[name] = Case(
            name, (lines_of_case,) if isinstance(lines_of_case, str) else tuple(lines_of_case), **options
        )
    return table


CASES = {}

# help, usage errors and texts

CASES |= cases({f"help {name}": f"{name} --help" for name in package.commands()}, tolerance="words", json=False)
CASES |= cases(
    {
        "help": "--help",
        "help nothing": "",
        "help version": "--version",
        "help unknown command": "comparr",
        "help unknown command of a group": "vocab rezise",
        "help command of an earlier version": "densify model-factored --to new",
        "help group": "vocab --help",
        "help unknown option": "check tied --depp",
        "help option of settings": "train --widht=3",
        "help empty argument": "plan --like ''",
    },
    tolerance="words",
    json=False,
)
CASES |= cases(
    {f"exercise {number}": f"exercise {number} --hint --solution" for number in range(1, 14)}, tolerance="words"
)
CASES |= cases(
    {
        "exercise": "exercise",
        "exercise unknown": "exercise 99",
        "exercise quiet": "exercise 1 -q",
        "exercise right": "exercise 1 right.py",
        "exercise wrong": "exercise 1 wrong.py",
        "exercise failing": "exercise 1 failing.py",
        "exercise absent": "exercise 1 absent.py",
        "kernels": "kernels",
        "kernels quiet": "kernels --quiet",
        "kernels unknown": "kernels bild",
    },
    tolerance="words",
)

# planning

SPECS = "tied,untied,factored:128,factored-untied:in=64,out=128,projected:300,residual:32,spd,tied+bias"
SHARES = "none,attention,ffn,all,all:groups=2,all:cycle=2,all:ends=1,sandwich"
SIZED = "plan --vocab=32000 --width=512 --layers=8"
CASES |= cases(
    {
        "plan gpt2": "plan --like gpt2",
        "plan full": "plan --like gpt2 --full",
        "plan full in the atlas": "plan --vocab=2048 --width=64 --layers=2 --full",
        "plan resized": "plan --like gpt2 --vocab=40000 --width=960 --layers=6 --heads=15",
        "plan sizes": f"{SIZED} --heads=8 --boundary {SPECS} --world=8 --tp=2 --full",
        "plan parallel": f"{SIZED} --world=8 --tp=2 --fsdp=4 --batch=2 --length=256 -q",
        "plan gated": f"{SIZED} --heads=8 --kv-heads=2 --ffn=1536 --gated --batch=4 --length=512 --quiet",
        "plan shared": f"plan --like gpt2 --share {SHARES} --dtype=bfloat16 --init=0.05",
        "plan built": "plan model-gpt2 --build",
        "plan built like": "plan --like gpt2 --build",
        "plan not built": "plan model-gpt2 --no-build",
        "plan page": "plan --like gpt2 --plot page.html",
        "plan page of a published size": "plan --like albert-base-v2 --plot page.html -q",
        "plan page again": "plan --like gpt2 --plot text.txt --overwrite -q",
        "plan page exists": "plan --like gpt2 --plot text.txt",
        **{f"plan {name}": f"plan {name}" for name in MODELS},
        "plan unknown": "plan --like gpt22",
        "plan absent": "plan nowhere",
        "plan broken": "plan broken",
        "plan nothing": "plan",
        "plan two": "plan tied --like gpt2",
        "plan missing size": "plan --vocab=100",
        "plan spec": f"{SIZED} --boundary factord:3",
        "plan share": f"{SIZED} --share al",
        "plan rank": "plan --like gpt2 --share ffn+rank=4",
        "plan dtype": f"{SIZED} --dtype=int4",
        "plan too wide": f"{SIZED} --boundary factored:600",
        "plan list": "plan --list",
        "plan list tied": "plan --list --tied --min-size=1 --max-size=9 --sort=ratio",
        "plan list untied": "plan --list --untied --family qwen --min-vocab 100000 --sort=size -q",
        "plan list sorted": "plan --list --sort=share --max-size=0.5",
        "plan list sort": "plan --list --sort=colour",
        "plan filter alone": "plan --family gpt2",
        "plan list and model": "plan tied --list",
        "plan list none": "plan --list --family nobody",
    }
)
FAMILIES = ["llama-3.2-1b", "gemma-2-2b", "qwen2.5-0.5b", "bert-base-uncased", "t5-small", "albert-base-v2"]
CASES |= cases({f"plan like {name}": f"plan --like {name}" for name in FAMILIES})

# check

RULES = sorted({name[:4] for name in FAULTS if re.match(r"b\d{3}", name)})
CASES |= cases({f"check explain {rule}": f"check --explain {rule}" for rule in RULES}, tolerance="words")
# further options for the check of a faulty checkpoint
MORE_OPTIONS = dict.fromkeys(("b060", "b061", "b061-row", "b061-narrow", "b062", "b063", "b064"), "--base tied")
MORE_OPTIONS |= {
    "b083": "--target with-tokenizer",
    "b084": "--target with-tokenizer",
    "b085": "--target with-tokenizer",
}
MORE_OPTIONS |= {
    "b041-nan": "--deep",
    "b041-alike": "--deep",
    "b081": "--deep",
    "sound-draft": "--target wider-tokenizer",
}
CASES |= cases({f"check {name}": f"check {name}" for name in FOLDERS})
CASES |= cases(
    {f"check fault {name}": f"check {name} {MORE_OPTIONS.get(name, '')}".strip() for name in FAULTS},
    needs=("outside.safetensors",),
)
CASES |= cases({"check fault b036": "check b036"}, environment={"TIEWISE_NO_BUILD": "0"})
CASES |= cases({"check no build": "check tied --no-build"})
CASES |= cases({f"check deep {name}": f"check {name} --deep" for name in ("nan", "equal", "half", "b043")})
CASES |= cases(
    {f"check headers {name}": f"check {name} --headers" for name in ("sharded", "flag-lies", "b004", "b021")}
)
CASES |= cases(
    {
        "check original": "check model.gguf --original untied",
        "check original onnx": "check sound.onnx --original tied",
        "check base": "check adapter --base tied",
        "check explain": "check --explain all",
        "check explain unknown": "check --explain b999",
        "check several": "check tied flag-lies broken",
        "check several with an absent one": "check nowhere tied",
        "check absent": "check nowhere",
        "check nothing": "check",
        "check no checkpoint": "check text.txt",
        "check world": "check tied --world 16",
        "check world odd": "check tied --world 0",
        "check as class": "check untied --as GemmaForCausalLM",
        "check as unknown class": "check untied --as NoForCausalLM",
        "check quantise": "check tied --quantise plan.json --fail-on warning",
        "check quantise absent": "check tied --quantise nowhere.json",
        "check full": "check flag-lies --full",
        "check format json": "check flag-lies --format json",
        "check format unknown": "check tied --format serif",
        "check baseline absent": "check tied --baseline nowhere.json",
        "check baseline wrong": "check tied --baseline plan.json",
        "check select": "check flag-lies --select B03,B012 -q",
        "check select unknown": "check flag-lies --select X9",
        "check ignore": "check flag-lies --ignore B012,B08 --quiet",
        "check fail on fatal": "check flag-lies --fail-on fatal",
        "check fail on info": "check tied --fail-on info",
        "check fail on never": "check flag-lies --fail-on never",
        "check fail on unknown": "check flag-lies --fail-on sometimes",
        "check headers and deep": "check tied --headers --deep",
        "check target": "check tied --target untied",
    }
)
CASES |= cases(
    {
        f"check format {name}": f"check flag-lies no-head tied nowhere --format {name}"
        for name in ("sarif", "github", "agent")
    },
    json=False,
)
CASES |= cases({"check follow links": "check b001-link --follow-links"}, needs=("outside.safetensors",))

# verbs

TRANSPLANT = "vocab transplant trimmable --to new --tokenizer other-words"
for verb in ("untie", "repair"):
    CASES |= cases({f"{verb} {name}": f"{verb} {name} --to new" for name in PLAIN})
REPAIRED = words("b002-moved b003 b004 b013 b016 b020 b021 b041-zero b012-rows b012-noise")
CASES |= cases({f"repair {name}": f"repair {name} --to new" for name in REPAIRED})
CASES |= cases({f"tie {keep}": f"tie flag-lies --to new --keep {keep}" for keep in ("input", "output", "mean")})
CASES |= cases(
    {
        "tie": "tie untied --to new",
        "tie unknown": "tie untied --to new --keep both",
        "tie dry": "tie untied --to new --keep input --dry-run --quiet",
        "tie tied": "tie tied --to new",
        "tie forced": "tie untied --to new --keep input --force",
        "tie to itself": "tie untied --to untied --keep input",
        "tie absent": "tie nowhere --to new",
        "tie no target": "tie untied",
        "untie dry": "untie tied --to new --dry-run -q",
        "untie forced": "untie sharded --to new --force",
        "untie missing": "untie tied",
        "untie factored": "untie model-factored --to new",
        "repair stored twice": "repair equal --to new --dry-run -q",
        "repair dry": "repair flag-lies --to new --dry-run -q",
        "repair forced": "repair flag-lies --to new --force",
        "repair no checkpoint": "repair broken --to new",
        "factor": "factor untied --to new --rank=4 --counts=counts.json",
        "factor tied": "factor model-tied --to new --rank=4 --text=words.txt",
        "factor plain": "factor tied --to new --rank=3 -q",
        "factor dry": "factor untied --to new --rank=2 --dry-run",
        "factor forced": "factor untied --to new --rank=8 --force",
        "factor too wide": "factor untied --to new --rank=9",
        "factor no rank": "factor untied --to new",
        "factor zero": "factor untied --to new --rank=0",
        "factor undo": "factor model-factored --undo --to new",
        "factor undo plain": "factor tied --undo --to new -q",
        "factor undo dry": "factor model-factored --undo --to new --dry-run",
        "factor undo with rank": "factor model-factored --undo --rank 3 --to new",
        "factor undo forced": "factor model-factored --undo --to new --force",
        "vocab resize": "vocab resize sharded --to new --multiple-of=16",
        "vocab resize dry": "vocab resize tied --to new --vocab=40 --dry-run -q",
        "vocab resize zero": "vocab resize untied --to new --vocab=32 --rows=zero",
        "vocab resize drawn": "vocab resize untied --to new --vocab=32 --rows=drawn --seed=5",
        "vocab resize rows unknown": "vocab resize untied --to new --vocab=32 --rows=ones",
        "vocab resize shrink": "vocab resize untied --to new --vocab=20 --shrink",
        "vocab resize smaller": "vocab resize untied --to new --vocab=20",
        "vocab resize to tokenizer": "vocab resize with-tokenizer --to new --tokenizer wider-tokenizer",
        "vocab resize forced": "vocab resize half --to new --vocab=20 --shrink --force",
        "vocab resize nothing": "vocab resize untied --to new",
        "vocab resize per layer": "vocab resize b017 --to new --vocab 72",
        "vocab trim": "vocab trim trimmable --to new --text cat.txt",
        "vocab trim size": "vocab trim trimmable --to new --text cat.txt --size 262 --keep keep.txt",
        "vocab trim keep": "vocab trim trimmable --to new --keep keep.txt -q",
        "vocab trim dry": "vocab trim trimmable --to new --text cat.txt --dry-run",
        "vocab trim forced": "vocab trim trimmable --to new --text cat.txt --force",
        "vocab trim nothing": "vocab trim trimmable --to new",
        "vocab trim no tokenizer": "vocab trim tied --to new --text cat.txt",
        "vocab transplant": TRANSPLANT,
        "vocab transplant donor": f"{TRANSPLANT} --donor other-words --atoms 3",
        "vocab transplant dry": f"{TRANSPLANT} --dry-run -q",
        "vocab transplant forced": f"{TRANSPLANT} --force",
        "vocab transplant text dry": f"{TRANSPLANT} --text cat.txt --dry-run",
        "vocab transplant none": "vocab transplant trimmable --to new --tokenizer tied",
        "adapter slim": "adapter slim b063 --base untied --to new",
        "adapter slim dry": "adapter slim b063 --base untied --to new --dry-run -q",
        "adapter slim forced": "adapter slim b063 --base untied --to new --force",
        "adapter slim none": "adapter slim b060 --base tied --to new",
        "adapter slim tied": "adapter slim b063 --base tied --to new",
        "adapter slim no base": "adapter slim b063 --to new",
        "adapter merge": "adapter merge b063 --base untied --to new",
        "adapter merge parted": "adapter merge b060 --base tied --to new",
        "adapter merge forced": "adapter merge b060 --base tied --to new --force",
        "adapter merge dry": "adapter merge b063 --base tied --to new --dry-run -q",
        "adapter merge misfit": "adapter merge b061 --base tied --to new",
    }
)
LINKED = {
    f"{verb} links": f"{verb} b001-link --to new --follow-links {more}".strip()
    for verb, more in {
        "tie": "--keep input",
        "untie": "",
        "repair": "",
        "factor --undo": "",
        "factor": "--rank 2",
        "vocab resize": "--vocab 32 --rows zero",
        "vocab trim": "--text cat.txt",
        "vocab transplant": "--tokenizer other-words",
    }.items()
}
LINKED |= {
    f"{verb} links": f"{verb} b063 --base b001-link --to new --follow-links"
    for verb in ("adapter slim", "adapter merge")
}
CASES |= cases(LINKED, needs=("outside.safetensors",))
LOADED = {
    "tie": "tie model-untied --to new --keep input",
    "untie": "untie model-tied --to new",
    "repair": "repair flag-lies --to new",
    "factor": "factor model-tied --to new --rank=4",
    "factor undo": "factor model-factored --undo --to new",
    "vocab resize": "vocab resize model-tied --to new --vocab=128 --rows=zero",
    "vocab trim": "vocab trim model-bytes --to new --text=cat.txt",
    "vocab transplant": "vocab transplant model-bytes --to new --tokenizer=other-words",
    "adapter slim": "adapter slim b063 --base untied --to new",
    "adapter merge": "adapter merge b063 --base tied --to new",
}
CASES |= cases({f"{verb} not loaded": f"{line} --no-verify-load" for verb, line in LOADED.items()})
CASES |= cases(
    {f"{verb} loaded": LOADED[verb] for verb in ("untie", "factor undo")},
    slow=True,
    environment={"TIEWISE_NO_VERIFY_LOAD": ""},
)
CASES |= cases(
    {"vocab transplant text": "vocab transplant model-bytes --to new --tokenizer other-words --text words.txt"},
    tolerance="trained",
)


def cases_of_verb(verb, example):
    """Return cases for a verb without cases above: its example with every option that all verbs share."""
    source, *options = example.split()
    # the examples' name of a checkpoint → that of the inputs here
    source = {"wrong": "flag-lies", "factored": "model-factored"}.get(source, source)
    line = " ".join([verb, source, *options, "--to new"])
    return {
        verb: line,
        f"{verb} absent": " ".join([verb, "nowhere", *options, "--to new"]),
        f"{verb} dry": f"{line} --dry-run -q",
        f"{verb} forced": f"{line} --force",
        f"{verb} links": f"{line} --follow-links",
        f"{verb} not loaded": f"{line} --no-verify-load",
    }


TRIED = {case.command for case in CASES.values()}
for verb, example in package.examples().items():
    if verb not in TRIED:
        CASES |= cases(cases_of_verb(verb, example))

# tables: inspect without a text, diff, explore

CASES |= cases(
    {
        "inspect tables": "inspect untied --samples=20",
        "inspect tables full": "inspect untied --samples=20 --full --seed=3",
        "inspect pair tables": "inspect untied equal --only=alignment,which_end,direct_path --samples=20",
        "inspect held out": "inspect model-untied --only=alignment --samples=40 --held-out=0",
        **{
            f"inspect tables {name}": f"inspect model-factored --only={name} --samples=40"
            for name in ("alignment", "direct_path")
        },
        "inspect two tables needed": "inspect untied --only=which_end",
        "inspect text needed": "inspect untied --only=precision",
        "inspect unknown section": "inspect untied --only=alignmnt",
        "inspect absent": "inspect nowhere",
        "inspect broken": "inspect broken",
        "inspect no model": "inspect",
        "inspect odd effort": "inspect untied --samples=0",
        "inspect other page": "inspect untied --samples=20 --out other-page",
        "inspect pairs odd": "inspect untied --tokens 'new'",
        "inspect rated pairs": "inspect model-untied model-tied --word-pairs rated-pairs.tsv --only=word_pairs",
        "inspect rated pairs odd": "inspect model-tied --word-pairs text.txt",
        "diff": "diff tied tuned",
        "diff top": "diff untied equal --top=3 -q",
        "diff full": "diff tied tuned --full",
        "diff models": "diff model-untied model-tied --top=0",
        "diff same": "diff tied tied",
        "diff absent": "diff tied nowhere",
        "diff odd": "diff tied tuned --top=-1",
        "explore": "explore --out page.html --no-open",
        "explore model": "explore model-tied --tokens 'new,york,#7' -o page.html --no-open -q",
        "explore two models": "explore model-tied model-untied -o page.html --no-open",
        "explore text": "explore model-tied --text words.txt -o page.html --no-open",
        "explore exists": ["explore -o page.html --no-open", "explore -o page.html --no-open"],
        "explore again": ["explore -o page.html --no-open", "explore tied -o page.html --overwrite --no-open"],
        "explore temporary": "explore",
        "explore absent": "explore nowhere -o page.html --no-open",
        "explore unknown token": "explore model-tied --tokens nobody -o page.html --no-open",
    }
)
# the JSON has the size of the page, which depends on the durations of runs
CASES |= cases({"explore run": "explore run-decoder -o page.html --no-open"}, json=False, tolerance="trained")

# texts

DATA = "data show -t text.txt --tokenizer=bytes"
CASES |= cases(
    {
        "data show": f"{DATA} --length=32 -n 2",
        "data show nsp": f"{DATA} --length=48 --count=4 --objective=nsp --ratio=0.3 --seed=2 --masking=0.3 --ngram=1",
        "data show none": f"{DATA} --length=32 --objective=none --split=heldout -q",
        "data show tokens": "data show -t text.txt --tokenizer=bpe:300 --length=24 -n 1",
        "data show odd": f"{DATA} -n 0",
        "data show objective": f"{DATA} --objective=mlm",
        "data show absent": "data show -t nowhere.txt",
        "vocab hot": "vocab hot -t words.txt --tokenizer model-tied --size 40",
        "vocab hot file": "vocab hot -t words.txt --tokenizer model-tied --size 40 --to hot.json -q",
        "vocab hot tensors": "vocab hot -t words.txt --tokenizer model-tied --size 40 --to hot.safetensors",
        "vocab hot pickle": "vocab hot -t words.txt --tokenizer model-tied --size 40 --to hot.pt",
        "vocab hot rows": "vocab hot -t words.txt --tokenizer model-tied --size 30 --vocab 128",
        "vocab hot ending": "vocab hot -t words.txt --tokenizer model-tied --size 40 --to hot.csv",
        "vocab hot too many": "vocab hot -t words.txt --tokenizer model-tied --size 4000",
        "vocab hot no tokenizer": "vocab hot -t words.txt",
    }
)

# refusals of runs, which end before training

CASES |= cases(
    {
        "compare unknown arm": f"compare {DECODER} --arms=tid",
        "compare unknown setting": f"compare {DECODER} --set=widht=3",
        "compare odd set": f"compare {DECODER} --set=width",
        "compare odd width": f"compare {DECODER} --set=width=-4",
        "compare kind": f"compare {DECODER} --set=kind=rnn",
        "compare recipe": "compare corpus --recipe pytorch-20",
        "compare no corpus": "compare --recipe pytorch-200",
        "compare corpus without recipe": "compare corpus",
        "compare two texts": f"compare corpus --recipe albert-small {DECODER}",
        "compare absent text": "compare -t nowhere.txt --steps=4",
        "compare empty text": "compare -t empty.txt --steps=4",
        "compare split": f"compare {DECODER} --split=middle",
        "compare tokenizer": f"compare -t text.txt {RUN} --arms=tied,untied --tokenizer=letters",
        "compare model": f"compare {DECODER} --model=gpt9",
        "compare match": f"compare {DECODER} --match=depth",
        "compare backend": f"compare {DECODER} --backend=mxnet",
        "compare share": f"compare {DECODER} --share=all",
        "compare resume nothing": "compare --out nowhere --resume",
        "compare resume settings": f"compare {DECODER} --out run-decoder --resume",
        "compare exists": f"compare {DECODER} --out run-decoder",
        "compare steps and minutes": f"compare {DECODER} --minutes=1",
        "compare minutes": f"compare -t text.txt {RUN} --tokenizer=bytes --minutes=0.0001 -q",
        "compare element": f"compare {DECODER} --element=1",
        "compare launcher": f"compare {DECODER} --launcher=moon",
        "compare jobs": f"compare {DECODER} --jobs=none",
        "compare seeds": f"compare {DECODER} --seeds=0",
        "compare config": "compare --config nowhere.yaml",
        "compare fsdp": f"compare {DECODER} --fsdp=2",
        "compare tp": f"compare {DECODER} --tp=2",
        "compare tracker": f"compare {DECODER} --report-to=tensorbord",
        "compare upload": f"compare {DECODER} --push-to-hub=me/my/model",
        "compare tables": f"compare {DECODER} --tables=moved",
        "compare kept step": f"compare {DECODER} --select=first",
        "compare negative margin": f"compare {DECODER} --margin=-1",
        "train seed": f"train {DECODER} --seed=-1",
        "train fsdp": f"train {DECODER} --fsdp=2",
        "train tp": f"train {DECODER} --tp=2",
        "train tables": f"train {DECODER} --tables=moved",
        "train kept step": f"train {DECODER} --select=bets",
        "train share": f"train {DECODER} --share=all",
        "train tracker": f"train {DECODER} --report-to=trackio,tensorbord",
        "train upload": f"train {DECODER} --push-to-hub=me/my/model",
        "train spec": f"train {DECODER} -b residual",
        "heal nothing": "heal",
        "heal kept step": "heal narrow --teacher model-tied -t text.txt --select=end",
        "heal what": "heal narrow --what=body -t text.txt",
        "heal tracker": "heal narrow --teacher model-tied -t text.txt --report-to=trakio",
        "heal upload": "heal narrow --teacher model-tied -t text.txt --push-to-hub=me/my/model",
        "heal absent": "heal nowhere --teacher model-tied -t text.txt",
        "sweep nothing": "sweep",
        "sweep unknown": "sweep quik",
        "sweep resume": "sweep --out nowhere --resume",
        "sweep resume quick": "sweep --quick --resume",
        "sweep resume overwrite": "sweep grid.yaml --resume --overwrite",
        "sweep tracker": "sweep grid.yaml --report-to=trakio",
        "sweep negative margin": "sweep grid.yaml --margin=-1",
        "sweep launcher": "sweep grid.yaml --launcher=moon",
        "sweep claim": "sweep --claim untie-lat",
        "sweep claims quick": "sweep --claims --quick",
        "sweep both claims": "sweep --claims --claim retie",
    },
)

# sections that run a model

OF_RUNS = "gradients_over_training"  # the section that reads a comparison
SECTIONS = [name for name in package.sections() if name != OF_RUNS]
CASES |= cases(
    {
        **{f"inspect {name}": f"inspect model-untied model-tied --only {name} {EFFORT}" for name in SECTIONS},
        "inspect again": [
            "inspect untied --samples=20 --out page",
            "inspect untied --samples=20 --out page",
            "inspect equal --samples=20 --out page --overwrite",
        ],
        f"inspect {OF_RUNS}": f"inspect run-decoder --only={OF_RUNS}",
        "inspect albert": f"inspect run-albert/*/seed-1/final --only=refinement,applications {EFFORT}",
    },
    tolerance="trained",
)

# runs

ONE_JOB = "--jobs=1"
HEAL = "heal narrow --teacher run-teacher/untied/seed-1/final -t text.txt --set=batch=4 --set=length=16"
HEAL += " --set=measured=512 -q"
CASES |= cases(
    {
        "compare decoder": f"compare {DECODER} --arms=tied,untied,factored:4 --seeds=2 {ONE_JOB} -o out",
        "compare loud": f"compare -t text.txt {RUN} --steps=4 --tokenizer=bytes --arms=tied,untied --seeds=2 "
        f"{ONE_JOB} -o out",
        "compare config": f"compare --config settings.yaml -b tied,untied --seeds=2 {ONE_JOB} -q -o out",
        "compare element of a run": [
            f"compare {DECODER} --arms=tied,untied --seeds=1 --element=0 -o out",
            "compare --out out --resume --element 1 -q",
        ],
        "compare resume": "compare --out run-decoder --resume -q",
        "train decoder": f"train {DECODER} --boundary=tied+untie_at=4 -o out",
        "train loud": f"train -t text.txt {RUN} --steps=4 --tokenizer=bytes --seed=3 --split=contiguous -o out",
        "train config": "train --config settings.yaml --model gpt2 -q -o out",
        "train tracked": f"train {DECODER} --report-to=tensorboard -o out",
        "train uploaded offline": f"train {DECODER} --push-to-hub=me/model -o out",
        "train resume": ["train --config settings.yaml -q -o out", "train --out out --resume -q"],
        "train overwrite": [
            "train --config settings.yaml -q -o out",
            "train --config settings.yaml -q -o out --overwrite",
        ],
        "train albert": f"train {ALBERT} --share=ffn -o out",
        "heal tables": f"{HEAL} --steps=4 --out out",
        "heal tracked": f"{HEAL} --steps=2 --report-to=tensorboard -o out",
        "heal all": f"{HEAL} --steps=4 --what=all --seed=2 --split=contiguous -o out",
        "heal resume": [
            f"{HEAL} --steps=2 -o out",
            "heal --out out --resume -q",
            f"{HEAL} --steps=2 -o out --overwrite",
        ],
    },
    tolerance="trained",
    needs=("text.txt", "run-teacher"),
)
SPEC_ARMS = {
    "bias": "tied+bias",
    "scales": "tied+input_scale=sqrt_d+output_scale=1/sqrt_d",
    "softcap": "untied+softcap=30",
    "free": "tied+free=8",
    "alpha": "tied+alpha=0.5",
    "pad": "tied+pad=0",
    "init": "tied+init=0.05",
    "tie at": "untied+tie_at=4",
    "projected": "projected:12,penalty=0.1",
    "residual": "residual:2,s=0.1",
    "spd": "spd",
    "factored untied": "factored-untied:in=4,out=8",
}
CASES |= cases(
    {f"train {name}": f"train {DECODER} -b {spec} -o out" for name, spec in SPEC_ARMS.items()}, tolerance="trained"
)
TINY = "--set=width=8 --set=batch=4 --set=length=8 --set=epochs=2 -q -o out"
RECIPES = words("pytorch-650 press-wolf-small press-wolf-large inan-200 inan-650")
DROPPED = " ".join(f"--set=dropout_{where}=0.1" for where in ("embedding", "input", "between", "output", "recurrent"))
CASES |= cases(
    {
        **{f"train recipe {name}": f"train small-corpus --recipe {name} {TINY}" for name in RECIPES},
        "train recipe awd": f"train small-corpus --recipe awd --set=inner=12 --set=average_patience=1 {TINY}",
        "train recipe albert-base": f"train {ALBERT.replace('small', 'base')} --set=embedding=8 --set=warmup=0.5 "
        "--set=short=0.5 -o out",
        "train recurrent starts": f"train small-corpus --recipe pytorch-200 -b factored:6 {DROPPED} --set=start=0.2 "
        f"--set=start_body=0.3 --set=bias=one --set=output_bias=false --set=parallel=2 --set=vary_length=true "
        f"--set=embedding=6 {TINY}",
        "train recurrent files": "train small-corpus --recipe pytorch-200 --set=files=[train.txt,test.txt,valid.txt] "
        f"--set=decay=0.5 --set=decay_after=1 --set=augment=0.5 --set=temperature=5 {TINY}",
        "train weight decay": f"train {DECODER} --set=weight_decay=0.5 --set=train_tokens=2000 -o out",
        "train table rate": f"train {DECODER} --set=table_rate=0.1 -o out",
        "train bf16": f"train {DECODER} --set=bf16=true --set=activation_checkpointing=true -o out",
    },
    tolerance="trained",
)
CASES |= cases(
    {
        "inspect pairs": f"inspect model-tied --tokens 'new, york; san, diego' {EFFORT} --out page",
        "inspect comparison": f"inspect run-decoder {EFFORT}",
        "compare options": f"compare {DECODER} --split=contiguous --model=gpt2 --arms=tied,untied --no-tune "
        f"--seeds=2 --set=accumulate=2 --set=learning_rate=0.01 {ONE_JOB} -o out",
        "compare two jobs": f"compare {DECODER} --arms=tied,untied --seeds=2 --jobs=2 -o out",
        "compare overwrite": f"compare {DECODER} --arms=tied,untied --seeds=2 {ONE_JOB} --out run-decoder --overwrite",
        "compare matched": f"compare {DECODER} --arms=tied,untied --seeds=2 --match=parameters --tune {ONE_JOB} -o out",
        "compare recurrent": f"compare {RECURRENT} --arms=tied,untied --seeds=2 {ONE_JOB} -o out",
        "train recurrent": f"train {RECURRENT} -o out",
        "train recurrent vectors": f"train {RECURRENT} -b projected:4+vectors=vectors.txt+freeze -o out",
        "train recurrent options": f"train {RECURRENT} --set=anneal=plateau --set=decay=0.5 --set=augment=0.5 "
        "--set=clip=1 --set=weight_drop=0.2 --set=variational=true --set=activation=1 --set=slowness=1 "
        "--set=keep=best -o out",
        "compare albert": f"compare {ALBERT} --arms=factored:4,tied --share=none,all --seeds=2 {ONE_JOB} -o out",
        "train albert options": f"train {ALBERT} --set=objective=nsp --set=norm=after --set=act=relu --set=dropout=0.1 "
        "--set=optimizer=adamw --set=whole_words=false --set=longest=1 --set=masking=0.3 --set=in_order=0.3 -o out",
        "compare seq2seq": f"compare {SEQ2SEQ} --arms=tied,untied+encoder=apart,factored:4 --seeds=2 {ONE_JOB} -o out",
        "train seq2seq": f"train {SEQ2SEQ} --set=noise=0.3 --set=span=2 -o out",
        "compare flax": f"compare {DECODER} --backend=flax --arms=tied,untied --seeds=2 {ONE_JOB} -o out",
        "sweep": ["sweep grid.yaml --out out --jobs=1 --quiet", "sweep --out out --resume -q"],
        "sweep quick": "sweep grid.yaml --quick -o out --jobs=2 -q",
        "sweep overwrite": "sweep grid.yaml --out run-sweep --overwrite --jobs=1 -q",
    },
    tolerance="trained",
    slow=True,
    needs=("text.txt",),
)

# a kind of run that no case above names trains like a decoder; one that needs other settings gets a row above

BY_OTHER_NAMES = {"decoder", "albert", "recurrent", "flax", "heal"}  # the default, recipes, a backend and a command
NAMED = " ".join(f"{line} " for case in CASES.values() for line in case.lines)
OTHER_KINDS = [kind for kind in package.kinds() if kind not in BY_OTHER_NAMES and f"--set=kind={kind} " not in NAMED]
CASES |= cases(
    {f"train kind {kind}": f"train {DECODER} --set=kind={kind} -o out" for kind in OTHER_KINDS},
    tolerance="trained",
    needs=("text.txt",),
)

# public names of Python

for function, tolerance in python_names.TOLERANCES.items():
    name = f"python {function}"
    CASES[name] = Case(name, function=function, tolerance=tolerance, slow=function in python_names.SLOW)
