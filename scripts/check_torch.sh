#!/usr/bin/env bash
# Checks dispatch with another release of torch, for example: scripts/check_torch.sh 2.7.1 [ENVIRONMENT]
# Installs that release in a virtual environment, runs check_torch.py there, and writes scripts/results/check_torch-VERSION.json.
# ENVIRONMENT is a folder for the environment, which is kept and reused; the default is temporary. On Linux the release is a
# CUDA build, which does not load without NVIDIA's libraries: about 3 GB to download, 7 GB on disk.
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
