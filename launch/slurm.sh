#!/usr/bin/env bash
# usage: launch/slurm.sh [option …] -- STAGE --config=… --workdir=…
#
# GPUs of a Slurm cluster, one node or several: submits a job with one process a GPU. A job that is
# preempted or loses a node is queued again and goes on from where it was.
#
# options
#   --nodes=N              default 1
#   --gpus=N               GPUs of a node that it takes; default 8
#   --cpus=N               CPUs for each GPU; default 8
#   --time=TIME            limit, e.g. 24:00:00; default: the partition's
#   --partition=PARTITION  default: the cluster's
#   --account=ACCOUNT      default: yours
#   --job-name=NAME        default retmask; the log is NAME-JOB.log in this folder
#   --venv=FOLDER          installation, seen by all nodes; default: .venv of this repository
#   --sbatch-flags=FLAGS   more for sbatch, e.g. '--qos=high --constraint=h100'
#   --dry-run              print the command, do not run it
#
# Installed as the README says, with the extra cuda13, on a file system that all nodes see; there
# too goes --workdir. Without Slurm, one node needs no script: retmask STAGE … takes all its GPUs.
#
# launch/slurm.sh --nodes=4 --time=24:00:00 --partition=h100 -- \
#     train --config=configs/llama31_8b.py --workdir=/shared/llama31_8b

set -euo pipefail
# shellcheck source-path=SCRIPTDIR source=common.sh
. "$(dirname "$0")/common.sh"

nodes=1 gpus=8 cpus=8 time='' partition='' account='' job_name=retmask venv=$ROOT/.venv
sbatch_flags=''
parse "" "nodes gpus cpus time partition account job-name venv sbatch-flags" "$@"
[ ${#words[@]} -eq 0 ] || die "${words[0]}: not understood; a stage comes after --"
need_stage
for option in nodes gpus cpus; do
  [[ ${!option} =~ ^[1-9][0-9]*$ ]] || die "--$option=${!option}: wants a positive number"
done
read -ra more <<<"$sbatch_flags"

# Every process sees all GPUs of its node and takes that of its local rank, as JAX expects; so no
# binding by Slurm. One that dies ends the others.
step=(srun --kill-on-bad-exit=1 --gpu-bind=none --cpus-per-task="$cpus")
step+=("$venv/bin/retmask" "${stage[@]}")

run sbatch --job-name="$job_name" --nodes="$nodes" --ntasks-per-node="$gpus" \
  --gpus-per-node="$gpus" --cpus-per-task="$cpus" ${time:+--time="$time"} \
  ${partition:+--partition="$partition"} ${account:+--account="$account"} \
  --output="$job_name-%j.log" --open-mode=append --requeue ${more[@]+"${more[@]}"} \
  --wrap="$(quote "${step[@]}")"
