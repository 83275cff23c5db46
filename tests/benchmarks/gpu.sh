#!/usr/bin/env bash
# usage: tests/benchmarks/gpu.sh [--size=tiny|360m|1b|3b|8b]
#
# On one accelerator, in at most 8 minutes: the numbers it computes against those of the CPU, then
# the speed of a train step (MFU), of decoding (share of the memory's bandwidth) and of prefill, on
# Llama-shaped models with random weights as large as fit (--size takes another). Without an
# accelerator it runs on the CPU, tiny. Prints a line for each figure and all of them as JSON in the
# end; status 1 if the numbers differ.
#
# PYTHON=…  the Python that has retmask_jax installed (with the extra cuda13); default: .venv's

set -euo pipefail
cd "$(dirname "$0")/../.."

case ${1-} in
  -h | --help)
    sed -n '2,/^$/s/^# \{0,1\}//p' tests/benchmarks/gpu.sh
    exit
    ;;
esac
export XLA_PYTHON_CLIENT_MEM_FRACTION=${XLA_PYTHON_CLIENT_MEM_FRACTION:-0.92}
exec timeout 480 "${PYTHON:-.venv/bin/python}" tests/benchmarks/gpu.py "$@"
