"""Decode attention for Hopper in CUDA C++, for batches large enough to be bound by reading keys and values.

Written in CUDA C++ for the reason that hopper_prefill is: what counts is which warp copies and when it waits.
attention.cu describes the kernel, launch.py says what it takes. It runs on a CPU, too, over an emulation of
the device's asynchronous units, which is how tests find early reuse and missing waits without a GPU.
"""
