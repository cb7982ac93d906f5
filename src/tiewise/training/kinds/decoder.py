"""Decoders by PyTorch: what is trained where nothing else is asked for."""

from __future__ import annotations

import numpy as np

from tiewise.boundary.install import Installed
from tiewise.data.corpus import PreparedText
from tiewise.data.training_rows import Blocks
from tiewise.training import ranks
from tiewise.training.callbacks import Clock
from tiewise.training.kind import Kind
from tiewise.training.settings import Job
from tiewise.training.trainer import TiewiseTrainer, arguments, callbacks


class Decoders(Kind):
    """Trained on blocks in an order that is the seed's, AdamW with warm-up and a cosine."""

    def trainer(
        self, job: Job, installed: Installed, text: PreparedText, counts: np.ndarray, clock: Clock
    ) -> TiewiseTrainer:
        """Make the Trainer; a trial has no curve."""
        s = job.settings
        trainer = TiewiseTrainer(
            installed,
            evaluator=None
            if job.trial
            else lambda: self.measure(job, trainer.installed, text, counts, job.split, point=True).nll,
            args=arguments(
                job,
                per_device_train_batch_size=ranks.share(s.batch),
                adam_beta2=0.98,
                optim="adamw_torch_fused",
                lr_scheduler_type="cosine",
                warmup_steps=max(1, s.steps // 10),
                max_grad_norm=1.0,
            ),
            train_dataset=Blocks(text.split("train"), s.length),
            callbacks=callbacks(job, clock),
        )
        return trainer


KIND = Decoders()
