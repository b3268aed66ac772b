"""The studio: configure, watch and understand runs in a browser. `python -m tools.studio`, or `slipstream studio`."""
