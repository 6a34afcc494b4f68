"""The baseline of DASO: ResNet-50 on ImageNet with gradients averaged at every step.

This is Horovod in daso-journal, Sec. "Performance evaluation". The other keys are those of
imagenet_resnet50_daso.py. Horovod's wire is float16. Here it is bfloat16, as in DASO. The "classic"
method of the paper is --wire float32.
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
