"""The fused kernels: what `kernel_cases.py` asks, run where they can run; that they compile for GPUs that are not here;
and which backend a stage takes."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
import torch
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.compiler import compile as compile_ahead

from structured_commit import CommitConfig, CommitStage, StageError, backend, kernel, kernel_repair
from structured_commit.packed import pack
from tests.support.calls import calls_table

ROOT = Path(__file__).parents[2]
CASES = "tests/unit/kernel_cases.py"
HOPPER, BLACKWELL = 90, 120


def test_the_kernels_give_what_torch_gives():
    """In a process of its own: Triton reads the switch of its interpreter once, when it is imported."""
    switch = {} if torch.cuda.is_available() else {backend.INTERPRETER: "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", CASES]
    outside = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
    done = subprocess.run(command, cwd=ROOT, env=outside | switch, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]


# --- ahead of time ------------------------------------------------------------------------------------------------

INT32, INT64, BYTE = "*i32", "*i64", "*u8"
POINTERS = dict.fromkeys(("slots", "steps", "counters", "source_rows", "words"), INT64)
POINTERS |= dict.fromkeys(("token_class", "transitions", "flags"), BYTE)
POINTERS |= dict.fromkeys(
    ("tokens", "lengths", "new_tokens", "new_lengths", "events", "urgency", "illegal_at", "state_before"), INT32
)
POINTERS |= dict.fromkeys(("state", "repairs", "escape_token", "top_k"), INT32)
POINTERS |= dict.fromkeys(("temperature", "top_p"), "*fp32")
WIDE = {"seed_low": "i64", "seed_high": "i64", "source_row": "i64"}


def compiled(function, constants: dict, kinds: dict, architecture: int, num_warps: int):
    """The kernel as a driver would load it, without one."""
    names = function.arg_names
    signature = {n: "constexpr" if n in constants else (POINTERS | WIDE | kinds).get(n, "i32") for n in names}
    places = {(names.index(n),): value for n, value in constants.items()}
    return compile_ahead(
        ASTSource(fn=function, signature=signature, constexprs=places),
        target=GPUTarget("cuda", architecture, 32),
        options={"num_warps": num_warps, "enable_fp_fusion": False},
    )


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


@pytest.mark.parametrize(
    ("architecture", "policy", "redraws"),
    [(HOPPER, "repair", True), (BLACKWELL, "gate", True), (HOPPER, "rollback", False), (BLACKWELL, "trim", False)],
)
def test_the_commit_compiles_for_gpus_that_are_not_here(architecture, policy, redraws):
    constants = {"POLICY": policy, "REDRAWS": redraws, "ROWS": 32}
    program = compiled(kernel.commit_kernel, constants, {}, architecture, num_warps=1)
    assert program.asm["cubin"]
    assert f".target sm_{architecture}" in program.asm["ptx"]


@pytest.mark.parametrize(
    ("architecture", "kind", "scores", "tree", "words"),
    [
        (HOPPER, "probs", "*fp32", False, False),
        (HOPPER, "sampled", "*bf16", True, False),
        (BLACKWELL, "greedy", "*fp64", True, True),
    ],
)
def test_the_redraw_compiles_for_gpus_that_are_not_here(architecture, kind, scores, tree, words):
    constants = {"KIND": kind, "HAS_SOURCE_ROWS": tree, "HAS_WORDS": words, "SCAN": 512, "BLOCK": 4096, "BLOCKS": 64}
    constants |= dict.fromkeys(("HAS_TOP_K", "HAS_TOP_P"), kind == "sampled")
    program = compiled(kernel_repair.repair_kernel, constants, {"source": scores}, architecture, num_warps=16)
    assert program.asm["cubin"]
    # A distance between logits must be what torch computes: rounded to nearest, nothing fused.
    floats = set(re.findall(r"\b(?:div|fma)\.[.\w]*f32\b", program.asm["ptx"]))
    assert floats == ({"div.rn.f32"} if kind == "sampled" else set())


# --- which backend ------------------------------------------------------------------------------------------------


def stage(name: str) -> CommitStage:
    return CommitStage(calls_table(), CommitConfig(backend=name), num_slots=1, max_window=1)


@pytest.fixture
def as_on_a_gpu(monkeypatch, caplog):
    """The choice as it falls for a stage on a GPU; what the stage owns stays where it is."""
    monkeypatch.setattr(backend, "_said", set())

    def choose(name: str) -> str:
        made = stage("torch")
        made.device = torch.device("cuda")
        made.config = CommitConfig(backend=name)
        return backend.choose_backend(made).name

    return choose


def test_on_a_cpu_the_choice_is_to_look_first():
    assert (stage("auto").backend, stage("host").backend, stage("torch").backend) == ("host", "host", "torch")


def test_without_numpy_a_cpu_runs_plain_torch(monkeypatch):
    monkeypatch.setitem(sys.modules, "structured_commit.host_commit", None)
    assert stage("auto").backend == "torch"
    with pytest.raises(StageError, match="backend 'host' cannot be used: .*; install numpy, or use 'torch'"):
        stage("host")


def test_a_gpu_is_never_looked_at_by_the_host(as_on_a_gpu):
    with pytest.raises(StageError, match="on cuda that waits for the device at every step; use 'auto'"):
        as_on_a_gpu("host")


@pytest.mark.skipif(torch.cuda.is_available(), reason="asks for a stage on the CPU beside a GPU's Triton")
def test_asking_for_triton_on_a_cpu_says_what_to_do(monkeypatch):
    monkeypatch.delenv(backend.INTERPRETER, raising=False)
    with pytest.raises(StageError, match=r"on cpu .* its interpreter; set TRITON_INTERPRET=1 before Python starts"):
        stage("triton")


def test_an_unknown_backend_is_refused_with_the_allowed_ones():
    with pytest.raises(StageError, match="unknown backend 'cuda'; choose one of: auto, host, torch, triton"):
        CommitConfig(backend="cuda")


def no_triton(monkeypatch):
    monkeypatch.setitem(sys.modules, "triton", None)
    return "Triton cannot be imported"


def old_triton(monkeypatch):
    monkeypatch.setattr("triton.__version__", "3.1.0")
    return "Triton 3.1.0 is older than 3.3"


def broken_compiler(monkeypatch):
    monkeypatch.setitem(sys.modules, "structured_commit.fused", None)
    return "its kernels do not compile here"


@pytest.mark.parametrize("obstacle", [no_triton, old_triton, broken_compiler])
def test_a_triton_that_cannot_be_used_is_said_once_and_torch_takes_over(as_on_a_gpu, monkeypatch, caplog, obstacle):
    reason = obstacle(monkeypatch)
    assert [as_on_a_gpu("auto"), as_on_a_gpu("auto")] == ["torch", "torch"]
    assert len(caplog.records) == 1
    assert reason in caplog.text
    with pytest.raises(StageError, match=f"backend 'triton' cannot be used: {reason}"):
        as_on_a_gpu("triton")


def test_the_version_at_hand_is_new_enough():
    assert backend._numbers(metadata.version("triton")) >= backend.OLDEST_INTERPRETER
    assert backend._numbers("3.10.1+git1234") > (3, 5)


# --- the packed table ---------------------------------------------------------------------------------------------


def test_a_small_table_is_packed_into_bytes():
    table = calls_table()
    packed = pack(table)
    assert (packed.token_class.dtype, packed.transitions.dtype, packed.illegal) == (torch.uint8, torch.uint8, 255)
    unpacked = packed.transitions.to(torch.int16)
    assert torch.equal(torch.where(unpacked == packed.illegal, -1, unpacked), table.transitions)
    assert torch.equal(packed.token_class.to(torch.int16), table.token_class)
    assert packed.nbytes < table.nbytes
