"""A language model of the size that the DiLoCo papers call 35 M, with DiLoCo.

Streaming DiLoCo and the scaling laws (arXiv:2501.18512, arXiv:2503.09799): 6 layers, 8 heads, width
512, sequences of 1024 tokens, period 30, AdamW with a clipped norm and a cosine to 5 %. The hidden
width gives SwiGLU the parameters of their layer with 2048. With bytes as tokens, the model has 19 M
parameters. With the papers' vocabulary of 32 000, --tokenizer, it has 35 M. The papers have no
warm-up of plain averaging, which lowered the loss of smaller models (--outer-warmup 10).
"""

layers = 6
heads = 8
width = 512
hidden = 1368
context = 1024

epochs = 100
epoch_tokens = 2**23
test_tokens = 2**20
batch_size = 32
accumulate = 4
optimizer = "adamw"
learning_rate = 1e-3
warmup_epochs = 2
weight_decay = 0.1
clip = 1.0
compute_dtype = "bfloat16"

sync = "diloco"
period = 30
outer_rate = 0.6
outer_warmup = 0
