#!/usr/bin/env bash
# Check dispatch under another torch: scripts/check_torch.sh 2.7.1 [folder of an environment to keep and use again]
# Makes an environment with that release from PyPI (on Linux a CUDA build, which does not load without NVIDIA's libraries:
# about 3 GB to fetch, 7 GB on disk), runs check_torch.py in it, and writes scripts/results/check_torch-VERSION.json.
set -euo pipefail

version=${1:?usage: check_torch.sh VERSION [ENVIRONMENT]}
root=$(cd "$(dirname "$0")/.." && pwd)

if [ -n "${2:-}" ]; then
    environment=$2
else
    environment=$(mktemp -d)
    trap 'rm -rf "$environment"' EXIT
fi
if [ ! -x "$environment/bin/python" ]; then
    "${PYTHON:-python3}" -m venv "$environment"
    "$environment/bin/pip" install --quiet --no-cache-dir "torch==$version" 'numpy<2.3' packaging
fi

mkdir -p "$root/scripts/results"
cd "$root"
OMP_NUM_THREADS=1 PYTHONPATH=$root "$environment/bin/python" scripts/check_torch.py \
    --output "scripts/results/check_torch-$version.json"
