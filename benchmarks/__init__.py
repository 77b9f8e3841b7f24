"""Speed beside torch, stock fairseq and the plain ResNet; run as ``python -m benchmarks.operator`` (transformer, resnet)."""
