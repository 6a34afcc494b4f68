"""DASO: ResNet-50 on ImageNet (daso-journal Table 1 and Sec. "Performance evaluation").

The paper uses 4, 8, 16, 32 and 64 nodes of four A100 each. --data is the folder of ImageNet-2012.

These values are not in the paper but in the authors' script (Heat, examples/nn/imagenet-DASO.py):
the learning rate and the batch of a GPU, the threshold of a stable loss, and, as the defaults of
Heat's DASO, 4 epochs of cool-down. Its warm-up is 4 epochs as well. Here it is 5, because
warmup_epochs is also the warm-up of the learning rate, for which the paper has 5.

Deviations from the script: the smallest area of a crop is the usual 0.08, not 0.05. The learning
rate may fall below 0.0001. Pixels are scaled to [-1, 1]. Norms and biases do not decay, and the
last norm of a block starts at 0, both as in Goyal et al., which the paper cites for the warm-up.
"""

model = "resnet50"
data = "imagenet"
min_area = 0.08
epochs = 90
batch_size = 256
learning_rate = 0.0125
warmup_epochs = 5
cooldown_epochs = 4
decay = "plateau"
decay_factor = 0.5
decay_patience = 5
decay_threshold = 0.05
momentum = 0.9
weight_decay = 1e-4

sync = "daso"
period = 4
delay = 1
