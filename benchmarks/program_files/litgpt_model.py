"""LitGPT's form of the model in a folder of ``tiny_model.py``: random weights, the same sizes and tokenizer.

python benchmarks/program_files/litgpt_model.py FOLDER
"""

import json
import shutil
import sys
from dataclasses import asdict
from pathlib import Path

import torch
import yaml
from litgpt.config import Config
from litgpt.model import GPT

folder = Path(sys.argv[1])
made = folder / "litgpt"
made.mkdir()
of = json.loads((folder / "model" / "config.json").read_text())
config = Config.from_name(
    "tiny-llama-1.1b", n_layer=of["num_hidden_layers"], n_embd=of["hidden_size"], n_head=of["num_attention_heads"],
    n_query_groups=of["num_key_value_heads"], head_size=of["hidden_size"] // of["num_attention_heads"],
    intermediate_size=of["intermediate_size"], vocab_size=of["vocab_size"], padded_vocab_size=of["vocab_size"],
    block_size=of["max_position_embeddings"],
)  # fmt: skip
torch.manual_seed(0)
torch.save(GPT(config).state_dict(), made / "lit_model.pth")
(made / "model_config.yaml").write_text(yaml.safe_dump(asdict(config)))
(made / "generation_config.json").write_text(json.dumps({"bos_token_id": 1, "eos_token_id": 2}))
for name in ("tokenizer.json", "tokenizer_config.json"):
    shutil.copy(folder / "model" / name, made / name)
