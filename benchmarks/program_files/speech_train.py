"""transformers' Seq2SeqTrainer: a random Whisper with LayerDrop, whose steps have other layers each time."""

import torch
from script_arguments import args, timed
from transformers import (
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    WhisperConfig,
    WhisperForConditionalGeneration,
    set_seed,
)  # fmt: skip

set_seed(0)
config = WhisperConfig(
    vocab_size=200, d_model=48, encoder_layers=3, decoder_layers=3, encoder_attention_heads=4,
    decoder_attention_heads=4, encoder_ffn_dim=192, decoder_ffn_dim=192, max_source_positions=100,
    max_target_positions=64, pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1,
    encoder_layerdrop=0.1, decoder_layerdrop=0.1, dropout=0.1, num_mel_bins=16, suppress_tokens=None,
    begin_suppress_tokens=None,
)  # fmt: skip
model = WhisperForConditionalGeneration(config)
rows = [{"input_features": torch.randn(16, 200), "labels": torch.randint(3, 200, (40,))} for _ in range(64)]
trainer = Seq2SeqTrainer(
    model=model, train_dataset=rows,
    args=Seq2SeqTrainingArguments(
        output_dir=str(args.output), max_steps=args.steps, per_device_train_batch_size=8, learning_rate=1e-3,
        logging_steps=1, seed=0, report_to="none", save_strategy="no", use_cpu=True,
        gradient_checkpointing=args.checkpointing,
    ),
)  # fmt: skip
with timed():
    trainer.train()
model.save_pretrained(args.output)
