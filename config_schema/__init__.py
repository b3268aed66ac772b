"""How a key of the configuration is declared: by the component that reads it, once."""
