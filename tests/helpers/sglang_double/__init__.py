"""A test double of a SGLang server over HTTP, and the proof that it behaves like one."""
