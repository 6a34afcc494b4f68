"""A language model of the size that the DiLoCo paper calls 150 M, with Streaming DiLoCo.

DiLoCo (arXiv:2311.08105): 12 layers, 16 heads, width 896. Its heads have 64 numbers, and here they
have 896 / 16 = 56. Streaming DiLoCo (arXiv:2501.18512): fragments of 3 layers in a strided order, a
delay of 5 steps, mixing 0.5, outer learning rate 0.4. Its 4 bits have 3 bits of exponent; those of
float4 have 2, and 1 of mantissa. The hidden width gives SwiGLU the parameters of a layer with 3584.
With bytes as tokens, the model has 116 M parameters. With the paper's vocabulary of 32 000,
--tokenizer, it has 144 M. On 16 devices the training has 6400 steps, which are 213 rounds of 30
steps. The papers have no warm-up of plain averaging, which lowered the loss of smaller models
(--outer-warmup 10).
"""

layers = 12
heads = 16
width = 896
hidden = 2392
context = 1024

epochs = 100
epoch_tokens = 2**25
test_tokens = 2**20
batch_size = 32
accumulate = 8
optimizer = "adamw"
learning_rate = 4e-4
warmup_epochs = 1
weight_decay = 0.1
clip = 1.0
compute_dtype = "bfloat16"
remat = True
shard = True

sync = "streaming_diloco"
period = 30
delay = 5
own_weight = 0.5
fragments = 4
outer_rate = 0.4
outer_warmup = 0
wire = "float4"
