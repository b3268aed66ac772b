"""What a training loop is made of: batches cut from leases, passes over them, and what is due after a step."""
