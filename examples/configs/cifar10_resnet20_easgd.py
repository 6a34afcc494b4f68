"""EASGD on CIFAR-10 (easgd Sec. 5, Fig. 3, and 9.1 to 9.3 of its supplement): four workers.

28x28 pixels, cropped and mirrored at random; batches of 128, a constant learning rate, the largest
of the three that were tried, and no momentum; beta = 0.9, of which alpha = beta / (4 * period).
With another number of devices than four give --learning-rate 0.05/N. Deviations: the paper trains
a network of 7 layers with dropout, asynchronously, for a time and not for a number of epochs; norms
and biases do not decay here. EAMSGD is --sync eamsgd --momentum 0.99 and a rate of 0.01/N or less.
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
