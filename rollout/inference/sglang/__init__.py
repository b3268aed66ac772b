"""SGLang servers as generators."""
