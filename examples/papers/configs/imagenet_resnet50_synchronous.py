"""The baseline of DASO: ResNet-50 on ImageNet with gradients averaged at every step.

It takes the place of Horovod in daso-journal, Sec. "Performance evaluation". The other keys are
those of imagenet_resnet50_daso.py. The mean is the same, but Horovod sends fused parts of the
gradients during the backward pass, and its wire is float16. Here the wire is bfloat16, as in DASO,
and everything is sent at once after the backward pass. --wire float32 has the numbers of the
paper's "classic" method, which overlaps with the backward pass as well.
"""

model = "resnet50"
data = "imagenet"
min_area = 0.08
epochs = 90
batch_size = 256
learning_rate = 0.0125
warmup_epochs = 5
decay = "plateau"
decay_factor = 0.5
decay_patience = 5
decay_threshold = 0.05
momentum = 0.9
weight_decay = 1e-4

sync = "allreduce_gradients"
wire = "bfloat16"
