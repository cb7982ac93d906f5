"""What sentence order teaches an ALBERT beside next sentences, and what it costs: `python -m benchmarks.objectives RUNS`.

RUNS holds three comparisons of one arm, one for each objective, on sentences that say their place (docs/albert.md, "A
control"). Same text, sizes, steps and seeds, so what an objective costs is masked tokens:

    for objective in sop nsp none; do
        tiewise compare --recipe albert-small --text numbered.jsonl --tokenizer bpe:400 --arms factored:32 --seeds 3 \\
            --steps 1500 --set width=64 --set layers=3 --set heads=2 --set length=32 --set learning_rate=0.002 \\
            --set warmup=0.1 --set measured=65536 --set objective=$objective --out RUNS/$objective
    done
"""
