"""Keys of other trainers: what they are called here, or why they have no effect."""
