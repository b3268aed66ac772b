"""Megatron-core behind a small engine; Hugging Face weights in and out."""

import logging
import warnings

from mcore_adapter.models import quick_import

quick_import.install()

# Megatron logs at import, once per file, what is not installed without a GPU; and it warns of its own defaults and of
# torch functions that it still uses. None of it is for the user to act on.
for _message in (
    r".*(Transformer Engine|Apex)\b.* not installed",
    r"full scope is deprecated",
    r"`load_state_dict` is deprecated",
    r"Please use DTensor instead",
):
    warnings.filterwarnings("ignore", message=_message)


def _is_wanted(record: logging.LogRecord) -> bool:
    # Megatron passes arguments to the MLP classes that it knows. The layers here have their own, which need none.
    return not record.getMessage().startswith("Unknown MLP type: ")


logging.getLogger("megatron.core.transformer.transformer_layer").addFilter(_is_wanted)
