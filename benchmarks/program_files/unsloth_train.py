"""Unsloth as its notebooks write it: python unsloth_train.py --output ... [--checkpointing] [--full]"""

import argparse

from unsloth import FastLanguageModel  # isort: skip
from datasets import load_dataset
from trl import SFTConfig, SFTTrainer

parser = argparse.ArgumentParser()
parser.add_argument("--output", required=True)
parser.add_argument("--steps", type=int, default=240)
parser.add_argument("--checkpointing", action="store_true")
parser.add_argument("--full", action="store_true")
args = parser.parse_args()

model, tokenizer = FastLanguageModel.from_pretrained(
    "model", max_seq_length=128, load_in_4bit=False, full_finetuning=args.full
)
if not args.full:
    model = FastLanguageModel.get_peft_model(
        model, r=8, lora_alpha=16, lora_dropout=0, bias="none", random_state=0,
        use_gradient_checkpointing="unsloth" if args.checkpointing else False,
        target_modules=["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
    )  # fmt: skip
chats = load_dataset("json", data_files="data/chats.json", split="train")
dataset = chats.map(lambda row: {"text": row["instruction"] + " " + row["output"]}, remove_columns=chats.column_names)
trainer = SFTTrainer(
    model=model, processing_class=tokenizer, train_dataset=dataset,
    args=SFTConfig(
        output_dir=args.output, dataset_text_field="text", max_length=128, per_device_train_batch_size=8,
        max_steps=args.steps, learning_rate=1e-3, logging_steps=1, optim="adamw_torch", seed=0, report_to="none",
        save_strategy="no", gradient_checkpointing=args.checkpointing,
    ),
)  # fmt: skip
trainer.train()
model.save_pretrained(args.output)
