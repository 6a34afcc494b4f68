"""DASO: semantic segmentation of Cityscapes (daso-journal Table 3, daso-preprint Sec. 4.2).

This is a configuration for segment.py and for 1, 2, ... nodes of four A100 each. --data is the
folder with leftImg8bit and gtFine.

The paper's peak of the learning rate is 0.4 for any number of devices. Here it is 0.4 with 32
devices. With N devices give --learning-rate 0.4/N. Neither paper gives the batch, the crop, or the
threshold of a stable loss, nor the lengths of DASO's phases: the cool-down of 4 epochs is the
default of Heat, the authors' code, and the warm-up is that of the learning rate. Widths and blocks
are those of HRNet-W48. segmentation/hrnet.py lists the differences from it.
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
cooldown_epochs = 4
decay = "plateau"
decay_factor = 0.75
decay_patience = 5
momentum = 0.9
weight_decay = 1e-4

sync = "daso"
period = 4
delay = 1
