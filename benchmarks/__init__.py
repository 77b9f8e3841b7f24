"""Speed beside torch, stock fairseq and the plain ResNet: operator, transformer and resnet, each run with python -m."""
