"""Code for CPUs only: kernels in C++, compiled at start where there is a compiler."""
