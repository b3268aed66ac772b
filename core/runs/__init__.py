"""What a trial has on disk: its folders, its recover checkpoints, and the record of its starts."""
