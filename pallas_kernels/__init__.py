"""Kernels behind one contract each: a plain reference, an XLA version for any device, and compiled ones where they pay."""
