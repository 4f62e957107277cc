"""sentence-transformers' Trainer on pairs, by MultipleNegativesRankingLoss."""

import json

from datasets import Dataset
from script_arguments import args, timed
from sentence_transformers import (
    SentenceTransformer,
    SentenceTransformerTrainer,
    SentenceTransformerTrainingArguments,
    losses,
    models,
)  # fmt: skip
from transformers import set_seed

set_seed(0)
words = models.Transformer("model", max_seq_length=96)
model = SentenceTransformer(modules=[words, models.Pooling(words.get_word_embedding_dimension())])
with open("data/chats.json") as file:
    pairs = [{"anchor": row["instruction"], "positive": row["output"]} for row in json.load(file)]
trainer = SentenceTransformerTrainer(
    model=model, train_dataset=Dataset.from_list(pairs), loss=losses.MultipleNegativesRankingLoss(model),
    args=SentenceTransformerTrainingArguments(
        output_dir=str(args.output), max_steps=args.steps, per_device_train_batch_size=16, learning_rate=1e-3,
        warmup_steps=10, logging_steps=1, seed=0, report_to="none", save_strategy="no", use_cpu=True,
        gradient_checkpointing=args.checkpointing,
    ),
)  # fmt: skip
with timed():
    trainer.train()
model.save_pretrained(str(args.output))
