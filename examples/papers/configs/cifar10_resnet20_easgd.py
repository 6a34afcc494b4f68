"""EASGD on CIFAR-10 (easgd Sec. 5, Fig. 3, and 9.1 to 9.3 of its supplement): four workers.

Images are cropped to 28x28 pixels and mirrored at random. The batch has 128 images. The learning
rate is constant, the largest of the three that the paper tried. There is no momentum. beta is 0.9,
hence alpha = beta / 4 at every exchange. With N devices give --learning-rate 0.05/N.

Deviations: the paper trains a network of 7 layers with dropout, asynchronously, for a given time
and not for a number of epochs. Here norms and biases do not decay. EAMSGD is --sync eamsgd
--momentum 0.99 with a learning rate of at most 0.01/N.
"""

model = "resnet20"
data = "cifar10"
image_size = 28
augment = "random_crop"
epochs = 100
batch_size = 128
learning_rate = 0.05 / 4
warmup_epochs = 0
decay = "constant"
momentum = 0.0
weight_decay = 1e-4

sync = "easgd"
period = 10
