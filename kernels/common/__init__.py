"""What several kernels share: the choice of implementation, and the running top-k of the Triton kernels."""
