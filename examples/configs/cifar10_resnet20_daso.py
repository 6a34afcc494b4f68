"""DASO on CIFAR-10, with the authors' period, delay and phases for ImageNet.

Period, delay, warm-up and cool-down are those of daso-journal (Table 1 and Sec. "Performance
evaluation"). The authors did not train on CIFAR-10. All other keys are those of the baseline,
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
cooldown_epochs = 5
decay = "step"
decay_factor = 0.1
decay_epochs = (82, 123)
momentum = 0.9
weight_decay = 1e-4

sync = "daso"
period = 4
delay = 1
