"""The scripts of ``pretend_scripts``: where each comes from, how it is typed, and what its inputs are made of."""

from __future__ import annotations

from dataclasses import dataclass

import pretend_inputs as make
from pretend_inputs import Maker


@dataclass(frozen=True)
class Source:
    """A repository at a commit, or a package of an index."""

    repository: str = ""
    commit: str = ""
    package: str = ""

    @property
    def folder(self) -> str:
        return self.repository.rpartition("/")[2]

    def brought_by(self) -> str:
        """The commands that bring it."""
        if self.package:
            return f"pip install {self.package}"
        return f"git clone https://github.com/{self.repository} && git -C {self.folder} checkout {self.commit[:12]}"


@dataclass(frozen=True)
class Case:
    """One run.

    Attributes:
        name: Unique; a second run of the same script says what differs.
        source: A key of ``SOURCES``; ``folder`` of it is copied, and the command is typed in the copy.
        does: What it trains, and on how much.
        command: As typed; a word before it ``NAME=value`` is a variable.
        device: With ``options`` before the two dashes.
        needs: Packages beside those of ``pip install lowtide[dev]``.
        why_not: It is not run, and this is the reason.
        remark: What to know of its result.
    """

    name: str
    source: str
    does: str
    command: str = ""
    device: str = "h100"
    options: str = ""
    folder: str = ""
    inputs: tuple[Maker, ...] = ()
    needs: tuple[str, ...] = ()
    why_not: str = ""
    remark: str = ""


SOURCES = {
    "nanoGPT": Source("karpathy/nanoGPT", "3adf61e154c3fe3fca428ad6bc3818b27a3b8291"),
    "minGPT": Source("karpathy/minGPT", "37baab71b9abea1b76ab957409a1cc2fbfba8a26"),
    "pytorch/examples": Source("pytorch/examples", "77f55b912142e11fcfdf5b530231fb9c52f181e8"),
    "timm": Source("huggingface/pytorch-image-models", "aa4b5850c1543fa488abf260f18390eda46cf85d"),
    "accelerate": Source("huggingface/accelerate", "16cb6eb80dd9aa8b4df1a63ef57863e455d53b83"),
    "diffusers": Source("huggingface/diffusers", "58eb52c0803ea9af3abec60841c2a093bdf1f951"),
    "peft": Source("huggingface/peft", "5d602fdbff04c33c1c4de55cda9d4ae1d7cb7e40"),
    "TRL": Source(package="trl==1.16.0"),
    "torchtitan": Source(package="torchtitan==0.3.0"),
    "litgpt": Source(package="litgpt==0.5.13"),
    "Lightning": Source("Lightning-AI/pytorch-lightning", "7f0c3436cd3f6ad3753125672024fc415cbcb414"),
    "DeepSpeedExamples": Source("deepspeedai/DeepSpeedExamples", "45b4b7156c8794a3452a5a7d03dbd8d797068569"),
    "Megatron-LM": Source("NVIDIA/Megatron-LM", "55ac7082517c3878ae653c07c09c534b8aed49f6"),
    "torchtune": Source(package="torchtune==0.6.1"),
    "LLaMA-Factory": Source(package="llamafactory==0.9.5"),
    "OpenCLIP": Source(package="open_clip_torch==3.3.0"),
    "Ultralytics": Source(package="ultralytics==8.4.190"),
    "sentence-transformers": Source("huggingface/sentence-transformers", "cad211983f36ce458e9b3360f3e11b29fc54cbd8"),
    "torchvision": Source("pytorch/vision"),
    "transformers": Source("huggingface/transformers"),
    "pytorch-memory-optim": Source("rasbt/pytorch-memory-optim", "f6eddcd28c40770a097ffd9f18797a043457a2d0"),
}

_BERT = {"vocab_size": 28996, "hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12,
         "intermediate_size": 3072, "max_position_embeddings": 512}  # fmt: skip
_DISTILBERT = {"vocab_size": 30522, "dim": 768, "n_layers": 6, "n_heads": 12, "hidden_dim": 3072,
               "max_position_embeddings": 512}  # fmt: skip
_LLAMA_2 = {"vocab_size": 32000, "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
            "intermediate_size": 11008, "max_position_embeddings": 4096, "torch_dtype": "float16"}  # fmt: skip
