"""Prove the algorithms: golden numbers, gradients by finite differences, and the functions of other projects."""
