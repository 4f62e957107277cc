"""The chats of ``tiny_model.py`` as verl reads them: python benchmarks/program_files/verl_data.py FOLDER"""

import sys
from pathlib import Path

from datasets import load_dataset

data = Path(sys.argv[1]) / "data"
load_dataset("json", data_files=str(data / "messages.jsonl"), split="train").to_parquet(data / "messages.parquet")
