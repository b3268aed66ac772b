"""Many small runs from one warm-up on the demo's additions: resumable, several at a time, one JSON row each."""
