#!/usr/bin/env bash
# EAGLE-3 under DeepSpeed on two nodes with 4 x A100 each; what follows the script's name overrides the recipe:
#
#     sbatch launch/slurm.sh --name my-run --target.model Qwen/Qwen3-8B
#     sbatch --nodes=1 launch/slurm.sh ...                                 # one node with 4 x A100
#     sbatch launch/slurm.sh --train.deepspeed-config launch/ds_zero3.json # other ZeRO stages
#
# Submit it from the checkout, on a file system that all nodes see. Make its environment first, with CUDA torch even where the login node
# has no GPU: make setup TORCH_BUILD=cuda. A job that is requeued goes on from its last checkpoint.
#SBATCH --job-name=headstart
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=4
#SBATCH --cpus-per-task=32
#SBATCH --mem=0
#SBATCH --time=24:00:00
#SBATCH --output=%x-%j.log
#SBATCH --requeue

set -euo pipefail
cd "$SLURM_SUBMIT_DIR"

if [[ ! -x .venv/bin/torchrun ]]; then
    echo "error: $PWD has no .venv: run 'make setup TORCH_BUILD=cuda' in the checkout, and submit from there" >&2
    exit 2
fi

nodes=$(scontrol show hostnames "$SLURM_JOB_NODELIST")
first_node=${nodes%%$'\n'*}
# Two jobs on one node must not meet at the same port.
port=$((20000 + SLURM_JOB_ID % 10000))

# One launcher a node, which starts one process a GPU.
exec srun --kill-on-bad-exit=1 .venv/bin/torchrun \
    --nnodes "$SLURM_NNODES" \
    --nproc-per-node "${SLURM_GPUS_ON_NODE:-4}" \
    --rdzv-id "$SLURM_JOB_ID" \
    --rdzv-backend c10d \
    --rdzv-endpoint "$first_node:$port" \
    launch/train_eagle3.py "$@"
