"""MACE's own command on molecules, energies and forces: a backward of a backward in each step."""

import json
import sys

import torch
from mace.cli.run_train import main
from safetensors.torch import save_file
from script_arguments import args, show, timed

out = args.output
sys.argv[1:] = (
    "--name mace --train_file data/atoms.xyz --valid_fraction 0.1 --E0s average --r_max 4.0 "
    f"--hidden_irreps 16x0e+16x1o --batch_size 6 --valid_batch_size 6 --max_num_epochs {args.steps // 6} "
    f"--eval_interval 1000 --device cpu --seed 0 "
    f"--default_dtype float32 --ema --ema_decay 0.99 --amsgrad --model MACE --energy_key REF_energy "
    f"--forces_key REF_forces --log_dir {out}/log --model_dir {out} --checkpoints_dir {out}/checkpoints "
    f"--results_dir {out}/results"
).split()
with timed():
    main()
for file in (out / "results").glob("*_train.txt"):
    for line in file.read_text().splitlines():
        row = json.loads(line)
        if row.get("mode") == "opt":
            show(row["loss"])
last = max((out / "checkpoints").glob("*.pt"), key=lambda path: path.stat().st_mtime)
state = torch.load(last, weights_only=False)["model"]
save_file({name: value.contiguous().clone() for name, value in state.items()}, out / "model.safetensors")
