"""ResNet-20 on CIFAR-10 (He et al. 2016, Deep residual learning, Sec. 4.2 and Table 6: 91.25 %).

The paper's batch of 128 and learning rate of 0.1 are those of four devices. With other numbers of
devices both are scaled, which needs a warm-up. The paper has a warm-up for 110 layers only. Its
64 000 steps are 164 epochs of all 50 000 images. The learning rate falls to a tenth after 32 000
and after 48 000 steps. Norms and biases do not decay here, and shortcuts that widen are
projections.
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
