#!/bin/bash
#SBATCH --job-name=tiny-1
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=2
#SBATCH --cpus-per-task=1
#SBATCH --hint=nomultithread
#SBATCH --mem=2G
#SBATCH --output=tiny-1-%j.log
#SBATCH --open-mode=append
#SBATCH --requeue
#SBATCH --signal=TERM@120
set -euo pipefail
checkout=$SLURM_SUBMIT_DIR
cd "$SLURM_SUBMIT_DIR"
run_dir="$PWD/runs/tiny-1"
export OMP_NUM_THREADS=1
export PYTHONUNBUFFERED=1
export PYTHONSAFEPATH=1
export GLIBC_TUNABLES=glibc.malloc.mmap_threshold=4294967296:glibc.malloc.trim_threshold=4294967296:glibc.malloc.hugetlb=1
export GOMP_SPINCOUNT=3000
[ -x "$checkout"/.venv/bin/python ] || bash "$checkout"/bootstrap/install-payload.sh --venv "$checkout"/.venv --extras train
export PATH="$checkout"/.venv/bin:$PATH PYTHONPATH="$checkout"
mkdir -p "$run_dir"
cat >"$run_dir/run.toml" <<'END_OF_RUN_TOML'
[run]
name = "run"
seed = 1337

[data]
dir = "data/tiny"
sequence_length = 32

[model]
preset = "tiny"
init = "scratch"
quantize = "none"
router = "auto"
dropout = 0.0
bias = true
n_layer = 2
n_head = 2
n_embd = 32

[task]
kind = "text"
beta = 0.1
class_weights = "none"

[adapter]
kind = "none"
rank = 16
alpha = 32.0
dropout = 0.0
target = "all-linear"
train_tokens = "new"
rslora = false
dora = false

[device]
kind = "auto"

[batch]
global_batch_size = 8
micro_batch_size = 2

[optimizer]
name = "adamw"
lr = 0.001
min_lr = 0.0001
weight_decay = 0.1
beta1 = 0.9
beta2 = 0.95
grad_clip = 1.0

[schedule]
kind = "cosine"
warmup_steps = 2
decay_steps = 20

[train]
steps = 20
log_every = 10
eval_every = 0
eval_tokens = "none"
checkpoint_every = 10
keep_checkpoints = 2
sync_check_every = 100
profile_step = "none"
profile_rank = 0

[precision]
dtype = "fp32"
fp8 = "off"

[engine]
kind = "native"
compile = false
kernels = "auto"
deterministic = false

[memory]
activation_checkpointing = "auto"

[distributed]
backend = "auto"
grad_dtype = "fp32"
strategy = "replicate"
shard_size = "none"
tensor_parallel = 1
pipeline_parallel = 1
pipeline_schedule = "1f1b"
timeout_s = 600.0

[track]
to = ["auto"]

[monitor]
enabled = "auto"
port = 9464

[launch]
launcher = "auto"
ranks_per_node = 2
threads_per_rank = 1
malloc = "tuned"

[limits]
hang_timeout_s = 120.0
max_restarts = 3
max_hours = "none"
max_usd = "none"

[storage]
results = "auto"
final_wait_s = 300.0

[slurm]
nodes = 1
partition = "none"
account = "none"
qos = "none"
time = "none"
cpus_per_node = "none"
extra = ""
END_OF_RUN_TOML
MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export MASTER_ADDR MASTER_PORT=$((20000 + SLURM_JOB_ID % 12000))
# A run folder with a checkpoint in it is resumed.
srun --kill-on-bad-exit=1 --cpu-bind=cores --cpus-per-task=1 python3 -m payload.train --config "$run_dir/run.toml" --run-dir "$run_dir"
# Stopped with a checkpoint by the time limit: the next job continues.
if grep -q '"status": "stopped"' "$run_dir/summary.json"; then
  scontrol requeue "$SLURM_JOB_ID"
fi
