"""Optional kernels for CPUs, built by the machine's own C++ compiler when they are first asked for."""
