"""Megatron models: one file a family (families.FAMILIES), what layers are made of, how weights are named."""
