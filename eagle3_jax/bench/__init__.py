"""Benchmarks: the bandwidth floor, the cost of each stage, speculative and plain decoding in turns."""
