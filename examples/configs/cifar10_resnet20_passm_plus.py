"""PASSM+ on CIFAR-10 (passm Figure 1 and Table 1: 92.7 %): four processes that share one model.

    python examples/train.py --config examples/configs/cifar10_resnet20_passm_plus.py --data ...

Minibatches of 256 per process; the switches are those of the table. ASSM is --sync assm --switches,
with none after it, and so is PASSM. Deviations: norms and biases do not decay here, shortcuts that
widen are projections, and batch statistics are each process's own until they are averaged to be
evaluated. The paper does not say how it augments; this is what is usual.
"""

model = "resnet20"
data = "cifar10"
augment = "random_crop"
padding = 4
epochs = 300
batch_size = 256
learning_rate = 0.1
warmup_epochs = 0
decay = "step"
decay_factor = 0.1
decay_epochs = (150, 225)
momentum = 0.9
weight_decay = 5e-4

sync = "passm_plus"
processes = 4
switches = (75, 135, 165, 210, 225)
