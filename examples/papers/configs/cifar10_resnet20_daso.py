"""DASO on CIFAR-10, with the authors' period and delay for ImageNet.

Period and delay are those of daso-journal (Sec. "Performance evaluation"). The cool-down of 4
epochs is the default of Heat, the authors' code, because the papers do not give the length of a
phase. The warm-up of 5 is that of the learning rate in Table 1, with which DASO blocks here. The
authors did not train on CIFAR-10. All other keys are those of the baseline,
cifar10_resnet20_synchronous.py.
"""

model = "resnet20"
data = "cifar10"
augment = "random_crop"
padding = 4
epochs = 164
batch_size = 32
learning_rate = 0.025
warmup_epochs = 5
cooldown_epochs = 4
decay = "step"
decay_factor = 0.1
decay_epochs = (82, 123)
momentum = 0.9
weight_decay = 1e-4

sync = "daso"
period = 4
delay = 1
