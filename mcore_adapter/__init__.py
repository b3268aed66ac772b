"""Megatron-core behind a small engine; Hugging Face weights in and out."""

import warnings

# Without a GPU Megatron says so once per file that it imports, and it warns of its own configuration defaults.
warnings.filterwarnings("ignore", message=r".*(Transformer Engine|Apex)\b.* not installed", category=UserWarning)
warnings.filterwarnings("ignore", message=r"full scope is deprecated", category=UserWarning)
