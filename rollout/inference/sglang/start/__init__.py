"""What shortens the start of a server; run with its interpreter, by path."""
