"""Code for CPUs only: a kernel in C++, compiled at start where there is a compiler."""
