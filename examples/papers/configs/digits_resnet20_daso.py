"""The demonstration on scikit-learn's digits. Every key has its default.

It shows DASO's three phases within minutes on two cores and is not a published experiment. Run it
with ``mpiexec -n 2 python examples/papers/train.py --devices 2``.
"""

model = "resnet20"
data = "digits"
epochs = 24
batch_size = 16
learning_rate = 0.025  # 0.1 for two processes of two devices
warmup_epochs = 3
cooldown_epochs = 3
decay = "cosine"
momentum = 0.9
weight_decay = 1e-4

sync = "daso"
period = 4
delay = 2
