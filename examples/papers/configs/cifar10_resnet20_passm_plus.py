"""PASSM+ on CIFAR-10 (passm Figure 1 and Table 1: 92.7 %): four processes that share one model.

    python examples/papers/train.py --data ... \\
        --config examples/papers/configs/cifar10_resnet20_passm_plus.py

Each process has minibatches of 256. The switches are those of the table. ASSM is --sync assm
--switches (with no value), and PASSM is --sync passm --switches.

Deviations: norms and biases do not decay, shortcuts that widen are projections, and each process
has its own batch statistics, which are averaged for an evaluation. The paper does not describe the
augmentation. The one here is usual for CIFAR-10.
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
