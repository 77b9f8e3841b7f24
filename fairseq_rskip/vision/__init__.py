"""PreAct-ResNet on CIFAR with the residual module of this package; nothing here imports fairseq."""
