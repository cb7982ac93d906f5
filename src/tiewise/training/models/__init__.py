"""Models that transformers lacks; importing this package registers them with its auto classes.

    import tiewise.models
    model = AutoModelForCausalLM.from_config(tiewise.models.RNNConfig(cell="lstm", hidden_size=200))
    installed = tiewise.install(model, "tied")

The import is explicit, like `import tiewise.hf`: importing `tiewise` alone registers nothing.

- `rnn`: the recurrent language model, its layers and its dropout.
- `open_albert`: ALBERT with every choice open, and conversion of weights from and to transformers.
"""

from typing import Any

import transformers

from tiewise.training.models.open_albert import OpenAlbertConfig as OpenAlbertConfig
from tiewise.training.models.open_albert import OpenAlbertForPreTraining as OpenAlbertForPreTraining
from tiewise.training.models.open_albert import (
    OpenAlbertForSequenceClassification as OpenAlbertForSequenceClassification,
)
from tiewise.training.models.open_albert import OpenAlbertModel as OpenAlbertModel
from tiewise.training.models.open_albert import OpenAlbertOutput as OpenAlbertOutput
from tiewise.training.models.open_albert import from_hugging_face as from_hugging_face
from tiewise.training.models.open_albert import preset as preset
from tiewise.training.models.open_albert import to_hugging_face as to_hugging_face
from tiewise.training.models.rnn import RNNLM as RNNLM
from tiewise.training.models.rnn import RNNConfig as RNNConfig
from tiewise.training.models.rnn import RNNOutput as RNNOutput
from tiewise.training.models.rnn import State as State
from tiewise.training.models.rnn import detached as detached

_MODELS: dict[str, Any] = {
    "AutoModelForCausalLM": RNNLM,
    "AutoModel": OpenAlbertModel,
    "AutoModelForPreTraining": OpenAlbertForPreTraining,
    "AutoModelForMaskedLM": OpenAlbertForPreTraining,
    "AutoModelForSequenceClassification": OpenAlbertForSequenceClassification,
}
for _auto, _model in _MODELS.items():
    _config = _model.config_class
    transformers.AutoConfig.register(_config.model_type, _config, exist_ok=True)
    getattr(transformers, _auto).register(_config, _model, exist_ok=True)
