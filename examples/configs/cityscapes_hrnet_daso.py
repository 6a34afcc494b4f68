"""DASO: semantic segmentation of Cityscapes (daso-journal Table 3, daso-preprint Sec. 4.2).

1, 2, ... nodes of four A100 each; --data is the folder with leftImg8bit and gtFine. For segment.py.

The peak of the learning rate is 0.4 whatever the number of devices, here of 32: for another number
N give --learning-rate 0.4/N. Neither paper tells batch and crop, nor when a loss is stable.
Widths and blocks are those of HRNet-W48; see segmentation/hrnet.py for what differs from it.
"""

model = "hrnet"
widths = (48, 96, 192, 384)
blocks = 4
data = "cityscapes"
height = 512
width = 1024
epochs = 175
batch_size = 2
learning_rate = 0.4 / 32
warmup_epochs = 5
cooldown_epochs = 5
decay = "plateau"
decay_factor = 0.75
decay_patience = 5
momentum = 0.9
weight_decay = 1e-4

sync = "daso"
period = 4
delay = 1
