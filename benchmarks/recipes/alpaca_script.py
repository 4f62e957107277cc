"""Stanford Alpaca's train.py, in a checkout of its repository: ``python alpaca_script.py CHECKOUT ARGUMENTS``.

The script is as published. LLaMA 7B or 13B has its configuration and weights of zeros, the tokenizer gives random
tokens, and samples are as long as most of Alpaca's.
"""

import json
import os
import runpy
import sys
import tempfile
import types
from pathlib import Path

import torch

sys.modules.update(dict.fromkeys(("datasets", "pandas", "sklearn")))  # of today: not for transformers of then
import transformers  # noqa: E402

TOKENS = 90
LLAMA_7B = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096, "intermediate_size": 11008,
    "num_attention_heads": 32, "num_hidden_layers": 32, "vocab_size": 32000, "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "torch_dtype": "float16",
}  # fmt: skip
LLAMA_13B = LLAMA_7B | {
    "hidden_size": 5120, "intermediate_size": 13824, "num_attention_heads": 40, "num_hidden_layers": 40,
}  # fmt: skip


class Tokenizer:
    """As the published tokenizer was: no token for padding until the script adds one."""

    pad_token = eos_token = bos_token = unk_token = None
    pad_token_id, model_max_length, length = 0, 512, 32000

    def __len__(self) -> int:
        return self.length

    def add_special_tokens(self, tokens: dict) -> int:
        added = len({token for token in tokens.values() if token == "[PAD]"})
        self.length += added
        self.pad_token_id = self.length - 1
        vars(self).update(tokens)
        return added

    def __call__(self, text: str, **_: object) -> types.SimpleNamespace:
        return types.SimpleNamespace(input_ids=torch.randint(3, 32000, (1, TOKENS if len(text) > 250 else 60)))

    def save_pretrained(self, *_: object, **__: object) -> None: ...


def main() -> None:
    checkout, *arguments = sys.argv[1:]
    here = Path(tempfile.mkdtemp())
    for name, config in (("llama-7b", LLAMA_7B), ("llama-13b", LLAMA_13B)):
        (here / name).mkdir()
        (here / name / "config.json").write_text(json.dumps(config))
    samples = [{"instruction": "word " * 20, "input": "", "output": "word " * 40} for _ in range(64)]
    (here / "alpaca_data.json").write_text(json.dumps(samples))
    os.chdir(here)
    sys.path.insert(0, checkout)
    # `utils` asks OpenAI for new samples, which training does not.
    loads = types.SimpleNamespace(jload=lambda file: json.loads(Path(file).read_text()))
    sys.modules["utils"] = loads  # type: ignore[assignment]
    transformers.AutoTokenizer.from_pretrained = lambda *_, **__: Tokenizer()
    sys.argv = ["train.py", *arguments]
    runpy.run_path(str(Path(checkout) / "train.py"), run_name="__main__")


if __name__ == "__main__":
    main()
