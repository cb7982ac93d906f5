"""Install another boundary into a model, train it, and measure both gradient paths.

python examples/kit.py here && cd here && python ../examples/tie_and_train.py
"""

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import tiewise

model, tokenizer = AutoModelForCausalLM.from_pretrained("untied"), AutoTokenizer.from_pretrained("untied")
text = Path("text.txt").read_text(encoding="utf-8")[:400_000]
ids = tokenizer(text, return_tensors="pt").input_ids[0]
windows = ids[: len(ids) // 128 * 128].view(-1, 128)

installed = tiewise.install(model, "factored:32")  # or "tied", "residual:16", …: docs/boundary.md
tables, head, hidden, vectors = tiewise.param_groups(model)
optimizer = torch.optim.AdamW([tables, head, hidden, vectors | {"weight_decay": 0.0}], lr=2e-3)
draw = torch.Generator().manual_seed(0)
for step in range(40):
    batch = windows[torch.randint(len(windows), (8,), generator=draw)]
    installed.track()
    loss = model(input_ids=batch, labels=batch).loss
    loss.backward()
    norms = installed.path_norms()
    optimizer.step()
    optimizer.zero_grad()
    if step % 10 == 0:
        print(
            f"step {step}: loss {loss:.3f}; gradient through the lookup {norms.a:.3f}, through the head {norms.b:.3f}"
        )
model.save_pretrained("trained")  # tiewise.load reads it; `tiewise factor --undo` makes plain tables
