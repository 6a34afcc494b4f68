"""ResNet-20 on CIFAR-10 (He et al. 2016, Deep residual learning, Sec. 4.2 and Table 6: 91.25 %).

The paper's batch of 128 and learning rate of 0.1 are those of four devices; with others both are
scaled, which is why there is a warm-up, that the paper has for 110 layers only. Its 64 000 steps,
with a tenth of the learning rate from 32 000 and 48 000 on, are 164 epochs of all 50 000 images.
Here norms and biases do not decay, and shortcuts that widen are projections.
"""

model = "resnet20"
data = "cifar10"
augment = "random_crop"
padding = 4
epochs = 164
batch_size = 32
learning_rate = 0.025
warmup_epochs = 5
decay = "step"
decay_factor = 0.1
decay_epochs = (82, 123)
momentum = 0.9
weight_decay = 1e-4

sync = "allreduce_gradients"
wire = "float32"
