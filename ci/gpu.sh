#!/usr/bin/env bash
# Everything that needs a GPU, in one command: bash ci/gpu.sh [step …]; steps: apply unit ranks replay parity serve.
#   TAG=1.2.1     the container nvcr.io/nvidia/tensorrt-llm/release:$TAG
#   IMAGE=…       another image; IMAGE=none: TensorRT-LLM is installed here, use no container
#   HF_HOME=…     where checkpoints are kept (read by the serve step)
# Exit status: 0 all passed, 1 a step failed, 3 no GPU here, 4 no container runtime.
set -euo pipefail
cd "$(dirname "$0")/.."

if ! command -v nvidia-smi > /dev/null || ! nvidia-smi --list-gpus 2> /dev/null | grep -q GPU; then
  echo "no NVIDIA GPU here: nvidia-smi finds none. 'make test' runs everything that needs no GPU." >&2
  exit 3
fi
nvidia-smi --query-gpu=index,name,compute_cap,driver_version,memory.total --format=csv

image="${IMAGE:-nvcr.io/nvidia/tensorrt-llm/release:${TAG:-1.2.1}}"
if [ "$image" = none ]; then
  exec bash ci/inside.sh "$@"
fi
if ! command -v docker > /dev/null; then
  echo "no docker here: install it with NVIDIA's container toolkit, or set IMAGE=none where TensorRT-LLM is installed." >&2
  exit 4
fi
cache="${HF_HOME:-$HOME/.cache/huggingface}"
mkdir -p "$cache"
echo "in $image"
exec docker run --rm --gpus all --ipc=host --ulimit memlock=-1 --ulimit stack=67108864 \
  --volume "$PWD:/structured-commit" --workdir /structured-commit \
  --volume "$cache:/huggingface" --env HF_HOME=/huggingface --env HF_TOKEN \
  --env MODEL --env DRAFT --env REQUESTS --env TOOL_PARSER \
  "$image" bash ci/inside.sh "$@"
