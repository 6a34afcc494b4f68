"""DaSGD on CIFAR-10 (dasgd Sec. IV-A and IV-B, Table I): 32 workers of one device, 50 epochs.

The paper's learning rate is 0.01 at its peak, whatever the number of workers, and rises for 30 % of
the epochs; here the peak is 0.01 for 32 devices: for another number N give --learning-rate 0.01/N.

Deviations: the paper's rate starts from 0.0001 and falls to it in a straight line, here it starts
from 0 and falls to it as a cosine. fast.ai, the authors' platform, decays weights beside the
gradient, here they decay in it, and norms and biases do not. Table I has ResNet-50 and other large
networks. An epoch has 48 steps, where the paper has 49: the rest fills no batch everywhere. xi is
that of Fig. 6; how images are augmented is not said, here it is as in He et al.
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
