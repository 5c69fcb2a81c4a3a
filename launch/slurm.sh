#!/usr/bin/env bash
# Any recipe on two nodes with 4 x A100 each; the script comes first, and what follows it overrides the recipe:
#
#     sbatch launch/slurm.sh launch/train_eagle3.py --name my-eagle3 --target.model Qwen/Qwen3-8B --data.sources chats.jsonl
#     sbatch launch/slurm.sh launch/train_eagle1.py --name my-eagle1 ...
#     sbatch launch/slurm.sh launch/train_medusa1.py --name my-medusa1 ...
#     sbatch launch/slurm.sh launch/train_medusa2.py --name my-medusa2 ...
#
#     sbatch launch/slurm.sh recipes/eagle3.py ...                                                       # DDP instead of DeepSpeed
#     sbatch launch/slurm.sh launch/train_eagle3.py --train.deepspeed-config launch/ds_zero3.json ...    # another ZeRO stage
#     sbatch --nodes=1 launch/slurm.sh launch/train_eagle3.py ...                                        # one node
#     LAUNCHER=deepspeed sbatch launch/slurm.sh launch/train_eagle3.py ...                               # deepspeed on each node instead of torchrun
#
# Submit it from the checkout, on a file system that all nodes see. Make its environment first, with CUDA torch even where the login node
# has no GPU: make setup TORCH_BUILD=cuda. A job that fails ends on all nodes; one that is requeued, or submitted again with the same --name, goes on
# from its last checkpoint.
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
if [[ ${1:-} != *.py || ! -f $1 ]]; then
    echo "error: the first argument is '${1:-}', expected a script of launch/ or recipes/: sbatch launch/slurm.sh launch/train_eagle3.py --name ..." >&2
    exit 2
fi

nodes=$(scontrol show hostnames "$SLURM_JOB_NODELIST")
first_node=${nodes%%$'\n'*}
processes=${SLURM_GPUS_ON_NODE:-4}
# Two jobs on one node must not meet at the same port.
port=$((20000 + SLURM_JOB_ID % 10000))
# srun has not taken this over from sbatch since Slurm 22.05.
[[ -z ${SLURM_CPUS_PER_TASK:-} ]] || export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK

# One launcher a node, which starts one process a GPU.
case ${LAUNCHER:-torchrun} in
torchrun)
    exec srun --kill-on-bad-exit=1 .venv/bin/torchrun \
        --nnodes "$SLURM_NNODES" \
        --nproc-per-node "$processes" \
        --rdzv-id "$SLURM_JOB_ID" \
        --rdzv-backend c10d \
        --rdzv-endpoint "$first_node:$port" \
        "$@"
    ;;
deepspeed)
    hostfile=$PWD/.hosts-$SLURM_JOB_ID
    trap 'rm -f "$hostfile"' EXIT
    sed "s/\$/ slots=$processes/" <<<"$nodes" >"$hostfile"
    # Each node's own number is known there only.
    srun --kill-on-bad-exit=1 bash -c 'exec .venv/bin/deepspeed --no_ssh --node_rank "$SLURM_NODEID" "$@"' bash \
        --hostfile "$hostfile" \
        --master_addr "$first_node" \
        --master_port "$port" \
        "$@"
    ;;
*)
    echo "error: LAUNCHER is '$LAUNCHER', expected torchrun or deepspeed" >&2
    exit 2
    ;;
esac
