"""An optional kernel for CPUs, built by the machine's own C++ compiler when it is first asked for."""
