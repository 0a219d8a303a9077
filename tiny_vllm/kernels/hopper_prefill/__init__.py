"""Prefill attention for Hopper in CUDA C++: tensor-core products that run beside the softmax.

Written in CUDA C++ and not in Triton, because what makes it fast is what Triton does not say: which warps
copy, when a product is waited for, and whose turn it is to issue one. Triton's own language for that (Gluon)
is an experiment that changes with every version; NVRTC and PTX stay. And the same source runs on a CPU, with
an emulation of the device's asynchronous units in the place of instructions.cu: tests find wrong parities,
early reuse and missing fences without a GPU.
"""
