"""From the text of a YAML file and of overrides to typed values, with the place of each."""
