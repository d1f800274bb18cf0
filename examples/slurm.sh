#!/bin/sh
#SBATCH --job-name=mneme
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=4
#SBATCH --cpus-per-task=8
#SBATCH --time=04:00:00
# Eight ranks on two machines. The folder of the run has to be one that all machines see. A job that ran out of time
# goes on when it is submitted again.
#   sbatch examples/slurm.sh CONFIG.json RUN
set -eu
config=$1
run=$2
MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
MASTER_PORT=$((20000 + SLURM_JOB_ID % 20000))
MNEME_TOKEN=$(od -An -N16 -tx1 /dev/urandom | tr -d ' \n')
export MASTER_ADDR MASTER_PORT MNEME_TOKEN
if [ -e "$run/last" ]; then
    srun --export=ALL mneme train --resume "$run" --threads "$SLURM_CPUS_PER_TASK"
else
    srun --export=ALL mneme train "$config" --set "out=$run" --threads "$SLURM_CPUS_PER_TASK"
fi
