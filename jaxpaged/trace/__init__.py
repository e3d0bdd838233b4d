"""Traces by JAX's profiler, summed up by stage."""
