"""Decoders that transformers does not have; importing this package teaches its auto classes to build and load them.

    import tiewise.models
    model = AutoModelForCausalLM.from_config(tiewise.models.RNNConfig(cell="lstm", hidden_size=200))
    installed = tiewise.install(model, "tied")

Explicit, as `import tiewise.hf` is: importing `tiewise` alone registers nothing.
"""

from transformers import AutoConfig, AutoModelForCausalLM

from tiewise.models.recurrent import State, detached
from tiewise.models.rnn import RNNLM, RNNOutput
from tiewise.models.rnn_config import RNNConfig

AutoConfig.register(RNNConfig.model_type, RNNConfig, exist_ok=True)
AutoModelForCausalLM.register(RNNConfig, RNNLM, exist_ok=True)

__all__ = ["RNNLM", "RNNConfig", "RNNOutput", "State", "detached"]
