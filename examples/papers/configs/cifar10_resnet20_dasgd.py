"""DaSGD on CIFAR-10 (dasgd Sec. IV-A and IV-B, Table I): 32 workers of one device, 50 epochs.

The paper's learning rate rises for 30 % of the epochs to a peak of 0.01, for any number of workers.
Here the peak is 0.01 with 32 devices. With N devices give --learning-rate 0.01/N.

Deviations from the paper:

- The paper's learning rate starts at 0.0001 and falls to it linearly. Here the learning rate starts
  at 0 and falls to 0 as a cosine.
- fast.ai, the authors' platform, decays weights separately from the gradient. Here weight decay is
  part of the gradient, and norms and biases do not decay.
- Table I has ResNet-50 and other large networks.
- An epoch has 48 steps, the paper's has 49, because images that do not fill a batch are left out.
- xi is that of Fig. 6. The paper does not describe the augmentation. Here it is that of He et al.
"""

model = "resnet20"
data = "cifar10"
augment = "random_crop"
padding = 4
epochs = 50
batch_size = 32
learning_rate = 0.01 / 32
warmup_epochs = 15
decay = "cosine"
momentum = 0.9
weight_decay = 0.01

sync = "dasgd"
period = 4
delay = 1
own_weight = 0.25
