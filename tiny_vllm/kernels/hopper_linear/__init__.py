"""Products of prompts for Hopper in CUDA C++, with what follows them in their registers.

cuBLAS writes gate and up of every token to memory, and an activation kernel reads them again; here both meet
in one thread. Triton can say that too, but reaches two thirds of cuBLAS's rate: it has no copies that serve
two multiprocessors at once. The instructions are those of hopper_prefill and some more; the same source runs
on a CPU in tests.
"""