_LLAMA_3 = {"vocab_size": 128256, "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
            "num_key_value_heads": 8, "intermediate_size": 14336, "max_position_embeddings": 131072,
            "torch_dtype": "bfloat16"}  # fmt: skip
_LLAMA_70B = {"vocab_size": 32000, "hidden_size": 8192, "num_hidden_layers": 80, "num_attention_heads": 64,
              "num_key_value_heads": 8, "intermediate_size": 28672, "max_position_embeddings": 4096,
              "torch_dtype": "bfloat16"}  # fmt: skip
_QWEN_HALF = {"vocab_size": 151936, "hidden_size": 896, "num_hidden_layers": 24, "num_attention_heads": 14,
              "num_key_value_heads": 2, "intermediate_size": 4864, "tie_word_embeddings": True,
              "max_position_embeddings": 32768, "torch_dtype": "bfloat16"}  # fmt: skip
_MOE_30B = {"vocab_size": 151936, "hidden_size": 2048, "num_hidden_layers": 48, "num_attention_heads": 32,
            "num_key_value_heads": 4, "head_dim": 128, "intermediate_size": 6144, "moe_intermediate_size": 768,
            "num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True, "max_position_embeddings": 40960,
            "torch_dtype": "bfloat16"}  # fmt: skip

_bert = make.model("bert-base-cased", "bert", _BERT, "BertForMaskedLM")
_distilbert = make.model("distilbert/distilbert-base-uncased", "distilbert", _DISTILBERT, "DistilBertForMaskedLM")
_llama_2 = make.model("Llama-2-7b-hf", "llama", _LLAMA_2, "LlamaForCausalLM")
_llama_3 = make.model("Llama-3.1-8B", "llama", _LLAMA_3, "LlamaForCausalLM")
_llama_70b = make.model("Llama-2-70b-hf", "llama", _LLAMA_70B, "LlamaForCausalLM")
_qwen = make.model("Qwen2-0.5B", "qwen2", _QWEN_HALF, "Qwen2ForCausalLM")
_moe = make.model("Qwen3-30B-A3B", "qwen3_moe", _MOE_30B, "Qwen3MoeForCausalLM")
_glue = (make.dataset("nyu-mll/glue", make.pair, card="mrpc", validation=64), make.metric("glue"), _bert)
_chats = make.dataset("conversations", make.conversation, rows=96, test=8)
_preferences = make.dataset("preferences", make.preference, rows=96, test=8)
_gpt_tokens = (
    make.token_file("data/openwebtext/train.bin", 50257, 4_000_000),
    make.token_file("data/openwebtext/val.bin", 50257, 400_000),
)
_vision = ("torchvision",)
_SFT = "trl.scripts.sft --dataset_name conversations --report_to none --output_dir out"

_GPT_3 = (
    "CUDA_DEVICE_MAX_CONNECTIONS=1 torchrun --nproc_per_node 8 --nnodes 128 --node_rank 0 --master_addr 127.0.0.1 "
    "--master_port 6000 pretrain_gpt.py --num-layers 96 --hidden-size 12288 --num-attention-heads 96 "
    "--seq-length 2048 --max-position-embeddings 2048 --attention-backend auto --micro-batch-size 1 "
    "--global-batch-size 1536 --train-iters 5000 --weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.95 "
    "--init-method-std 0.006 --clip-grad 1.0 --fp16 --lr 6.0e-5 --lr-decay-style cosine --min-lr 6.0e-6 "
    "--lr-warmup-fraction .001 --lr-decay-iters 430000 --tensor-model-parallel-size 8 "
    "--pipeline-model-parallel-size 16 --mock-data --tokenizer-type NullTokenizer --vocab-size 50256 "
    "--split 949,50,1 --log-interval 1 --eval-interval 1000 --eval-iters 10 --transformer-impl local "
    "--no-persist-layer-norm --no-gradient-accumulation-fusion --no-masked-softmax-fusion"
)

