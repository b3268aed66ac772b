"""Prove the algorithms by golden numbers and finite differences."""
