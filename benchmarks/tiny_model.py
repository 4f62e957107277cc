"""A random Llama with a tokenizer and a few chats, in a folder: what programs that take a model by its name can train.

python benchmarks/tiny_model.py FOLDER
"""

import json
import random
import sys
from pathlib import Path

_WORDS = [f"w{i}" for i in range(240)]
_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + ' ' + message['content'] + '<|im_end|>' }}"
    "{% endfor %}"
)


def make(folder: Path, *, layers: int = 4, hidden: int = 64, rows: int = 96, words: int = 48) -> None:
    """Write ``folder/model`` and ``folder/data`` (LLaMA-Factory's Alpaca form and OpenAI's messages)."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    special = ["<unk>", "<s>", "</s>", "<pad>", "<|im_start|>", "<|im_end|>"]
    vocabulary = {word: i for i, word in enumerate([*special, "user", "assistant", "system", *_WORDS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>", pad_token="<pad>",
        additional_special_tokens=special[4:],
    )  # fmt: skip
    fast.chat_template = _TEMPLATE
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(vocabulary), hidden_size=hidden, num_hidden_layers=layers, intermediate_size=3 * hidden,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=512, bos_token_id=1, eos_token_id=2,
        pad_token_id=3,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder / "model")
    fast.save_pretrained(folder / "model")

    chosen = random.Random(0)
    chats = [
        (" ".join(chosen.choices(_WORDS, k=words // 2)), " ".join(chosen.choices(_WORDS, k=words))) for _ in range(rows)
    ]
    data = folder / "data"
    data.mkdir(parents=True, exist_ok=True)
    alpaca = [{"instruction": asked, "input": "", "output": said} for asked, said in chats]
    (data / "chats.json").write_text(json.dumps(alpaca))
    (data / "dataset_info.json").write_text(json.dumps({"chats": {"file_name": "chats.json"}}))
    messages = [
        {"messages": [{"role": "user", "content": asked}, {"role": "assistant", "content": said}]}
        for asked, said in chats
    ]
    (data / "messages.jsonl").write_text("".join(json.dumps(row) + "\n" for row in messages))


if __name__ == "__main__":
    make(Path(sys.argv[1]))
