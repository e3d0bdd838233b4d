#!/bin/bash
# One model over the GPUs of two nodes under SLURM: sbatch slurm.sh
#
# Before: a secret that all nodes can read and nobody else: (umask 077; openssl rand -hex 32 > ~/jaxpaged.secret)
# srun tells each task where the first one is, how many there are and which it is; jaxpaged reads that. The first node answers clients.
#SBATCH --job-name=jaxpaged
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=32
# The first signal comes 60 s before the end of the job's time: 30 s for open requests, and the end, which takes 4.5 s at most.
#SBATCH --signal=TERM@60

# When one task ends, so do the others by themselves; --kill-on-bad-exit has SLURM see to it, too.
exec srun --kill-on-bad-exit=1 jaxpaged serve \
  --model meta-llama/Llama-3.3-70B-Instruct \
  --tensor-parallel-size 16 \
  --distributed.secret-file "$HOME/jaxpaged.secret" \
  --host 0.0.0.0 \
  --port 8000 \
  --server.api-key-file "$HOME/jaxpaged.keys"
