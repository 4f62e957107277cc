"""Preferences and judged answers, as TRL reads them: python benchmarks/program_files/trl_data.py FOLDER"""

import json
import sys
from pathlib import Path

data = Path(sys.argv[1]) / "data"
chats = json.loads((data / "chats.json").read_text())


def said(role: str, text: str) -> list[dict]:
    return [{"role": role, "content": text}]


pairs = zip(chats, chats[1:] + chats[:1], strict=True)
preferences = [
    {
        "prompt": said("user", row["instruction"]), "chosen": said("assistant", row["output"]),
        "rejected": said("assistant", other["output"]),
    }
    for row, other in pairs
]  # fmt: skip
judged = [
    {
        "prompt": said("user", row["instruction"]), "completion": said("assistant", row["output"]), "label": n % 2 == 0,
    }
    for n, row in enumerate(chats)
]  # fmt: skip
for name, rows in (("preferences", preferences), ("judged", judged)):
    (data / name).mkdir()
    (data / name / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
