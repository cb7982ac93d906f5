"""What several tests of loaders ask for."""

import pytest
import saved_models as saved
import torch
from safetensors.numpy import load_file


@pytest.fixture(scope="session")
def untied(tmp_path_factory):
    """Folders of untied tiny models, saved once, with the names of their parts by value: input, output, bias."""
    made = {}

    def make(name):
        if name not in made:
            folder = tmp_path_factory.mktemp(name)
            model = saved.tiny(name, False)
            tables, head = saved.ends(model)
            head.weight = torch.nn.Parameter(torch.randn_like(head.weight))  # T5 ties whatever the flag says
            model.save_pretrained(folder)
            inputs = sorted({n for t in tables for n in saved.stored_as(folder, t.weight)})
            output = saved.stored_as(folder, head.weight)
            stored = load_file(folder / "model.safetensors")
            vocabulary = stored[output[0]].shape[0]
            biases = [n for n in stored if n.endswith("bias") and stored[n].shape[-1] == vocabulary]
            made[name] = folder, {"input": sorted({*inputs} - {*output}), "output": output, "bias": biases}
        return made[name]

    return make
