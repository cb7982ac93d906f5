"""The command lines whose answers are recorded: every command, section of `inspect`, and kind of run."""

TEXT = "-t text.txt"
RUN = "--set=width=16 --set=layers=1 --set=heads=2 --set=length=16 --set=batch=4 --set=measured=512"
DECODER = f"{TEXT} {RUN} --steps=8 --tokenizer=bytes --quiet"
RECURRENT = "--recipe pytorch-200 corpus --set=width=8 --set=batch=2 --set=length=4 --set=epochs=1 --quiet"
ALBERT = f"--recipe albert-small {TEXT} --steps=4 --tokenizer=bytes --set=width=16 --set=layers=2 --set=heads=2"
ALBERT += " --set=inner=32 --set=length=32 --set=batch=4 --set=measured=512 --quiet"
SEQ2SEQ = f"{DECODER} --set=kind=seq2seq"
EFFORT = f"{TEXT} --windows=8 --length=16 --samples=80 --lens-steps=20 --quiet"
SECTIONS = """direct_path first_mlp bigrams alignment which_end gradients tokens lens refinement applications
gradients_over_training"""
MODELS = ("model-gpt2", "model-bert", "model-t5", "model-bart", "model-factored")
PLAIN = ["tied", "untied", "equal", "flag-lies", "flag-missing"]
PLAIN += ["no-head", "one-row-off", "short-vocab", "nan", "sharded"]
FOLDERS = (*PLAIN, "half", "wrapped", "only-head", "quantised", "adapter", "broken", "model.gguf", *MODELS)
SPECS = "tied,untied,factored:128,factored-untied:in=64,out=128,projected:300,residual:32,spd,tied+bias"
SHARES = "none,attention,ffn,all,all:groups=2"

# name → arguments. Each is run with --json where the command has it, in one folder that holds the inputs.
EXACT = {
    "plan gpt2": "plan --like gpt2",
    "plan sizes": f"plan --vocab=32000 --width=512 --layers=8 --heads=8 --boundary {SPECS} --world=8 --tp=2",
    "plan shared": f"plan --like gpt2 --share {SHARES} --dtype=bfloat16 --init=0.05",
    "plan built": "plan model-gpt2 --build",
    **{f"plan {name}": f"plan {name}" for name in MODELS},
    "models chosen": "models --tied --min-size=1 --max-size=9 --sort=ratio",
    **{f"check {name}": f"check {name}" for name in FOLDERS},
    **{f"check deep {name}": f"check {name} --deep" for name in ("nan", "equal", "half")},
    "check headers": "check sharded --headers",
    "check beside": "check model.gguf --beside untied",
    "check base": "check adapter --base tied",
    "check explain": "check --explain B012",
    "check several": "check tied flag-lies broken",
    **{f"{v} {name}": f"{v} {name} --to to-{v}-{name}" for v in ("untie", "dedupe", "repair") for name in PLAIN},
    **{f"tie {keep}": f"tie flag-lies --to to-tie-{keep} --keep {keep}" for keep in ("input", "output", "mean")},
    "tie": "tie untied --to to-tie",
    "factor": "factor untied --to to-factor --rank=4 --counts=counts.json",
    "factor tied": "factor model-tied --to to-factored --rank=4 --text=text.txt",
    "densify": "densify model-factored --to to-dense",
    "resize": "resize sharded --to to-resized --multiple-of=16",
    "resize dry": "resize tied --to to-nothing --vocab=40 --dry-run",
    "data show": f"data show {TEXT} --tokenizer=bytes --length=32 -n 2",
    "inspect tables": "inspect untied --samples=20",
    "inspect pair tables": "inspect untied equal --only=alignment,which_end,direct_path --samples=20",
}

# Figures that training or a forward pass made: processors and versions move their last digits.
TRAINED = {
    **{f"inspect {name}": f"inspect model-untied model-tied --only {name} {EFFORT}" for name in SECTIONS.split()},
    "inspect pairs": f"inspect model-tied --tokens 'new, york; san, diego' {EFFORT} --out page",
    "compare": f"compare {DECODER} --arms=tied,untied,factored:4 --seeds=2 -o decoder",
    "compare matched": f"compare {DECODER} --arms=tied,untied --seeds=2 --match=parameters --tune -o matched",
    "train": f"train {DECODER} --boundary=tied+untie_at=4 -o single",
    "compare recurrent": f"compare {RECURRENT} --arms=tied,untied --seeds=2 -o recurrent",
    "train recurrent": f"train {RECURRENT} -o recurrent-single",
    "compare albert": f"compare {ALBERT} --arms=factored:4,tied --share=none,all --seeds=2 -o albert",
    "train albert": f"train {ALBERT} -o albert-single",
    "compare seq2seq": f"compare {SEQ2SEQ} --arms=tied,untied+encoder=apart,factored:4 --seeds=2 -o seq2seq",
    "compare flax": f"compare {DECODER} --backend=flax --arms=tied,untied --seeds=2 -o flax",
    "inspect comparison": f"inspect decoder {EFFORT} --out decoder-page",
    "inspect albert": f"inspect albert-single/*/seed-1/final --only=refinement,applications {EFFORT}",
}
