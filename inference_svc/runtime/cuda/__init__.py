"""What only CUDA has: kernels, and calls of the driver. Imports nothing of the runtime's."""
