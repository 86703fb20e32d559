"""CUDA graphs of layers and training steps: ``tessera_rt.capture``. The contract is docs/capture.md."""
