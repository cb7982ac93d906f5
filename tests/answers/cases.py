"""The command lines whose answers are recorded: every command, section of `inspect`, kind of run; wrong arguments."""

TEXT = ("-t", "text.txt")
RUN = tuple(f"--set={item}" for item in ("width=16", "layers=1", "heads=2", "length=16", "batch=4", "measured=512"))
DECODER = (*TEXT, *RUN, "--steps=8", "--tokenizer=bytes", "--quiet")
RECURRENT = (
    "--recipe",
    "pytorch-200",
    "corpus",
    *(f"--set={item}" for item in ("width=8", "batch=2", "length=4", "epochs=1")),
)
ALBERT = (
    "--recipe",
    "albert-small",
    *TEXT,
    "--steps=4",
    "--tokenizer=bytes",
    *(
        f"--set={item}"
        for item in ("width=16", "layers=2", "heads=2", "inner=32", "length=32", "batch=4", "measured=512")
    ),
)
SECTIONS = (
    "direct_path",
    "first_mlp",
    "bigrams",
    "alignment",
    "which_end",
    "gradients",
    "tokens",
    "lens",
    "refinement",
    "applications",
    "gradients_over_training",
)
EFFORT = (*TEXT, "--windows=8", "--length=16", "--samples=80", "--lens-steps=20", "--quiet")
FOLDERS = (
    "tied",
    "untied",
    "equal",
    "flag-lies",
    "flag-missing",
    "no-head",
    "one-row-off",
    "short-vocab",
    "nan",
    "sharded",
    "half",
    "wrapped",
    "only-head",
    "quantised",
    "adapter",
    "broken",
    "model.gguf",
    "model-gpt2",
    "model-bert",
    "model-t5",
    "model-bart",
    "model-factored",
)
SPECS = "tied,untied,factored:128,factored-untied:in=64,out=128,projected:300,residual:32,spd,tied+bias"
SHARES = "none,attention,ffn,all,all:groups=2"

# name → arguments. Each is run with --json where the command has it, in one folder that holds the inputs.
EXACT = {
    "plan gpt2": ("plan", "--like", "gpt2"),
    "plan sizes": (
        "plan",
        "--vocab=32000",
        "--width=512",
        "--layers=8",
        "--heads=8",
        "--boundary",
        SPECS,
        "--world=8",
        "--tp=2",
    ),
    "plan shared": ("plan", "--like", "gpt2", "--share", SHARES, "--dtype=bfloat16", "--init=0.05"),
    "plan built": ("plan", "model-gpt2", "--build"),
    **{f"plan {name}": ("plan", name) for name in FOLDERS if name.startswith("model-")},
    "models chosen": ("models", "--tied", "--min-size=1", "--max-size=9", "--sort=ratio"),
    **{f"check {name}": ("check", name) for name in FOLDERS},
    **{f"check deep {name}": ("check", name, "--deep") for name in ("nan", "equal", "half")},
    "check headers": ("check", "sharded", "--headers"),
    "check beside": ("check", "model.gguf", "--beside", "untied"),
    "check base": ("check", "adapter", "--base", "tied"),
    "check explain": ("check", "--explain", "B012"),
    "check several": ("check", "tied", "flag-lies", "broken"),
    **{
        f"{verb} {name}": (verb, name, "--to", f"to-{verb}-{name}")
        for verb in ("untie", "dedupe", "repair")
        for name in FOLDERS[:10]
    },
    **{
        f"tie {keep}": ("tie", "flag-lies", "--to", f"to-tie-{keep}", "--keep", keep)
        for keep in ("input", "output", "mean")
    },
    "tie": ("tie", "untied", "--to", "to-tie"),
    "factor": ("factor", "untied", "--to", "to-factor", "--rank=4", "--counts=counts.json"),
    "factor tied": ("factor", "model-tied", "--to", "to-factored", "--rank=4", "--text=text.txt"),
    "densify": ("densify", "model-factored", "--to", "to-dense"),
    "resize": ("resize", "sharded", "--to", "to-resized", "--multiple-of=16"),
    "resize dry": ("resize", "tied", "--to", "to-nothing", "--vocab=40", "--dry-run"),
    "data show": ("data", "show", *TEXT, "--tokenizer=bytes", "--length=32", "-n", "2"),
    "inspect tables": ("inspect", "untied", "--samples=20"),
    "inspect pair tables": ("inspect", "untied", "equal", "--only=alignment,which_end,direct_path", "--samples=20"),
}

# Figures that training or a forward pass made: processors and versions move their last digits.
TRAINED = {
    **{f"inspect {name}": ("inspect", "model-untied", "model-tied", "--only", name, *EFFORT) for name in SECTIONS},
    "inspect pairs": ("inspect", "model-tied", "--tokens", "new, york; san, diego", *EFFORT, "--out", "page"),
    "compare": ("compare", *DECODER, "--arms=tied,untied,factored:4", "--seeds=2", "-o", "decoder"),
    "compare matched": (
        "compare",
        *DECODER,
        "--arms=tied,untied",
        "--seeds=2",
        "--match=parameters",
        "--tune",
        "-o",
        "matched",
    ),
    "train": ("train", *DECODER, "--boundary=tied+untie_at=4", "-o", "single"),
    "compare recurrent": ("compare", *RECURRENT, "--arms=tied,untied", "--seeds=2", "--quiet", "-o", "recurrent"),
    "train recurrent": ("train", *RECURRENT, "--quiet", "-o", "recurrent-single"),
    "compare albert": (
        "compare",
        *ALBERT,
        "--arms=factored:4,tied",
        "--share=none,all",
        "--seeds=2",
        "--quiet",
        "-o",
        "albert",
    ),
    "train albert": ("train", *ALBERT, "--quiet", "-o", "albert-single"),
    "compare flax": ("compare", *DECODER, "--backend=flax", "--arms=tied,untied", "--seeds=2", "-o", "flax"),
    "inspect comparison": ("inspect", "decoder", *EFFORT, "--out", "decoder-page"),
    "inspect albert": ("inspect", "albert-single/*/seed-1/final", "--only=refinement,applications", *EFFORT),
}

# Wrong arguments: the exit code, nothing on stdout, one line.
WRONG = """
plan
plan absent
plan --like absent
plan --vocab=10
models --sort=colour
check
check absent
check tied --fail-on=always
check --explain B999
tie absent --to to
tie flag-lies --to to
untie tied --to untied
factor untied --to to --rank=0
resize untied --to to --vocab=4
densify tied --to to
inspect absent
inspect untied --only=colour
inspect broken
inspect model-tied --tokens new
compare --arms=tied,colour
compare -t absent.txt
compare --set=colour=1
compare --resume -o absent
compare --recipe=colour
compare --share=all
train --boundary=tied,untied
train --recipe=pytorch-200
train -t text.txt --steps=0
data hide
data show -n 0
colour
"""
