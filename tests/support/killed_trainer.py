"""A training by a small Trainer that is killed from outside: killed_trainer.py FOLDER plain|resumed."""

import json
import sys
from pathlib import Path

import tiny_trainer as tiny

from resumable.integrations.transformers import resume

folder = Path(sys.argv[1])
trainer = tiny.make(
    folder,
    num_train_epochs=10,
    dataloader_num_workers=2,
    eval_dataset=tiny.Noisy(6),
    eval_strategy="steps",
    eval_steps=4,
    metric_for_best_model="loss",
)
if sys.argv[2] == "resumed":
    resume(trainer, folder / "run", every=2)
trainer.train()
(folder / "result.json").write_text(json.dumps(tiny.result(trainer)))