CASES = (
    # -- GPT-2 by hand
    Case("nanoGPT", "nanoGPT", "GPT-2 124M, its defaults: 40 x 12 x 1024 tokens a step, compiled", "python train.py",
         "a100-40gb", inputs=_gpt_tokens),
    Case("nanoGPT, eager", "nanoGPT", "the same, not compiled", "python train.py --compile=False", "a100-40gb",
         inputs=_gpt_tokens),
    Case("nanoGPT, batch 64", "nanoGPT", "64 sequences at once",
         "python train.py --compile=False --batch_size=64 --gradient_accumulation_steps=8", "a100-40gb",
         inputs=_gpt_tokens),
    Case("nanoGPT, 8 ranks", "nanoGPT", "its defaults, DDP", "torchrun --standalone --nproc_per_node=8 train.py",
         "a100-40gb", inputs=_gpt_tokens),
    Case("minGPT", "minGPT", "chargpt: its defaults, 64 x 128 letters; 500 letters are generated after the first step",
         "PYTHONPATH=. python projects/chargpt/chargpt.py", "l4",
         inputs=(make.text_file("input.txt", 60_000, "O God, O God!"),)),
    # -- pytorch/examples
    Case("imagenet", "pytorch/examples", "ResNet-50, fp32, 256 images", "python main.py -a resnet50 --dummy -j 2",
         "a100-80gb", folder="imagenet", needs=_vision),
    Case("imagenet, DDP", "pytorch/examples", "ResNet-50, fp32, 2048 images over 8 by mp.spawn",
         "python main.py -a resnet50 --dummy -j 8 -b 2048 --multiprocessing-distributed --world-size 1 --rank 0 "
         "--dist-url tcp://127.0.0.1:23456", "a100-80gb", options="--devices 8", folder="imagenet", needs=_vision),
    Case("mnist", "pytorch/examples", "two convolutions, 64 digits", "python main.py", "l4", folder="mnist",
         inputs=(make.mnist("../data"),), needs=_vision),
    Case("dcgan", "pytorch/examples", "DCGAN, 64 images of 64 x 64; two optimizers",
         "python main.py --dataset fake --accel", "l4", folder="dcgan", needs=_vision),
    Case("word_language_model", "pytorch/examples", "Transformer of 2 layers, 20 x 35 words",
         "python main.py --accel --model Transformer --use-optimizer", "l4", folder="word_language_model",
         inputs=tuple(make.text_file(f"data/wikitext-2/{split}.txt", 20_000) for split in ("train", "valid", "test"))),
    Case("FSDP2", "pytorch/examples", "Transformer of 10 layers, 32 x 64, bf16, over 8",
         "torchrun --nproc_per_node 8 example.py --mixed-precision", "a100-80gb", folder="distributed/FSDP2"),
    Case("tensor parallel and FSDP", "pytorch/examples", "Llama 2 of 2 layers over 4 x 2 ranks",
         "torchrun --nproc_per_node 8 fsdp_tp_example.py", "a100-80gb", folder="distributed/tensor_parallelism"),
    Case("DDP tutorial", "pytorch/examples", "one linear layer of 20, over 8",
         "torchrun --nproc_per_node 8 multigpu_torchrun.py 1 1", "l4", folder="distributed/ddp-tutorial-series"),
    # -- timm, torchvision
    Case("timm train.py", "timm", "ViT-L/16, fp16 AMP, EMA, clipping, 64 images a GPU, over 8",
         "torchrun --nproc_per_node 8 train.py --data-dir images --model vit_large_patch16_224 --num-classes 4 "
         "--batch-size 64 --amp --model-ema --clip-grad 1.0 --opt adamw -j 2", "a100-80gb",
         inputs=(make.images("images/train", 2048), make.images("images/validation", 256)), needs=_vision),
    Case("timm train.py, compiled", "timm", "ConvNeXt-B, bf16, channels last, 128 images",
         "python train.py --data-dir images --model convnext_base --num-classes 4 --batch-size 128 --amp "
         "--amp-dtype bfloat16 --channels-last --torchcompile inductor --opt adamw -j 2", "h100",
         inputs=(make.images("images/train", 1024), make.images("images/validation", 256)), needs=_vision),
    Case("open_clip_train.main", "OpenCLIP", "CLIP of ViT-B/32, bf16 AMP, 512 images and texts a GPU, over 8",
         "torchrun --nproc_per_node 8 -m open_clip_train.main --dataset-type synthetic --train-num-samples 32768 "
         "--model ViT-B-32 --batch-size 512 --precision amp_bf16 --local-loss --gather-with-grad --workers 1 "
         "--epochs 1", "a100-40gb", needs=("torchvision", "open_clip_torch", "ftfy")),
    Case("yolo train", "Ultralytics", "YOLO11m for detection, AMP, 16 images of 640 x 640",
         "yolo detect train model=yolo11m.yaml data=boxes.yaml epochs=1 batch=16 imgsz=640 device=0 workers=2 "
         "plots=False", "rtx4090",
         inputs=(make.images("images/train", 256, 640, flat=True), make.images("images/val", 32, 640, flat=True),
                 make.boxes("labels/train", 256), make.boxes("labels/val", 32),
                 make.file("boxes.yaml", "path: .\ntrain: images/train\nval: images/val\nnames: {0: a, 1: b}\n")),
         needs=("torchvision", "ultralytics", "ultralytics-thop", "opencv-python-headless", "polars")),
    # -- accelerate
    Case("nlp_example.py", "accelerate", "BERT-base on GLUE's MRPC, fp16, 16 pairs a GPU, DDP over 8",
         "accelerate launch --multi_gpu --num_processes 8 nlp_example.py --mixed_precision fp16", "a100-40gb",
         options="--no-weights", folder="examples", inputs=_glue, needs=("evaluate", "scikit-learn", "scipy")),
    Case("complete_nlp_example.py", "accelerate", "the same with FSDP by its own configuration, over 2",
         "accelerate launch --config_file config_yaml_templates/fsdp.yaml --num_processes 2 complete_nlp_example.py "
         "--mixed_precision bf16", "a100-40gb", options="--no-weights", folder="examples", inputs=_glue,
         needs=("evaluate", "scikit-learn", "scipy")),
    Case("cv_example.py", "accelerate", "ResNet-50-D, frozen but for its head, fp16, 64 images",
         "accelerate launch cv_example.py --data_dir pets --mixed_precision fp16", "l4", options="--no-weights",
         folder="examples", inputs=(make.images("pets", 512, flat=True),), needs=("torchvision", "timm")),
    # -- diffusers
    Case("train_unconditional.py", "diffusers", "its own UNet of 114M, 256 x 256, 16 images, fp16, EMA",
         "accelerate launch train_unconditional.py --train_data_dir images --resolution 256 --train_batch_size 16 "
         "--mixed_precision fp16 --use_ema --output_dir out", "a100-40gb",
         folder="examples/unconditional_image_generation",
         inputs=(make.images("images", 128),), needs=_vision),
    Case("train_text_to_image.py", "diffusers", "Stable Diffusion 1.5, all of the UNet, 512 x 512, 1 x 4 images, fp16",
         "accelerate launch --mixed_precision fp16 train_text_to_image.py --pretrained_model_name_or_path sd15 "
         "--train_data_dir images --use_ema --resolution 512 --center_crop --random_flip --train_batch_size 1 "
         "--gradient_accumulation_steps 4 --gradient_checkpointing --max_train_steps 15000 --output_dir out",
         "a10", options="--no-weights", folder="examples/text_to_image",
         inputs=(make.stable_diffusion("sd15"), make.images("images", 64, 512, flat=True, captions=True)),
         needs=_vision),
    Case("train_text_to_image_lora.py", "diffusers", "the same with LoRA of rank 4",
         "accelerate launch train_text_to_image_lora.py --mixed_precision fp16 --pretrained_model_name_or_path sd15 "
         "--train_data_dir images --resolution 512 --center_crop --random_flip --train_batch_size 1 "
         "--gradient_accumulation_steps 4 --max_train_steps 15000 --rank 4 --output_dir out",
         "rtx4090", options="--no-weights", folder="examples/text_to_image",
         inputs=(make.stable_diffusion("sd15"), make.images("images", 64, 512, flat=True, captions=True)),
         needs=_vision),
    # -- TRL
    Case("sft", "TRL", "Qwen2 0.5B, bf16, 8 x 1024",
         f"python -m {_SFT} --model_name_or_path Qwen2-0.5B --dtype bfloat16 --max_length 1024", "a100-40gb",
         options="--no-weights", inputs=(_qwen, _chats)),
    Case("sft, QLoRA", "TRL", "Llama 2 7B in 4 bits, LoRA on all linear layers, 4 x 1024",
         f"python -m {_SFT} --model_name_or_path Llama-2-7b-hf --load_in_4bit --use_peft --lora_target_modules "
         "all-linear "
         "--per_device_train_batch_size 4 --gradient_checkpointing --bf16 True --max_length 1024", "a100-40gb",
         options="--no-weights", inputs=(_llama_2, _chats)),
    Case("sft, FSDP2", "TRL", "Llama 3.1 8B, 2 x 4096, over 8 by TRL's fsdp2.yaml",
         f"accelerate launch --config_file fsdp2.yaml -m {_SFT} --model_name_or_path Llama-3.1-8B --dtype bfloat16 "
         "--per_device_train_batch_size 2 --max_length 4096 --bf16 True", "h100", options="--no-weights",
         inputs=(_llama_3, _chats)),
    Case("sft, ZeRO-3", "TRL", "the same by TRL's zero3.yaml",
         f"accelerate launch --config_file zero3.yaml -m {_SFT} --model_name_or_path Llama-3.1-8B --dtype bfloat16 "
         "--per_device_train_batch_size 2 --max_length 4096 --bf16 True", "h100", options="--no-weights",
         inputs=(_llama_3, _chats)),
    Case("sft, FSDP2, 70B", "TRL", "Llama 2 70B, 1 x 4096, over 64",
         f"accelerate launch --config_file fsdp2.yaml --num_machines 8 --num_processes 64 --machine_rank 0 "
         f"--main_process_ip 127.0.0.1 --main_process_port 29500 -m {_SFT} "
         "--model_name_or_path Llama-2-70b-hf --dtype bfloat16 --per_device_train_batch_size 1 --max_length 4096 "
         "--bf16 True",
         "h100", options="--no-weights --ranks 64", inputs=(_llama_70b, _chats)),
    Case("sft, mixture of experts", "TRL", "Qwen3-30B-A3B, LoRA on attention, 1 x 2048",
         f"python -m {_SFT} --model_name_or_path Qwen3-30B-A3B --dtype bfloat16 --use_peft --lora_target_modules "
         "q_proj v_proj "
         "--per_device_train_batch_size 1 --max_length 2048 --bf16 True", "h100", options="--no-weights", inputs=(_moe,
         _chats)),
    Case("dpo", "TRL", "Qwen2 0.5B and its reference, 8 x 1024",
         "python -m trl.scripts.dpo --dataset_name preferences --model_name_or_path Qwen2-0.5B --dtype bfloat16 "
         "--max_length 1024 --report_to none --output_dir out", "a100-40gb", options="--no-weights",
         inputs=(_qwen, _preferences)),
    Case("reward", "TRL", "Qwen2 0.5B with a head for rewards, 8 x 2048",
         "python -m trl.scripts.reward --dataset_name preferences --model_name_or_path Qwen2-0.5B --dtype bfloat16 "
         "--max_length 2048 --report_to none --output_dir out", "a100-40gb", options="--no-weights",
         inputs=(_qwen, _preferences)),
    Case("grpo", "TRL", "Qwen2 0.5B, 8 answers of 256 tokens by transformers' generate",
         "python -m trl.scripts.grpo --dataset_name prompts --model_name_or_path Qwen2-0.5B --dtype bfloat16 "
         "--reward_funcs think_format_reward --max_completion_length 256 --report_to none --output_dir out",
         "a100-40gb",
         options="--no-weights", inputs=(_qwen, make.dataset("prompts", make.prompt))),
    # -- peft, sentence-transformers
    Case("olora_finetuning.py", "peft", "transformers' Trainer: Llama 2 7B, LoRA of rank 32, fp16 weights, 16 x 256",
         "python olora_finetuning.py --base_model Llama-2-7b-hf --data_path alpaca --init_lora_weights gaussian",
         "a100-40gb",
         options="--no-weights", folder="examples/olora_finetuning",
         inputs=(_llama_2, make.dataset("alpaca", make.instruction))),
    Case("sft, QLoRA and FSDP", "peft", "Llama 2 70B in 4 bits by its qlora_fsdp configuration, over 2",
         "accelerate launch --config_file configs/fsdp_config_qlora.yaml --num_processes 2 train.py --seed 100 "
         "--model_name_or_path Llama-2-70b-hf --dataset_name conversations --chat_template_format none "
         "--add_special_tokens False --append_concat_token False --splits train,test --max_length 2048 "
         "--num_train_epochs 1 --logging_steps 5 --bf16 True --packing True --learning_rate 1e-4 --output_dir out "
         "--per_device_train_batch_size 2 --gradient_accumulation_steps 2 --gradient_checkpointing True "
         "--use_reentrant True --use_peft_lora True --lora_r 8 --lora_target_modules all-linear "
         "--use_4bit_quantization True --use_nested_quant True --bnb_4bit_compute_dtype bfloat16 "
         "--bnb_4bit_quant_storage_dtype bfloat16 --report_to none", "rtx4090", options="--no-weights --devices 2",
         folder="examples/sft", inputs=(_llama_70b, _chats),
         remark="this transformers puts all of the weights on each GPU before FSDP shares them out"),
    Case("llamafactory-cli train", "LLaMA-Factory", "Llama 3.1 8B, LoRA of rank 8 on all layers, bf16, "
         "8 x 1 x 2048, as in its llama3_lora_sft.yaml",
         "DISABLE_VERSION_CHECK=1 llamafactory-cli train llama3_lora_sft.yaml", "rtx4090", options="--no-weights",
         inputs=(_llama_3, make.dataset("data", make.long_instruction, rows=1000),
                 make.file("data/dataset_info.json", '{"alpaca": {"file_name": "train.jsonl"}}'),
                 make.file("llama3_lora_sft.yaml", make.FACTORY)),
         needs=("llamafactory", "transformers==5.6.0", "trl==0.24.0", "peft==0.18.1", "omegaconf", "fire", "torchaudio",
                "av"),
         remark="with transformers 5.6.0, TRL 0.24.0 and peft 0.18.1, the newest that it takes"),
    Case("training_stsbenchmark.py", "sentence-transformers", "DistilBERT on pairs of sentences, fp16, 16 pairs",
         "python training_stsbenchmark.py", "l4", options="--no-weights",
         folder="examples/sentence_transformer/training/sts",
         inputs=(_distilbert, make.dataset("sentence-transformers/stsb", make.scored_pair, validation=64)),
         needs=("sentence-transformers==6.2.0", "scikit-learn", "scipy")),
    # -- torchtitan, litgpt, Lightning
    Case("torchtitan", "torchtitan", "Llama 3 8B, its defaults: 1 x 8192, FSDP2 over 8",
         "PYTORCH_ALLOC_CONF=expandable_segments:True torchrun --nproc_per_node 8 -m torchtitan.train --module llama3 "
         "--config llama3_8b --hf_assets_path Llama-3.1-8B --dataloader.dataset c4_test", "h100",
         inputs=(_llama_3, make.dataset("tests/assets/c4_test", make.long_text, rows=128, test=8)),
         needs=("torchtitan", "torch_checkpointing", "spmd_types==0.2.3", "tyro")),
    Case("torchtitan, debug model", "torchtitan", "its debug model, 8 x 2048, over 8",
         "PYTORCH_ALLOC_CONF=expandable_segments:True torchrun --nproc_per_node 8 -m torchtitan.train --module llama3 "
         "--config llama3_debugmodel --hf_assets_path Llama-3.1-8B", "h100",
         inputs=(_llama_3, make.dataset("tests/assets/c4_test", make.long_text, rows=128, test=8)),
         needs=("torchtitan", "torch_checkpointing", "spmd_types==0.2.3", "tyro")),
    Case("litgpt pretrain", "litgpt", "pythia-160m on text files, 16 x 4 x 2048 tokens",
         "python -m litgpt pretrain pythia-160m --tokenizer_dir Qwen2-0.5B --data TextFiles --data.train_data_path "
         "texts "
         "--train.max_tokens 1000000 --train.micro_batch_size 4 --train.global_batch_size 64", "a100-40gb",
         inputs=(_qwen, make.text_file("texts/1.txt", 300_000), make.text_file("texts/2.txt", 300_000)),
         needs=("litgpt", "jsonargparse==4.41.0", "litdata", "boto3")),
    Case("litgpt finetune_lora", "litgpt", "TinyLlama 1.1B, LoRA, bf16, its defaults",
         "python -m litgpt finetune_lora checkpoints/TinyLlama/tiny-llama-1.1b --data Alpaca2k", "l4",
         inputs=(make.litgpt_checkpoint("checkpoints/TinyLlama", "tiny-llama-1.1b"),
                 make.dataset("mhenrichsen/alpaca_2k_test", make.instruction, rows=2000)),
         needs=("litgpt", "jsonargparse==4.41.0", "litdata", "boto3")),
    Case("tensor_parallel/train.py", "Lightning", "Llama of 7B, 2 x 2 ranks of data and tensor parallel, 8 x 128",
         "python train.py", "a100-80gb", options="--ranks 4 --devices 4", folder="examples/pytorch/tensor_parallel"),
    Case("language_model/train.py", "Lightning", "Fabric: Transformer of 2 layers, 20 sequences",
         "python train.py", "l4", folder="examples/fabric/language_model",
         inputs=(make.text_file("data/wikitext-2.txt", 400_000),)),
    # -- DeepSpeed, Megatron
    Case("offload_states.py", "DeepSpeedExamples", "ZeRO-3 of its own random model", "deepspeed --num_gpus 8 "
    "offload_states.py",
         "h100", folder="training/offload_states", inputs=()),
    Case("finetune_zero3.py", "DeepSpeedExamples", "Llama 3.1 8B, ZeRO-3, optimizer in host memory, 4 x 4096, "
    "checkpointed",
         "deepspeed --num_gpus=1 finetune_zero3.py --deepspeed_config=ds.json --model_name Llama-3.1-8B --lr 1e-5 "
         "--batch_size 4 --output_dir out --max_length 4096 --dataset_name alpaca --bench_steps 10 --warmup_steps 20 "
         "--activation_checkpointing --attn_implementation sdpa", "h100", options="--no-weights",
         folder="training/DeepSpeed-SuperOffload",
         inputs=(_llama_3, make.dataset("alpaca", make.instruction), make.file("ds.json",
             '{"train_batch_size": 4, "gradient_accumulation_steps": 1, "bf16": {"enabled": true}, '
             '"zero_optimization": '
             '{"stage": 3, "overlap_comm": false, "reduce_bucket_size": 4e8, "sub_group_size": 4e8, '
             '"offload_optimizer": '
             '{"device": "cpu", "pin_memory": true}}, "wall_clock_breakdown": true}'))),
    Case("pretrain_gpt.py", "Megatron-LM", "GPT-3 175B as in its train_gpt3_175b_distributed.sh: 1536 sequences, TP 8, "
         "PP 16, fp16; the first stage, without Transformer Engine", _GPT_3, "h100", options="--ranks 1024",
         needs=("pybind11", "six"),
         remark="mock data for 5,000 of its 500,000 iterations: their indices are host memory"),
    Case("pretrain_gpt.py, last stage", "Megatron-LM", "the same, the stage with the loss", _GPT_3, "h100",
         options="--ranks 1024 --rank 960", inputs=(make.built("megatron/core/datasets"),), needs=("pybind11", "six")),
    # -- not run
    Case("run_clm.py, run_glue.py", "transformers", "language models by transformers' Trainer",
         why_not="the repository is too large to be brought here; the same Trainer runs in peft's and TRL's rows"),
    Case("references/classification", "torchvision", "ResNet-50",
         why_not="the repository is too large to be brought here"),
    Case("01_pytorch-vit.py and others", "pytorch-memory-optim", "ViT-L on CIFAR-10",
         why_not="CIFAR-10's files are known by their checksums, random ones are refused; its numbers are compared in "
         "another page with another loader"),
    Case("lora_finetune_single_device", "torchtune", "Llama 3 8B, LoRA",
         why_not="its last release asks for a torchao that does not import beside this PyTorch"),
    Case("train_bi_encoder_mnrl.py", "sentence-transformers", "DistilBERT on MS MARCO",
         why_not="its three data sets of 8.8 million passages would have to be made"),
    Case("FSDP/T5_training.py", "pytorch/examples", "T5 by FSDP1",
         why_not="it imports `nlp`, the package that `datasets` was called before 2020"),
)  # fmt: skip
