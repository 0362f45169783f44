"""Kernels for transformer inference in JAX, useful without jaxinfer: each subpackage owns one
operation.
"""
