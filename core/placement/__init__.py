"""Where the processes of a run are: its allocation, the way of its weights, and the Ray cluster that it joins."""
