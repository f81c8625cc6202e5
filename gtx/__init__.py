"""gtx trains graph transformers on graphs that outgrow one device, under plans that may change while training runs."""

__version__ = "0.1.0"
