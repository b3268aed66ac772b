"""Sessions: programs that talk to the policy through an HTTP endpoint, recorded token by token."""
