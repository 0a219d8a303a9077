"""Products for Hopper in CUDA C++, of prompts and of decodes, with what follows in their registers.

gated_product.cu: cuBLAS writes gate and up of every token to memory, and an activation kernel reads them
again; here both meet in one thread. On an H200, 8192 tokens of Llama-3.2-1B took it 776 to 847 us in several
variants, cuBLAS and the activation kernel 885 to 920. Triton can say that, too, but its product reached three
quarters of cuBLAS's rate: 1032 us. Prompts' other products are cuBLAS's: by the same kernel, with the
residual added, they took as long, and all layers longer.
decode_product.cu: 9 to 256 rows are too few for cuBLAS's tiles, and most of them too many to be bound by
reading weights.
draw_product.cu: the LM head whose tiles draw, of 9 to 256 rows.

The instructions are those of hopper_prefill and hopper_decode and some more; the same sources run on a CPU in
tests.
"""
