"""Code for CUDA only: kernels, copies by the GPU, calls of the driver. Begin with docs/gpu.md."""
