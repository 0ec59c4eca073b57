"""Many ranks: programs that run under mpiexec, and the tests that launch them.

On the CPU the ranks of a program share what cores there are and speak MPI; where there is a GPU for each rank, what an
engine would send with NCCL goes through torch.distributed. `MULTI_GPU_FULL=1` (`make test-multi`) runs the full counts.
"""
