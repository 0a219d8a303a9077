"""Products for Hopper in CUDA C++: of prompts, with what follows them in their registers, and of decodes.

prompt_product.cu: cuBLAS writes gate and up of every token to memory, and an activation kernel reads them
again; here both meet in one thread. On an H200, 8192 tokens of Llama-3.2-1B took it 776 to 847 us in several
variants, cuBLAS and the activation kernel 885 to 920. Triton can say that, too, but its product reached three
quarters of cuBLAS's rate: 1032 us. Its plain products, with a residual or without, can start beside the
kernel before them; they were not measured yet, and only tests and benchmarks take them.
decode_product.cu: 65 to 256 rows are too few for cuBLAS's tiles, and too many to be bound by reading weights.
draw_product.cu: the LM head whose tiles draw, of 9 to 256 rows. It was not measured yet, either.

The instructions are those of hopper_prefill and hopper_decode and some more; the same sources run on a CPU in
tests.
"""
